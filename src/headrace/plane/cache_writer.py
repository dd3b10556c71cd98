"""CacheWriter: packs delivered samples into segments of a disk cache, in the background.

A bounded queue of batches and one thread with low priority. `offer` never waits: what does not fit into
the queue is left for the next epoch, and counted. While the consumer waits for a fast source, only a share
of what it gets is written (`writer_share`). A full disk or a used-up quota ends the writing, is reported
once, and training goes on.

A segment is written in a locked folder of its own, so that the next process can tell a segment that is
being written from one whose writer was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import os
import shutil
import threading
import time
import weakref
from collections import deque
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace.base.files import create_file, lock, lock_path, make_folder, open_folder, write_all
from headrace.store.directory import DirectoryColumns, join_names, write_directory
from headrace.store.format import DATA_OFFSET, VolumeHeader, padded_size, volume_uuid
from headrace.store.manifest import VolumeEntry, segment_of_header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.plane.disk_cache import DiskCache
    from headrace.store import Store
    from headrace.store.manifest import Segment

    Offer = tuple[_native.Batch, NDArray[np.int64], int]

_MIB = 1 << 20
_GIB = 1 << 30

BUSY_SHARE = 0.15
"""Of a data set that is packed in an epoch whose consumer only waits: all of it after seven."""

SLOW_BYTES_PER_S = 400e6
"""Less than any local NVMe device gives, more than most shared file systems give a node."""


def segment_bytes(data_bytes: int) -> int:
    """Bytes that are published at a time: what a kill can cost, and one file of the cache."""
    return min(max(data_bytes // 32, 64 * _MIB), _GIB)


def publish_after_s(segments: int) -> float:
    """Seconds after which a segment is published though it is not full.

    A slow source would otherwise make thousands of small segments: the more there are, the longer.
    """
    return 30.0 * max(1.0, segments / 64)


def writer_share(source_bytes_per_s: float, waiting: float) -> float:
    """Bytes that may be written to the cache for each byte that is delivered.

    While the consumer works, or the source is slow, all of them. While it waits for a fast source,
    the reader needs the disk and the processors itself, and gains least from the cache: where both lie
    on one NVMe device, writing a quarter of what is read costs an eighth of the speed.

    Args:
        source_bytes_per_s: how fast the source can be, see `CacheWriter.note_batch`; 0.0: not known yet.
        waiting: how often the consumer had to wait lately, 0.0 to 1.0.
    """
    slow = 0.0 < source_bytes_per_s < SLOW_BYTES_PER_S
    return 1.0 if slow or waiting < 0.5 else BUSY_SHARE


def writes_direct(source_bytes_per_s: float) -> bool:
    """Whether the cache is written past the page cache.

    Beside a slow source, processors have time for the page cache, and what it keeps makes the next epoch
    faster than the disk. A fast one needs the time: a buffered write takes 0.5 to 1.1 CPU s/GB and
    a thread of the kernel's for writing back, a direct one 0.3 (measured on a loaded machine).
    """
    return not 0.0 < source_bytes_per_s < SLOW_BYTES_PER_S


INDEX_COLUMN = "headrace.source_index"
"""The column that says which sample of the data set a cached one is."""

DIRECTORY_BYTES = 128  # what a directory needs for a sample, its name included, generously
_PREFIX = "tail-"
_numbers = itertools.count()

IN_SEGMENT = -1  # in `DiskCache.places`: being written


class CacheSegment:
    """A segment being written.

    Raises OSError if the folder cannot be written, or the disk is full.
    """

    def __init__(
        self, cache: Path, capacity: int, part_names: Sequence[str], *, direct: bool = False
    ) -> None:
        self.path = cache / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self.capacity = capacity
        self.bytes = 0
        self.samples = 0
        self._part_names = tuple(os.fsencode(name) for name in part_names)
        self._rows: list[
            tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]
        ] = []
        """Of each appended piece: indices, labels, lengths of parts, and their checksums."""
        self._fd = -1
        self._direct: _native.DirectWriter | None = None
        make_folder(self.path)
        self._lock = open_folder(self.path)
        try:
            lock(self._lock)
            self._fd = create_file(self.path / "volume.hrv")
            # Counts against the quota from now on; takes no room on the disk yet.
            os.ftruncate(self._fd, DATA_OFFSET + capacity)
            if direct:  # another descriptor of the same file, where that can be had
                with contextlib.suppress(OSError):
                    path = f"/proc/self/fd/{self._fd}"
                    self._direct = _native.DirectWriter(path, DATA_OFFSET)
        except BaseException:
            self.remove()
            raise

    @property
    def room(self) -> int:
        """Bytes that it still takes: of samples, and of what the directory says of each."""
        return self.capacity - self.bytes - DIRECTORY_BYTES * self.samples

    @property
    def indices(self) -> NDArray[np.int64]:
        """int64, shape (samples,): which they are."""
        return np.concatenate([np.empty(0, np.int64), *(rows[0] for rows in self._rows)])

    def append(self, batch: _native.Batch, positions: NDArray[np.int64]) -> None:
        """Append the samples at these positions of a batch.

        Raises VolumeError if the disk is full or refuses the data; nothing counts as appended.
        """
        if self._direct is not None:
            checksums = self._direct.append(batch, positions)
        else:
            checksums = _native.write_samples(self._fd, DATA_OFFSET + self.bytes, batch, positions)
        lengths = batch.lengths.reshape(batch.samples, batch.parts)[positions].reshape(-1)
        self._rows.append((batch.indices[positions], batch.labels[positions], lengths, checksums))
        self.bytes += int(lengths.sum())
        self.samples += len(positions)

    def finish(self, source: Store, keep: NDArray[np.bool_]) -> Segment:
        """Make a segment of the samples where `keep` ((samples,) bool) is true.

        Its files lie in the segment's folder, under the names that they will have.

        Nothing is synced: a process that is killed loses nothing that it wrote, and what a power cut
        takes fails its checksum or its size, and is read from the source again. Syncing would make
        reading wait for the disk: epoch one fell to half of its speed.
        """
        self._direct = None  # nothing is appended any more
        os.ftruncate(self._fd, padded_size(DATA_OFFSET + self.bytes))
        columns = self._columns(source, keep)
        directory = self.path / "directory.hrd"
        fd = create_file(directory)
        try:
            header = write_directory(columns, fd)
        finally:
            os.close(fd)
        uuid = volume_uuid(header.uuid, 0)
        write_all(self._fd, VolumeHeader(uuid, header.uuid, 0).to_page(), 0)
        stem = f"segment-{header.uuid.hex()}"
        directory.rename(self.path / f"{stem}.hrd")
        (self.path / "volume.hrv").rename(self.path / f"{stem}.hrv")
        size = os.fstat(self._fd).st_size
        volume = VolumeEntry("packed", f"{stem}.hrv", size, uuid=uuid.hex())
        return segment_of_header(f"{stem}.hrd", header, (volume,), {"kind": "cache"})

    def move_to(self, cache: Path, segment: Segment) -> None:
        """Put the files of a finished segment where the manifest will name them."""
        for name in (segment.directory, segment.volumes[0].path):
            (self.path / name).rename(cache / name)

    def remove(self) -> None:
        """Remove the folder and let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._direct = None
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def _columns(self, source: Store, keep: NDArray[np.bool_]) -> DirectoryColumns:
        parts = len(self._part_names)
        every, labels, lengths, checksums = map(np.concatenate, zip(*self._rows, strict=True))
        starts = DATA_OFFSET + np.cumsum(lengths) - lengths
        slots = np.repeat(keep, parts)
        indices = every[keep]
        names, name_offsets = join_names([os.fsencode(name) for name in source.names.many(indices)])
        classes = source.classes
        n = len(indices)
        several = parts > 1
        return DirectoryColumns(
            names, name_offsets,
            volume=np.zeros(n * parts, np.uint32),
            offset=starts[slots].astype(np.uint64),
            length=lengths[slots].astype(np.uint64),
            crc=checksums[slots],
            first_extent=np.arange(0, (n + 1) * parts, parts, dtype=np.uint64) if several else None,
            part=np.tile(np.arange(parts, dtype=np.uint16), n) if several else None,
            part_names=self._part_names,
            labels=labels[keep],
            class_names=tuple(map(os.fsencode, classes)) if classes else None,
            columns={INDEX_COLUMN: indices},
        )  # fmt: skip


