"""Writes the volumes of a segment, and its journal: what has been packed for sure.

The journal is a list of framed records in `TARGET.partial/journal`. The first says what is being packed; each
other one states that the volumes hold, durably, the next samples with these lengths and checksums. A record is
written after the data that it vouches for was synced, and carries its own checksum, so a kill at any point
leaves a torn last record at worst, which is cut off.

Where the samples lie is not written down: placement is a pure function of the lengths.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.base.checksum import crc32c
from headrace.base.files import open_or_create, write_all
from headrace.errors import VolumeError
from headrace.store.directory import DirectoryColumns, write_directory
from headrace.store.format import DATA_OFFSET, VolumeHeader, padded_size, volume_uuid
from headrace.store.manifest import Segment, VolumeEntry, segment_of_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


_FRAME = struct.Struct("<4sIQ")
_MAGIC = b"HRJ1"
_COUNTS = struct.Struct("<QQ")
_PIECE_BYTES = 16 << 20


class PackedSamples(NamedTuple):
    """Some consecutive samples as packed."""

    counts: NDArray[np.int64]  # (samples,) int64, extents of each; 0 for a sample that was skipped
    length: NDArray[np.uint64]  # (extents,) uint64
    crc: NDArray[np.uint32]  # (extents,) uint32

    @staticmethod
    def of(counts: Any, length: Any, crc: Any) -> PackedSamples:
        """Of any sequences of numbers."""
        return PackedSamples(
            np.asarray(counts, np.int64), np.asarray(length, np.uint64), np.asarray(crc, np.uint32)
        )

    @staticmethod
    def join(pieces: list[PackedSamples]) -> PackedSamples:
        """Consecutive pieces as one."""
        columns = zip(PackedSamples.of([], [], []), *pieces, strict=True)
        return PackedSamples.of(*(np.concatenate(each) for each in columns))

    def to_bytes(self) -> bytes:
        """As it stands in a record."""
        counts = self.counts.astype("<u4").tobytes()
        extents = self.length.astype("<u8").tobytes() + self.crc.astype("<u4").tobytes()
        return _COUNTS.pack(len(self.counts), len(self.length)) + counts + extents

    @staticmethod
    def from_bytes(data: bytes) -> PackedSamples:
        """The inverse of `to_bytes`."""
        samples, extents = _COUNTS.unpack_from(data)
        at = _COUNTS.size
        return PackedSamples.of(
            np.frombuffer(data, "<u4", samples, at),
            np.frombuffer(data, "<u8", extents, at + 4 * samples),
            np.frombuffer(data, "<u4", extents, at + 4 * samples + 8 * extents),
        )


class Journal:
    """An open journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_or_create(path, owned=True)
        try:
            content = bytearray()
            while piece := os.pread(self._fd, _PIECE_BYTES, len(content)):
                content += piece
            records, self._end = _valid_records(bytes(content))
            os.ftruncate(self._fd, self._end)
        except BaseException:
            os.close(self._fd)
            raise
        # What the first record says; the samples that are packed for sure; and what the newest says of them.
        self.identity: dict[str, Any] | None = json.loads(records[0]) if records else None
        self.done = PackedSamples.join([PackedSamples.from_bytes(r) for r in records[1:]])
        self.note = _note_of(records[-1]) if len(records) > 1 else {}

    def begin(self, identity: dict[str, Any]) -> None:
        """Starts over: forgets everything and says what is being packed."""
        os.ftruncate(self._fd, 0)
        self._end = 0
        self.identity = identity
        self.done = PackedSamples.join([])
        self.note = {}
        self._append(json.dumps(identity, sort_keys=True).encode())

    def append(self, samples: PackedSamples, note: dict[str, Any]) -> None:
        """Vouches for more samples, durably. Their bytes must be durable already."""
        text = json.dumps(note, sort_keys=True).encode() if note else b""
        self._append(samples.to_bytes() + text)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _append(self, payload: bytes) -> None:
        frame = _FRAME.pack(_MAGIC, crc32c(payload), len(payload))
        write_all(self._fd, frame + payload, self._end)
        os.fdatasync(self._fd)
        self._end += len(frame) + len(payload)


def _note_of(record: bytes) -> dict[str, Any]:
    """What stands behind a record's samples."""
    samples, extents = _COUNTS.unpack_from(record)
    text = record[_COUNTS.size + 4 * samples + 12 * extents :]
    return dict(json.loads(text)) if text else {}


def _valid_records(data: bytes) -> tuple[list[bytes], int]:
    """The payloads of the unbroken records from the start, and where they end."""
    records = []
    at = 0
    while at + _FRAME.size <= len(data):
        magic, crc, size = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + size]
        if magic != _MAGIC or len(payload) < size or crc32c(payload) != crc:
            break
        records.append(payload)
        at += _FRAME.size + size
    return records, at


