"""Global heaps of HDF5 files, where values of variable length lie: walked before HDF5 does.

HDF5 follows the sizes in a heap without checking that they lead forward: a damaged one keeps it busy for
ever. Each collection of a file is walked here first, by the rules of the format's specification (III.E):
16 bytes of header (`GCOL`, version 1, its size), then objects of 16 bytes and their data, in multiples of
8 bytes; object 0 is the free space and the last.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from headrace.store.sources.shards import damaged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.errors import SourceError

_MAGIC = b"GCOL\1\0\0\0"
_HEADER = struct.Struct("<8sQ")
_OBJECT = struct.Struct("<HHIQ")
_READ_BYTES = 16 << 20
_HEAP_BYTES = 64 << 10


def check_heaps(path: str) -> None:
    """Walk every heap of a file, which is read once.

    Raises:
        SourceError: a heap leads outside itself or the file, or does not lead forward.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for at in _collections(file.fileno(), size):
            _walk(file.fileno(), at, size, path)


def _collections(fd: int, size: int) -> Iterator[int]:
    """Where heaps begin: their signature, at a multiple of 8 bytes."""
    for begin in range(0, size, _READ_BYTES):
        block = os.pread(fd, _READ_BYTES + len(_MAGIC) - 1, begin)
        at = block.find(_MAGIC)
        while at >= 0:
            if (begin + at) % 8 == 0 and at < _READ_BYTES:
                yield begin + at
            at = block.find(_MAGIC, at + 1)


def _walk(fd: int, at: int, size: int, path: str) -> None:
    header = os.pread(fd, _HEADER.size, at)
    length = _HEADER.unpack(header)[1] if len(header) == _HEADER.size else 0
    if not 4096 <= length <= size - at:
        raise _wrong(path, "size of a heap", length, f"4,096 to {size - at:,}", at)
    head = os.pread(fd, min(length, _HEAP_BYTES), at)  # nearly always all of it
    offset = _HEADER.size
    while offset + _OBJECT.size <= length:
        place = at + offset
        raw = head[offset : offset + _OBJECT.size]
        if len(raw) < _OBJECT.size:
            raw = os.pread(fd, _OBJECT.size, place)
        index, _, _, data_bytes = _OBJECT.unpack(raw)
        # The free space counts its own header.
        step = data_bytes if index == 0 else _OBJECT.size + -(-data_bytes // 8) * 8
        if not _OBJECT.size <= step <= length - offset:
            raise _wrong(
                path, f"size of object {index} of a heap", data_bytes,
                f"at most {length - offset:,}", place,
            )  # fmt: skip
        if index == 0:
            return
        offset += step


def _wrong(path: str, what: str, found: int, expected: str, at: int) -> SourceError:
    return damaged(path, what, f"{found:,}", expected, at)