def remove_stale_segments(cache: Path) -> None:
    """Remove what killed writers have left in a cache's folder."""
    for path in cache.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = lock_path(path, make=False, owned=True)
            if fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(fd)


_log = logging.getLogger("headrace")

CLOSE_S = 10.0  # how long closing waits for the queue to be written and published
_NICENESS = 5

_ROOM_MIN = 1 << 16
"""What a segment needs beside samples and directory rows: pages of headers, its manifest entry."""

_WAITING_WEIGHT = 0.2
_RATE_WINDOW_S = 0.5

_CREDIT_BYTES = 32 << 20
"""What may be written at once though the share is used up: a burst of more would be felt."""

_RATE_KEPT = 0.98
"""Of the fastest rate, per window: a source that writing slows down must not pass for a slow one."""

_running: weakref.WeakSet[CacheWriter] = weakref.WeakSet()
_finalized: set[int] = set()  # processes that end with `_finish_at_exit`


class CacheWriter:
    """Writes samples into a cache.

    Attributes:
        samples: samples that were published.
        left: samples that were left for the next epoch: the queue was full, or their share used up.
        busy_s: seconds spent writing.
        idle_s: seconds spent waiting for samples.
    """

    def __init__(self, cache: DiskCache, queue_bytes: int) -> None:
        self.cache = cache
        self.why_stopped = cache.why_not_writable  # why nothing more is written, or ''
        self.samples = self.bytes = self.left = 0
        self.busy_s = self.idle_s = 0.0
        self.waiting = 1.0  # how often the consumer found its batch not ready lately, 0.0 to 1.0
        self.source_bytes_per_s = 0.0  # how fast the source can be: the fastest lately
        self._seen_bytes, self._seen_since = 0, 0.0
        self._credit_bytes = float(_CREDIT_BYTES)
        self._queue_bytes = queue_bytes
        self._queued_bytes = 0
        self._queue: deque[Offer] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._publish_now = False
        self._segment: CacheSegment | None = None
        self._segment_since = 0.0
        self._segment_bytes = 0
        self._pid = os.getpid()

    @property
    def queued_bytes(self) -> int:
        """Memory of batches that wait to be written."""
        return self._queued_bytes

    def offer(self, batch: _native.Batch, missing: NDArray[np.int64]) -> None:
        """Write the samples at these positions of a batch, if there is room. Never waits."""
        if self.why_stopped or not len(missing):
            return
        lengths = batch.lengths.reshape(batch.samples, batch.parts)
        size = int(lengths[missing].sum()) + DIRECTORY_BYTES * len(missing)
        with self._changed:
            # The buffer stays as long as any of its samples waits.
            held = max(len(batch.data), 1)
            full = self._queue and self._queued_bytes + held > self._queue_bytes
            if full or self._credit_bytes < 0.0:
                self.left += len(missing)
                return
            self._credit_bytes -= size
            self.cache.places[batch.indices[missing]] = IN_SEGMENT
            self._queue.append((batch, missing, size))
            self._queued_bytes += held
            self._start()
            self._changed.notify_all()

    def note_batch(self, nbytes: int, source_bytes: int, *, waited: bool) -> None:
        """Take note of a batch: its bytes, those of them from the source; did the consumer wait for it?"""
        self.waiting += _WAITING_WEIGHT * (float(waited) - self.waiting)
        share = writer_share(self.source_bytes_per_s, self.waiting)
        saved_most = max(nbytes, _CREDIT_BYTES)
        self._credit_bytes = min(self._credit_bytes + share * nbytes, saved_most)
        now = time.monotonic()
        if not self._seen_since:  # the first batch took the opening as well
            self._seen_since = now
            return
        self._seen_bytes += source_bytes
        if now - self._seen_since > _RATE_WINDOW_S:
            rate = self._seen_bytes / (now - self._seen_since)
            self.source_bytes_per_s = max(rate, _RATE_KEPT * self.source_bytes_per_s)
            self._seen_bytes, self._seen_since = 0, now

    def publish(self) -> None:
        """Publish soon what has been written so far. Does not wait."""
        with self._changed:
            self._publish_now = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Write and publish what waits, then end. Does not wait."""
        if os.getpid() != self._pid:
            return  # a thread that does not exist here may hold the lock
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self, seconds: float = CLOSE_S) -> bool:
        """Write and publish what waits, then end; false if that takes longer than `seconds`."""
        self.stop()
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return True
        thread.join(seconds)
        return not thread.is_alive()

    # -- in the thread ----------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="headrace-cache-writer", daemon=True
            )
            self._thread.start()
            if self._pid not in _finalized:
                # Workers of multiprocessing end without atexit, and forget their parent's finalizers.
                _finalized.add(self._pid)
                Finalize(None, _finish_at_exit, exitpriority=10)
            _running.add(self)

    def _run(self) -> None:
        # Reading for the consumer comes first. Linux gives each thread its own niceness.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            while True:
                offer, publish, ending = self._next()
                began = time.monotonic()
                if offer is not None:
                    self._write(offer)
                elif publish or ending:
                    self._publish()
                self.busy_s += time.monotonic() - began
                if ending and offer is None:
                    return
        except OSError as e:
            full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            cached = f"the disk is full; {self.cache.cached:,} samples are cached."
            self._give_up(cached if full else f"writing failed: {e.strerror or e}.")
        except Exception as e:  # noqa: BLE001 - a cache that fails must not end the training
            self._give_up(f"{type(e).__name__}: {e}")
            _log.exception("the cache %s is not written any more", self.cache.folder)
        finally:
            self._forget()

    def _next(self) -> tuple[Offer | None, bool, bool]:
        """Wait for something to do: (what to write, whether to publish, whether to end)."""
        began = time.monotonic()
        with self._changed:
            while not self._queue and not self._stopping:
                timeout = None
                if self._segment is not None:
                    due = self._segment_since + publish_after_s(self._segments())
                    timeout = due - time.monotonic()
                    all_written = self.cache.cached + self._segment.samples >= len(
                        self.cache.places
                    )
                    if self._publish_now or timeout <= 0 or all_written:
                        break
                self._publish_now = False
                self._changed.wait(timeout)
            self.idle_s += time.monotonic() - began
            if self._queue:
                offer = self._queue.popleft()
                self._queued_bytes -= max(len(offer[0].data), 1)
                return offer, False, False
            self._publish_now = False
            return None, True, self._stopping

    def _segments(self) -> int:
        store = self.cache.store
        return 0 if store is None else len(store.segments)

    def _write(self, offer: Offer) -> None:
        batch, positions, size = offer
        if self._segment is not None and size > self._segment.room:
            self._publish()
        if self._segment is None:
            self._begin_segment(size)
        if self._segment is None:
            self.cache.places[batch.indices[positions]] = 0
            return
        self._segment.append(batch, positions)
        if time.monotonic() > self._segment_since + publish_after_s(self._segments()):
            self._publish()

    def _begin_segment(self, size: int) -> None:
        if not self._segment_bytes:
            self._segment_bytes = segment_bytes(self.cache.source.nbytes)
        wanted = max(size, self._segment_bytes) + _ROOM_MIN
        directory = self.cache.directory
        with directory.locked():
            room = directory.evict(wanted)
            if room < size + _ROOM_MIN:
                quota = directory.quota_bytes
                limit = (
                    "the disk's free space" if quota is None else f"the quota of {quota:,} bytes"
                )
                self._give_up(f"{limit} is used up; {self.cache.cached:,} samples are cached.")
                return
            capacity = min(wanted, room) - _ROOM_MIN
            direct = writes_direct(self.source_bytes_per_s)
            self._segment = CacheSegment(
                self.cache.folder, capacity, self.cache.part_names, direct=direct
            )
        self._segment_since = time.monotonic()

    def _publish(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        if not segment.samples:
            segment.remove()
            return
        self.bytes += segment.bytes
        self.samples += self.cache.publish(segment)

    def _give_up(self, reason: str) -> None:
        with self._changed:
            if not self.why_stopped:
                self.why_stopped = f"cache {self.cache.folder}: {reason}"
                _log.warning(
                    "%s Training goes on; what is not cached is read anew.", self.why_stopped
                )

    def _forget(self) -> None:
        """Nothing of what waits will be written."""
        with self._changed:
            while self._queue:
                batch, positions, _ = self._queue.popleft()
                self.cache.places[batch.indices[positions]] = 0
            self._queued_bytes = 0
            self._thread = None
        segment, self._segment = self._segment, None
        if segment is not None:
            # The disk is full perhaps, but what was written before may still be published.
            with contextlib.suppress(OSError):
                if segment.samples:
                    self.samples += self.cache.publish(segment)
                else:
                    segment.remove()


@atexit.register
def _finish_at_exit() -> None:
    """What was written must not be lost because the program is short."""
    writers = list(_running)
    for writer in writers:
        writer.stop()
    deadline = time.monotonic() + CLOSE_S
    for writer in writers:
        writer.close(max(0.0, deadline - time.monotonic()))