VOLUME_BYTES = 4 << 30
JOURNAL_BYTES = 64 << 20  # bytes between two records of the journal: what a kill can cost, at most
JOURNAL_SECONDS = 5.0  # and as long a time: texts are encoded at some megabytes a second


class Placement(NamedTuple):
    """Where extents went: (m,) uint32 volumes and (m,) uint64 offsets."""

    volume: NDArray[np.uint32]
    offset: NDArray[np.uint64]


class Placer:
    """Decides where samples go: a pure function of their sizes so far.

    A volume ends before it would grow beyond `volume_bytes`, unless one sample alone does.
    """

    def __init__(self, volume_bytes: int) -> None:
        if volume_bytes <= DATA_OFFSET:
            raise ValueError(f"volume_bytes is {volume_bytes}, expected more than {DATA_OFFSET}")
        self._limit = volume_bytes
        self.ends = [DATA_OFFSET]

    def place(self, counts: NDArray[np.int64], length: NDArray[np.uint64]) -> Placement:
        """Places the next samples, of `counts` extents each."""
        first = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=first[1:])
        before = np.zeros(len(length) + 1, np.int64)
        np.cumsum(length.astype(np.int64), out=before[1:])
        ends = before[first]
        volume = np.zeros(len(length), np.uint32)
        offset = np.zeros(len(length), np.uint64)
        sample = 0
        while sample < len(counts):
            room = self._limit - self.ends[-1]
            stop = int(np.searchsorted(ends, ends[sample] + room, side="right")) - 1
            if stop <= sample:
                if self.ends[-1] > DATA_OFFSET:
                    self.ends.append(DATA_OFFSET)
                    continue
                stop = sample + 1
            a, b = int(first[sample]), int(first[stop])
            volume[a:b] = len(self.ends) - 1
            offset[a:b] = (before[a:b] - ends[sample] + self.ends[-1]).astype(np.uint64)
            self.ends[-1] += int(ends[stop] - ends[sample])
            sample = stop
        return Placement(volume, offset)


