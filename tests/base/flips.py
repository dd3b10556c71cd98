"""Every single-bit flip of a document, one after the other."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def flips(good: bytes, step: int = 1) -> Iterator[tuple[int, bytes]]:
    """The number of a bit, and the content with that bit flipped; of all bits, or each `step`th."""
    for bit in range(0, 8 * len(good), step):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(bad)


def outcomes(good: bytes, read: Callable[[bytes], object], step: int = 1) -> Counter[str]:
    """What becomes of the flips: the error's class, "same" or "silent" (another value was believed)."""
    expected = repr(read(good))
    counts: Counter[str] = Counter()
    for _, bad in flips(good, step):
        try:
            counts["same" if repr(read(bad)) == expected else "silent"] += 1
        except HeadraceError as e:
            counts[type(e).__name__] += 1
    return counts
