"""The journal of an unfinished segment: what has been packed for sure.

A list of framed records in `TARGET.partial/journal`. The first says what is being packed; each other
one states that the volumes hold, durably, the next samples with these lengths and checksums. A
record is written after the data that it vouches for was synced, and carries its own checksum, so a
kill at any point leaves a torn last record at worst, which is cut off.

Where the samples lie is not written down: placement is a pure function of the lengths.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.checksum import crc32c
from headrace.base.files import open_or_create
from headrace.store.directory_writer import write_all

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_FRAME = struct.Struct("<4sIQ")
_MAGIC = b"HRJ1"
_COUNTS = struct.Struct("<QQ")
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Some consecutive samples as packed.

    Attributes:
        counts: (samples,) int64, extents of each; 0 for a sample that was skipped.
        length: (extents,) uint64.
        crc: (extents,) uint32.
    """

    counts: NDArray[np.int64]
    length: NDArray[np.uint64]
    crc: NDArray[np.uint32]

    @staticmethod
    def join(pieces: list[PackedSamples]) -> PackedSamples:
        """Consecutive pieces as one."""
        return PackedSamples(
            np.concatenate([p.counts for p in pieces] or [np.zeros(0, np.int64)]),
            np.concatenate([p.length for p in pieces] or [np.zeros(0, np.uint64)]),
            np.concatenate([p.crc for p in pieces] or [np.zeros(0, np.uint32)]),
        )

    def to_bytes(self) -> bytes:
        """As it stands in a record."""
        return b"".join(
            (
                _COUNTS.pack(len(self.counts), len(self.length)),
                self.counts.astype("<u4").tobytes(),
                self.length.astype("<u8").tobytes(),
                self.crc.astype("<u4").tobytes(),
            )
        )

    @staticmethod
    def from_bytes(data: bytes) -> PackedSamples:
        """The inverse of `to_bytes`."""
        samples, extents = _COUNTS.unpack_from(data)
        at = _COUNTS.size
        counts = np.frombuffer(data, "<u4", samples, at).astype(np.int64)
        length = np.frombuffer(data, "<u8", extents, at + 4 * samples)
        crc = np.frombuffer(data, "<u4", extents, at + 4 * samples + 8 * extents)
        return PackedSamples(counts, length.astype(np.uint64), crc.astype(np.uint32))


class Journal:
    """An open journal.

    Args:
        path: its file; made if it does not exist.

    Attributes:
        identity: what the first record says, or None where there is none.
        done: the samples that are packed for sure.
    """

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
        self.identity: dict[str, Any] | None = json.loads(records[0]) if records else None
        self.done = PackedSamples.join([PackedSamples.from_bytes(r) for r in records[1:]])

    def begin(self, identity: dict[str, Any]) -> None:
        """Starts over: forgets everything and says what is being packed."""
        os.ftruncate(self._fd, 0)
        self._end = 0
        self.identity = identity
        self.done = PackedSamples.join([])
        self._append(json.dumps(identity, sort_keys=True).encode())

    def append(self, samples: PackedSamples) -> None:
        """Vouches for more samples, durably. Their bytes must be durable already."""
        self._append(samples.to_bytes())

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _append(self, payload: bytes) -> None:
        frame = _FRAME.pack(_MAGIC, crc32c(payload), len(payload))
        write_all(self._fd, frame + payload, self._end)
        os.fdatasync(self._fd)
        self._end += len(frame) + len(payload)


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