class SegmentWriter:
    """Appends samples to the volumes of one segment."""

    def __init__(
        self,
        folder: Path,
        number: int,
        journal: Journal,
        *,
        volume_bytes: int = VOLUME_BYTES,
        journal_bytes: int = JOURNAL_BYTES,
    ) -> None:
        self.folder = folder
        self._stem = f"segment-{number:04d}"
        self._journal = journal
        self._placer = Placer(volume_bytes)
        self._journal_bytes = journal_bytes
        self._fds: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._pending: list[PackedSamples] = []
        self._pending_bytes = 0
        self._committed_s = time.monotonic()
        self._samples: list[PackedSamples] = [journal.done]
        self._places = [self._placer.place(journal.done.counts, journal.done.length)]
        self.samples_done = len(journal.done.counts)
        self.bytes_done = int(journal.done.length.sum())
        self.samples_durable = self.samples_done
        self.note = dict(journal.note)
        """What is kept, in the journal, of all samples appended so far."""

    def resumable(self) -> bool:
        """Whether the volumes are at least as long as the journal says."""
        paths = [
            (self._path(i), end) for i, end in enumerate(self._placer.ends) if end > DATA_OFFSET
        ]
        return all(path.is_file() and path.stat().st_size >= end for path, end in paths)

    def append(
        self, samples: PackedSamples, data: memoryview, note: dict[str, Any] | None = None
    ) -> None:
        """Appends samples whose bytes are `data`, back to back; without bytes, samples that are left out.

        `note`, where it is given, becomes the writer's, with these samples.

        Raises VolumeError if the disk is full or refuses the data.
        """
        place = self._placer.place(samples.counts, samples.length)
        ends = np.cumsum(samples.length.astype(np.int64)).tolist()
        turns = np.flatnonzero(np.diff(place.volume.astype(np.int64))).tolist()
        first = at = 0
        with self._translated():
            for last in [*turns, len(ends) - 1] if ends else ():
                volume = int(place.volume[first])
                write_all(self._fd(volume), data[at : ends[last]], int(place.offset[first]))
                self._dirty.add(volume)
                first, at = last + 1, ends[last]
        self.note = self.note if note is None else note
        self._record(samples, place)

    def append_large(
        self, counts: NDArray[np.int64], length: NDArray[np.uint64],
        extents: Iterator[Iterator[memoryview]],
    ) -> None:  # fmt: skip
        """Appends one sample too large for memory; its checksums are taken on the way."""
        ends = list(self._placer.ends)
        place = self._placer.place(counts, length)
        crc = np.zeros(len(place.volume), np.uint32)
        try:
            for k, pieces in enumerate(extents):
                volume, at, value = int(place.volume[k]), int(place.offset[k]), 0
                for piece in pieces:
                    with self._translated():
                        write_all(self._fd(volume), piece, at)
                    value = crc32c(piece, value)
                    at += len(piece)
                crc[k] = value
                self._dirty.add(volume)
        except BaseException:
            # Nothing vouches for what was written: the next sample takes its place.
            self._placer.ends = ends
            raise
        self._record(PackedSamples(counts, length, crc), place)

    def _record(self, samples: PackedSamples, place: Placement) -> None:
        """Takes note of appended samples; commits when enough have come together."""
        self._samples.append(samples)
        self._places.append(place)
        self._pending.append(samples)
        written = int(samples.length.sum())
        self._pending_bytes += written
        self.bytes_done += written
        self.samples_done += len(samples.counts)
        if self.late() or self._pending_bytes >= self._journal_bytes:
            self.commit()

    def late(self) -> bool:
        """Whether the next samples are to be appended, however few: the journal waits for them."""
        return time.monotonic() - self._committed_s >= JOURNAL_SECONDS

    def commit(self) -> None:
        """Makes everything appended so far durable, and says so in the journal."""
        if not self._pending:
            return
        with self._translated():
            for number in sorted(self._dirty):
                os.fdatasync(self._fd(number))
            self._journal.append(PackedSamples.join(self._pending), self.note)
        self._dirty.clear()
        self._pending.clear()
        self._pending_bytes = 0
        self._committed_s = time.monotonic()
        self.samples_durable = self.samples_done

    def packed(self) -> PackedSamples:
        """All samples appended so far, those of earlier runs included."""
        joined = PackedSamples.join(self._samples)
        self._samples = [joined]
        return joined

    def finish(self, columns: DirectoryColumns, source: dict[str, Any]) -> tuple[Segment, bytes]:
        """Writes the directory and the volumes' headers, and syncs everything.

        The extents of `columns` are filled in here. Returns the segment's manifest entry and its header page.
        """
        self._fill(columns)
        with self._translated():
            header = write_directory(columns, self.folder / f"{self._stem}.hrd")
            entries = [self._finish_volume(i, header.uuid) for i in range(len(self._placer.ends))]
        segment = segment_of_header(f"{self._stem}.hrd", header, tuple(entries), source)
        return segment, header.to_page()

    def finish_spool(self, columns: DirectoryColumns) -> tuple[VolumeEntry, ...]:
        """Fills in the columns' extents; the volumes can then be read as files, and appended to no more.

        They have no modification times: a run that is resumed reads them as they are.
        """
        self.commit()
        self._fill(columns)
        entries = []
        with self._translated():
            for i, end in enumerate(self._placer.ends):
                os.ftruncate(self._fd(i), end)  # a killed run may have left bytes beyond the end
                entries.append(VolumeEntry("file", str(self._path(i)), end))
        return tuple(entries)

    def _fill(self, columns: DirectoryColumns) -> None:
        """Says of each extent where it went."""
        packed = self.packed()
        columns.volume, columns.offset = map(np.concatenate, zip(*self._places, strict=True))
        columns.length, columns.crc = packed.length, packed.crc
        self._places.clear()

    def close(self) -> None:
        """Closes the volumes."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _finish_volume(self, number: int, segment_uuid: bytes) -> VolumeEntry:
        fd = self._fd(number)
        size = padded_size(self._placer.ends[number])
        uuid = volume_uuid(segment_uuid, number)
        # Cut first: a killed run may have left bytes beyond the end, and the padding is zeros.
        os.ftruncate(fd, self._placer.ends[number])
        os.ftruncate(fd, size)
        write_all(fd, VolumeHeader(uuid, segment_uuid, number).to_page(), 0)
        os.fsync(fd)
        return VolumeEntry("packed", self._path(number).name, size, uuid=uuid.hex())

    def _path(self, number: int) -> Path:
        return self.folder / f"{self._stem}-{number:04d}.hrv"

    def _fd(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is None:
            # Volumes are filled in turn; only unsynced ones and the newest stay open.
            for other in [n for n in self._fds if n not in self._dirty]:
                os.close(self._fds.pop(other))
            fd = self._fds[number] = open_or_create(self._path(number), owned=True)
        return fd

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns the system's refusals into one clear error."""
        try:
            yield
        except VolumeError:
            raise
        except OSError as e:
            full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise VolumeError(
                f"{self.folder}: writing failed after {self.samples_done:,} samples and "
                f"{self.bytes_done:,} bytes: {e.strerror}.",
                path=str(self.folder),
                errno=e.errno,
                next_step=f"What is packed so far is kept: {'free some space and ' if full else ''}"
                "run the same command again to resume.",
            ) from e
