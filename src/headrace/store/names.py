"""The name tree: sorted names, front-coded in blocks of 16, searchable from the top level down.

`build_levels` is what the directory writer calls. The reading half (`NameTree`) is what the reference
directory uses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace.errors import SourceError
from headrace.store.format import NAME_BYTES_MAX, NAMES_PER_BLOCK, corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Block = tuple[memoryview, int]


@dataclass(frozen=True, slots=True)
class NameLevels:
    """A built name tree.

    Attributes:
        rank_to_index: (n,) int64, or None when the names came sorted.
        levels: for each level from 0 upwards, where its blocks begin in its blob ((blocks+1,)
            uint64), and the blob ((bytes,) uint8).
    """

    rank_to_index: NDArray[np.int64] | None
    levels: tuple[tuple[NDArray[np.uint64], NDArray[np.uint8]], ...]


def build_levels(blob: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> NameLevels:
    """Builds the name tree of n unique names.

    Args:
        blob: (bytes,) uint8, all names back to back, in index order.
        offsets: (n+1,) uint64, where each name begins in `blob`.

    Raises:
        SourceError: two samples have the same name, or a name is longer than 65,535 bytes.
    """
    lengths = np.diff(offsets)
    if len(lengths) and int(lengths.max()) > NAME_BYTES_MAX:
        i = int(lengths.argmax())
        raise SourceError(
            f"The name of sample {i} is {int(lengths[i]):,} bytes long, expected at most "
            f"{NAME_BYTES_MAX:,}.",
            next_step="Give the sample a shorter name.",
        )
    try:
        ranks, levels = _native.build_names(blob, offsets)
    except ValueError as e:
        raise SourceError(
            f"The names cannot be stored: {e}.",
            next_step="Rename one of them, or pass prefix_names=True where the source is several "
            "files.",
        ) from e
    return NameLevels(ranks, tuple(levels))


def duplicate_name(name: bytes, detail: str = "") -> SourceError:
    """The error for two samples of one name."""
    return SourceError(
        f"Two samples have the name {printable(name)}{detail}, expected unique names.",
        next_step="Rename one of them, or pass prefix_names=True where the source is several files.",
        name=printable(name),
    )


def printable(name: bytes) -> str:
    """A name as a message shows it: quoted, undecodable bytes escaped, long ones shortened."""
    text = repr(name.decode(errors="backslashreplace"))
    return text if len(text) <= 200 else f"{text[:150]}...{text[-40:]}"


def split_names(blob: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> list[bytes]:
    """The names of a blob, as a list."""
    data = blob.tobytes()
    return [data[a:b] for a, b in pairwise(offsets.tolist())]


def join_names(names: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """The inverse of `split_names`: blob (bytes,) uint8 and offsets (n+1,) uint64."""
    offsets = np.zeros(len(names) + 1, np.uint64)
    np.cumsum(np.fromiter(map(len, names), np.uint64, len(names)), out=offsets[1:])
    return np.frombuffer(b"".join(names), np.uint8), offsets


class NameTree:
    """Look-ups in a stored name tree.

    Args:
        names: how many names level 0 holds.
        levels: how many levels there are.
        block: gives block `b` of level `j` as `(bytes, offset in the file)`; checks its checksum.
        path: for messages.
    """

    def __init__(
        self, names: int, levels: int, block: Callable[[int, int], Block], path: str
    ) -> None:
        self._names = names
        self._levels = levels
        self._block = block
        self._path = path

    def search(self, name: bytes) -> int:
        """The rank of `name` in the sorted order, or -1."""
        at = 0
        for level in range(self._levels - 1, -1, -1):
            names = self._decode(level, at)
            position = bisect_right(names, name) - 1
            if position < 0:
                return -1
            if level == 0 and names[position] != name:
                return -1
            at = at * NAMES_PER_BLOCK + position
        return at if self._levels else -1

    def lower_bound(self, key: bytes) -> int:
        """The first rank whose name is not less than `key`; the number of names if all are less."""
        at = 0
        for level in range(self._levels - 1, -1, -1):
            names = self._decode(level, at)
            if level == 0:
                return at * NAMES_PER_BLOCK + bisect_left(names, key)
            position = bisect_right(names, key) - 1
            if position < 0:
                return 0
            at = at * NAMES_PER_BLOCK + position
        return at

    def name(self, rank: int) -> bytes:
        """The name at `rank`."""
        return self._decode(0, rank // NAMES_PER_BLOCK)[rank % NAMES_PER_BLOCK]

    def _decode(self, level: int, block: int) -> list[bytes]:
        data, offset = self._block(level, block)
        names_in_level = self._names
        for _ in range(level):
            names_in_level = -(-names_in_level // NAMES_PER_BLOCK)
        count = min(NAMES_PER_BLOCK, names_in_level - block * NAMES_PER_BLOCK)
        return decode_block(data, count, self._path, offset)


def decode_block(data: memoryview, count: int, path: str, offset: int) -> list[bytes]:
    """Decodes the `count` names of one front-coded block.

    Raises:
        CorruptStore: the block does not hold exactly `count` names in ascending order.
    """

    def bad(what: str, found: object, expected: object, at: int) -> Exception:
        return corrupt(path, what, found=found, expected=expected, offset=offset + at)

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while at < len(data) and shift < 21:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise bad("number in a name block", "cut off or too long", "a varint below 2^21", at)

    names: list[bytes] = []
    at = 0
    before = b""
    for i in range(count):
        shared = 0
        if i:
            shared, at = varint(at)
        size, at = varint(at)
        if shared > len(before) or at + size > len(data) or shared + size > NAME_BYTES_MAX:
            raise bad(
                "length of a name", (shared, size), "within the block and the name before", at
            )
        name = before[:shared] + bytes(data[at : at + size])
        at += size
        if i and name <= before:
            raise bad("order of names", printable(name), f"after {printable(before)}", at)
        names.append(name)
        before = name
    if at != len(data):
        raise bad("bytes of a name block", len(data), at, at)
    return names
