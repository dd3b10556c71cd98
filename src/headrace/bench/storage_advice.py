"""Advice: what a mount's figures say about packing, reads in flight and the size of reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.base.text import binary_text

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENOUGH: Final = 0.9
"""Of the best rate: more depth or larger blocks than it takes for this are not worth their memory."""

_PACKING_PAYS: Final = 1.3


@dataclass(frozen=True, slots=True)
class Cell:
    """Random reads of blocks of one size at one depth."""

    block_bytes: int
    depth: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class StorageAdvice:
    """One piece of it.

    Attributes:
        about: packing, depth or block size.
        value: for programs: whether to pack, reads in flight, bytes.
        why: for people, with the figures.
    """

    about: str
    value: bool | int
    why: str


def advice_of(
    cells: Sequence[Cell], *, sample_bytes: int, packed_per_s: float, files_per_s: float
) -> list[StorageAdvice]:
    """What follows from the figures.

    Args:
        cells: random reads.
        sample_bytes: of the samples that the two rates are of.
        packed_per_s: samples at random from one large file.
        files_per_s: the same samples, each a file.
    """
    return [_packing(sample_bytes, packed_per_s, files_per_s), _depth(cells), _block(cells)]


def _packing(sample_bytes: int, packed_per_s: float, files_per_s: float) -> StorageAdvice:
    ratio = packed_per_s / files_per_s
    rates = (
        f"samples of {sample_bytes:,} bytes: {packed_per_s:,.0f}/s from one packed file, "
        f"{files_per_s:,.0f}/s from a file each ({ratio:.1f} x)"
    )
    if ratio >= _PACKING_PAYS:
        return StorageAdvice("packing", True, f"Pack small samples (headrace pack): {rates}.")
    return StorageAdvice("packing", False, f"Packing gains little in speed here: {rates}.")


def _depth(cells: Sequence[Cell]) -> StorageAdvice:
    """The depth that is enough for blocks of every size."""
    enough: dict[int, int] = {}
    for block in {cell.block_bytes for cell in cells}:
        row = [cell for cell in cells if cell.block_bytes == block]
        best = max(cell.bytes_per_s for cell in row)
        enough[block] = min(c.depth for c in row if c.bytes_per_s >= _ENOUGH * best)
    depth = max(enough.values())
    depths = ", ".join(
        f"{depth} for {binary_text(block)}" for block, depth in sorted(enough.items())
    )
    deepest = max(cell.depth for cell in cells)
    more = "; more were not tried" if depth == deepest else ""
    return StorageAdvice(
        "depth", depth,
        f"Keep {depth} reads in flight: {_ENOUGH:.0%} of the best rate takes {depths}{more}.",
    )  # fmt: skip


def _block(cells: Sequence[Cell]) -> StorageAdvice:
    best = {
        block: max(c.bytes_per_s for c in cells if c.block_bytes == block)
        for block in sorted({cell.block_bytes for cell in cells})
    }
    most = max(best.values())
    block = min(size for size, rate in best.items() if rate >= _ENOUGH * most)
    rates = ", ".join(f"{binary_text(size)} {rate / 1e6:,.0f} MB/s" for size, rate in best.items())
    return StorageAdvice(
        "block size", block, f"Read at random in pieces of {binary_text(block)} or more: {rates}."
    )
