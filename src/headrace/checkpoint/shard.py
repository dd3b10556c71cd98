"""Shards: files of arrays in safetensors' layout, which others read, too.

A length, a JSON header (names, types, shapes, places), then the arrays end to end. The header is padded so
that the arrays begin at a whole disk block. Each array has its crc32c in the checkpoint's manifest.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from headrace import _native
from headrace.base.files import open_stream
from headrace.checkpoint.tree import DTYPES, leaf_bytes
from headrace.errors import CorruptCheckpoint
from headrace.store.output_file import OutputFile, WriteBuffer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.checkpoint.tree import Leaf

    ShardArray = tuple[NDArray[np.uint8], str, tuple[int, ...]]
    """Bytes, element type and shape."""

__all__ = [
    "OLDER",
    "Durability",
    "ShardRecord",
    "damaged",
    "read_headers",
    "read_shard",
    "write_shard",
]

Durability = Literal["none", "fsync", "direct"]
"""How bytes reach the disk: `none` leaves them to the page cache, `fsync` waits until the disk has them,
`direct` writes past the page cache and then waits for what the file system has to say about them."""

OLDER = "Load an older checkpoint: headrace.checkpoint.steps(folder) lists them."

_HEADER_BYTES_MAX = 100 << 20
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard, as the manifest has it."""

    file: str
    nbytes: int
    header_crc32c: int
    crc32c: dict[str, int]
    """Of each array."""


def write_shard(
    path: str, leaves: Sequence[Leaf], durability: Durability, buffer: WriteBuffer
) -> ShardRecord:
    """Writes arrays into a file that appears when it is whole.

    Raises:
        VolumeError: the disk is full, or the operating system refuses.
    """
    header = _header(leaves)
    crcs = {}
    with OutputFile(path, buffer, direct=durability == "direct", sync=durability != "none") as out:
        out.write(header)
        for leaf in leaves:
            data = leaf_bytes(leaf)
            crcs[leaf.name] = _native.crc32c(data)
            out.write(data)
    crc = _native.crc32c(np.frombuffer(header, np.uint8))
    return ShardRecord(os.path.basename(path), out.written, crc, crcs)


def _header(leaves: Sequence[Leaf]) -> bytes:
    described: dict[str, Any] = {}
    at = 0
    for leaf in leaves:
        described[leaf.name] = {
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "data_offsets": [at, at + leaf.nbytes],
        }
        at += leaf.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // _BLOCK) * _BLOCK - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def read_headers(folder: str, record: ShardRecord) -> list[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Name, element type and shape of the arrays of a shard, without their bytes.

    Raises:
        CorruptCheckpoint: the header is not what was saved.
    """
    path = os.path.join(folder, record.file)
    with _open(folder, record.file) as f:
        return [(name, (dtype, shape)) for name, dtype, shape, _ in _arrays(f, path, record)]


def read_shard(
    folder: str, record: ShardRecord, names: Collection[str] | None = None
) -> dict[str, ShardArray]:
    """The arrays of a shard, all or those of some names, each checked.

    Raises:
        CorruptCheckpoint: they are not what was saved.
    """
    path = os.path.join(folder, record.file)
    found = {}
    with _open(folder, record.file) as f:
        for name, dtype, shape, (at, nbytes) in _arrays(f, path, record):
            if names is not None and name not in names:
                continue
            data = _read(f.fileno(), np.empty(nbytes, np.uint8), at, path)
            crc = _native.crc32c(data)
            if crc != record.crc32c.get(name):
                expected = f"{record.crc32c.get(name, 0):08x}"
                raise damaged(path, f"the checksum of {name}", f"{crc:08x}", expected, at)
            found[name] = (data, dtype, shape)
    return found


def _arrays(
    f: BinaryIO, path: str, record: ShardRecord
) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, int]]]:
    """The arrays of an open shard: name, element type, shape, and where its bytes are and how many."""
    size = os.fstat(f.fileno()).st_size
    if size != record.nbytes:
        raise damaged(path, "the size", size, record.nbytes)
    start = int.from_bytes(_read(f.fileno(), np.empty(8, np.uint8), 0, path).tobytes(), "little")
    if start > min(_HEADER_BYTES_MAX, size - 8):
        raise damaged(path, "the header's length", start, f"at most {size - 8:,}")
    head = _read(f.fileno(), np.empty(8 + start, np.uint8), 0, path)
    crc = _native.crc32c(head)
    if crc != record.header_crc32c:
        raise damaged(path, "the header's checksum", f"{crc:08x}", f"{record.header_crc32c:08x}")
    for name, dtype, shape, first, last in _described(head[8:].tobytes(), path):
        at = 8 + start + first
        if math.prod(shape) * _itemsize(dtype) != last - first or at + last - first > size:
            raise damaged(path, f"the place of {name}", [first, last], "its size", at)
        yield name, dtype, shape, (at, last - first)


def _open(folder: str, name: str) -> BinaryIO:
    try:
        return open_stream(name, within=folder, buffering=0)
    except FileNotFoundError:
        raise damaged(os.path.join(folder, name), "the shard", "missing", "a file") from None


def _described(text: bytes, path: str) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """The arrays of a shard's header: name, element type, shape, first byte and the one behind the last."""
    try:
        for name, leaf in json.loads(text).items():
            dtype, shape, (first, last) = leaf["dtype"], leaf["shape"], leaf["data_offsets"]
            numbers = (*shape, first, last)
            if dtype not in DTYPES or not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers):
                raise damaged(path, f"the header of {name}", leaf, "an array's place")
            yield name, dtype, tuple(shape), first, last
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise damaged(path, "the header", f"none ({e!r:.200})", "the arrays' places") from None


def _itemsize(dtype: str) -> int:
    if dtype == "BF16":
        return 2
    return 1 if dtype.startswith("F8") else np.dtype(DTYPES[dtype]).itemsize


def _read(fd: int, into: NDArray[np.uint8], at: int, path: str) -> NDArray[np.uint8]:
    view, done = memoryview(into.data), 0
    while done < into.size:
        count = os.preadv(fd, [view[done:]], at + done)
        if not count:
            raise damaged(path, "the end of the file", at + done, at + into.size, at)
        done += count
    return into


def damaged(
    path: str, what: str, found: object, expected: object, offset: int = 0
) -> CorruptCheckpoint:
    """The error for a file of a checkpoint that is not as it was written."""
    return CorruptCheckpoint(
        f"{path}: {what} is {found}, expected {expected} (offset {offset:,}).",
        path=path,
        offset_bytes=offset,
        next_step=OLDER,
    )
