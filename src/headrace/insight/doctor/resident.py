"""Resident: how much of the data lies in the page cache, by asking the kernel about some of the samples."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from headrace.store.residency import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.insight.doctor.pieces import Piece, Pool

__all__ = ["resident_share"]

_ASKED: Final = 1000
_COLD_SHARE: Final = 0.01


def resident_share(
    pool: Pool, seconds: float, stop: Callable[[], bool]
) -> tuple[float | None, tuple[Piece, ...]]:
    """Share of some samples' files that lies in the page cache, and the samples that do not."""
    until = time.monotonic() + seconds
    total = inside = 0
    cold: list[Piece] = []
    shares: dict[str, float | None] = {}
    for number, piece in enumerate(pool.pieces[:_ASKED]):
        if number and (time.monotonic() > until or stop()):
            break
        if piece.path not in shares:
            size = _size(piece.path)
            found = resident_bytes(piece.path) if size else None
            shares[piece.path] = None if found is None else found / max(1, size)
        share = shares[piece.path]
        if share is None:
            continue
        total += piece.length
        inside += int(share * piece.length)
        if share < _COLD_SHARE:
            cold.append(piece)
    return (inside / total if total else None), tuple(cold)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
