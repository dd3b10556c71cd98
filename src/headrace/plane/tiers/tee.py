"""Tee: writes delivered samples into the cache, in the background.

A bounded queue of batches and one thread with low priority. `offer` never waits: what does not fit
into the queue is left for the next epoch, and counted. While the consumer waits for a fast source, only
a share of what it gets is written (`policy.writer_share`). A full disk or a used-up quota ends the
writing, is said once, and training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from headrace.plane.tiers.cache import IN_TAIL
from headrace.plane.tiers.policy import (
    publish_after_s,
    segment_bytes,
    writer_share,
    writes_direct,
)
from headrace.plane.tiers.tail import DIRECTORY_BYTES, Tail

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace import _native
    from headrace.plane.tiers.cache import Cache

    Offer = tuple[_native.Batch, NDArray[np.int64], int]

__all__ = ["Tee"]

_log = logging.getLogger("headrace")

CLOSE_S = 10.0
"""How long closing waits for the queue to be written and published."""

_NICENESS = 5

_ROOM_MIN = 1 << 16
"""What a segment needs beside samples and directory rows: pages of headers, its manifest entry."""

_WAITING_WEIGHT = 0.2
_RATE_WINDOW_S = 0.5

_CREDIT_BYTES = 32 << 20
"""What may be written at once though the share is used up: a burst of more would be felt."""

_RATE_KEPT = 0.98
"""Of the fastest rate, per window: a source that writing slows down must not pass for a slow one."""

_running: weakref.WeakSet[Tee] = weakref.WeakSet()
_finalized: set[int] = set()
"""Processes that end with `_finish_at_exit`."""


class Tee:
    """Writes samples into a cache.

    Args:
        cache: the cache.
        queue_bytes: memory of batches that wait to be written.

    Attributes:
        why_stopped: why nothing more is written, or ''.
        samples: samples that were published.
        left: samples that were left for the next epoch: the queue was full, or their share used up.
        busy_s: seconds spent writing.
        idle_s: seconds spent waiting for samples.
        waiting: how often the consumer found its batch not ready lately, 0.0 to 1.0.
        source_bytes_per_s: how fast the source can be: the fastest lately.
    """

    def __init__(self, cache: Cache, queue_bytes: int) -> None:
        self.cache = cache
        self.why_stopped = cache.why_not_writable
        self.samples = self.bytes = self.left = 0
        self.busy_s = self.idle_s = 0.0
        self.waiting = 1.0
        self.source_bytes_per_s = 0.0
        self._seen_bytes, self._seen_since = 0, 0.0
        self._credit_bytes = float(_CREDIT_BYTES)
        self._queue_bytes = queue_bytes
        self._queued_bytes = 0
        self._queue: deque[Offer] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._publish_now = False
        self._tail: Tail | None = None
        self._tail_since = 0.0
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
            self.cache.places[batch.indices[missing]] = IN_TAIL
            self._queue.append((batch, missing, size))
            self._queued_bytes += held
            self._start()
            self._changed.notify_all()

    def saw(self, nbytes: int, source_bytes: int, *, waited: bool) -> None:
        """Take note of a batch.

        Args:
            nbytes: its bytes.
            source_bytes: how many of them came from the source.
            waited: whether the consumer had to wait for it.
        """
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
            self._thread = threading.Thread(target=self._run, name="headrace-tee", daemon=True)
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
            self._give_up(_reason(e, self.cache))
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
                if self._tail is not None:
                    due = self._tail_since + publish_after_s(self._segments())
                    timeout = due - time.monotonic()
                    if self._publish_now or timeout <= 0 or self._all_written():
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

    def _all_written(self) -> bool:
        assert self._tail is not None
        return self.cache.cached + self._tail.samples >= len(self.cache.places)

    def _write(self, offer: Offer) -> None:
        batch, positions, size = offer
        if self._tail is not None and size > self._tail.room:
            self._publish()
        if self._tail is None:
            self._begin_tail(size)
        if self._tail is None:
            self.cache.places[batch.indices[positions]] = 0
            return
        self._tail.append(batch, positions)
        if time.monotonic() > self._tail_since + publish_after_s(self._segments()):
            self._publish()

    def _begin_tail(self, size: int) -> None:
        if not self._segment_bytes:
            self._segment_bytes = segment_bytes(self.cache.source.nbytes)
        wanted = max(size, self._segment_bytes) + _ROOM_MIN
        shelf = self.cache.shelf
        with shelf.sharing_out():
            room = shelf.make_room(wanted)
            if room < size + _ROOM_MIN:
                self._give_up(_no_room(self.cache))
                return
            capacity = min(wanted, room) - _ROOM_MIN
            direct = writes_direct(self.source_bytes_per_s)
            self._tail = Tail(self.cache.folder, capacity, self.cache.part_names, direct=direct)
        self._tail_since = time.monotonic()

    def _publish(self) -> None:
        tail, self._tail = self._tail, None
        if tail is None:
            return
        if not tail.samples:
            tail.remove()
            return
        self.bytes += tail.bytes
        self.samples += self.cache.publish(tail)

    def _give_up(self, reason: str) -> None:
        with self._changed:
            if not self.why_stopped:
                self.why_stopped = reason
                _log.warning("%s Training goes on; what is not cached is read anew.", reason)

    def _forget(self) -> None:
        """Nothing of what waits will be written."""
        with self._changed:
            while self._queue:
                batch, positions, _ = self._queue.popleft()
                self.cache.places[batch.indices[positions]] = 0
            self._queued_bytes = 0
            self._thread = None
        tail, self._tail = self._tail, None
        if tail is not None:
            # The disk is full perhaps, but what was written before may still be published.
            with contextlib.suppress(OSError):
                if tail.samples:
                    self.samples += self.cache.publish(tail)
                else:
                    tail.remove()


def _no_room(cache: Cache) -> str:
    quota = cache.shelf.quota_bytes
    limit = "the disk's free space" if quota is None else f"the quota of {quota:,} bytes"
    return f"cache {cache.folder}: {limit} is used up; {cache.cached:,} samples are cached."


def _reason(e: OSError, cache: Cache) -> str:
    if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"cache {cache.folder}: the disk is full; {cache.cached:,} samples are cached."
    return f"cache {cache.folder}: writing failed: {e.strerror or e}."


@atexit.register
def _finish_at_exit() -> None:
    """What was written must not be lost because the program is short."""
    tees = list(_running)
    for tee in tees:
        tee.stop()
    deadline = time.monotonic() + CLOSE_S
    for tee in tees:
        tee.close(max(0.0, deadline - time.monotonic()))
