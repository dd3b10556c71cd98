"""Epochs: learns in which order a program opens its files. Pure.

An epoch ends where files begin to repeat. A few repeats do not end it: some files are opened again and
again (an index, a file of labels), and some programs open each file twice in a row.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Epochs"]

REPEATS = 8
"""More repeats than new files by so many: an epoch has begun."""

RECENT_SHARE, RECENT_MIN, RECENT_MAX = 4, 8, 64
"""A repeat of one of the last 8 to 64 files (a quarter of the epoch so far) is no new epoch."""


class Epochs:
    """Cuts a stream of opens into epochs.

    Args:
        files: how many there are; they are numbered from 0.

    Attributes:
        ended: epochs that have ended.
    """

    def __init__(self, files: int) -> None:
        self._at = np.full(files, -1, np.int64)
        self._order = array("q")
        self._again: dict[int, None] = {}
        self._score = 0
        self.ended = 0

    @property
    def opened(self) -> int:
        """Files opened in the epoch so far."""
        return len(self._order)

    def order(self) -> NDArray[np.int64]:
        """The epoch so far."""
        return np.frombuffer(bytes(self._order), np.int64)

    def opened_mask(self) -> NDArray[np.bool_]:
        """Which files were opened in the epoch so far."""
        return self._at >= 0

    def note(self, opened: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Take in what was opened; returns the order of the last epoch that ended with it, if one did."""
        ended = None
        at, order = self._at, self._order
        if not self._score and (at[opened] < 0).all() and len(set(opened.tolist())) == len(opened):
            at[opened] = np.arange(len(order), len(order) + len(opened))
            order.extend(opened.tolist())
            return None
        for file in opened.tolist():
            if at[file] < 0:
                at[file] = len(order)
                order.append(file)
                if self._score:
                    self._score -= 1
                    if not self._score:
                        self._again.clear()
                continue
            recent = min(RECENT_MAX, max(RECENT_MIN, len(order) // RECENT_SHARE))
            if file in self._again or at[file] >= len(order) - recent:
                continue
            self._again[file] = None
            self._score += 1
            if self._score >= min(REPEATS, max(1, len(order) // 2)):
                ended = self._cut()
                at, order = self._at, self._order
        return ended

    def _cut(self) -> NDArray[np.int64]:
        ended = self.order()
        self.ended += 1
        self._order = array("q", self._again)
        self._at[:] = -1
        self._at[list(self._again)] = np.arange(len(self._order))
        self._again.clear()
        self._score = 0
        return ended
