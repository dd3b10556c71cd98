"""Follower: where a program is in an order that is known, by the files that it opens. Pure.

Opens come a little out of order: several workers take their batches from one sequence. An open within
`slack` of where the program is counts as expected. When fewer than half are, the program has diverged:
nothing is predicted until most opens lie close together again somewhere in the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["NEVER", "Follower"]

SLACK_MIN, SLACK_MAX = 32, 4096
"""Eight workers with batches of 512 spread their opens over 4,096 positions."""

SLACK_SHARE = 8
"""An eighth of a small data set: of opens at random a quarter would be expected, half are asked for."""

STEP = 32
"""Opens that are looked at together, or a quarter of `slack`: within them all may be out of order."""

NEVER = 1 << 62

RECENT = 32
JUDGED_MIN = 16
EVIDENCE, EVIDENCE_MIN = 16, 13
"""So many of the last opens must lie together: at random, once in 100,000 times."""


class _Epoch:
    """One epoch's order, and where each file stands in it."""

    def __init__(self, sequence: NDArray[np.int64], files: int) -> None:
        self.sequence = sequence
        self.position_of = np.full(files, -1, np.int64)
        # A file that comes twice stands where it comes first.
        self.position_of[sequence[::-1]] = np.arange(len(sequence) - 1, -1, -1)

    def __len__(self) -> int:
        return len(self.sequence)


class Follower:
    """Follows a program through epochs.

    Args:
        files: how many there are; they are numbered from 0.
        order_of: the order of an epoch (0, 1, ...), int64; the same array again where they are alike.
        following: whether the order is believed before anything was opened.

    Attributes:
        following: whether the program keeps to the order.
        head: the position behind the furthest open.
    """

    def __init__(
        self, files: int, order_of: Callable[[int], NDArray[np.int64]], *, following: bool
    ) -> None:
        self._files = files
        self._order_of = order_of
        self._number = 0
        self._now = _Epoch(order_of(0), files)
        self._next: _Epoch | None = None
        self.following = following and len(self._now) > 0
        self.head = 0
        self._opened = np.zeros(files, bool)
        self._before: NDArray[np.bool_] | None = None
        self._judged = np.empty(0, bool)
        self._last = np.empty(0, np.int64)

    @property
    def slack(self) -> int:
        """Positions by which opens may be out of order."""
        return min(SLACK_MAX, max(SLACK_MIN, len(self._now) // SLACK_SHARE))

    @property
    def epoch(self) -> int:
        """The epoch that the program is in."""
        return self._number

    def note(self, opened: NDArray[np.int64]) -> None:
        """Take in what was opened, in order."""
        if not len(self._now):
            return
        step = max(STEP, self.slack // 4)
        at = 0
        while at < len(opened) and self.following:
            self._note(opened[at : at + step])
            at += step
        if at < len(opened):
            self._last = np.concatenate((self._last, opened[at:][-EVIDENCE:]))[-EVIDENCE:]
            self._find()

    def _note(self, opened: NDArray[np.int64]) -> None:
        self._last = np.concatenate((self._last, opened[-EVIDENCE:]))[-EVIDENCE:]
        hits, neutral = self._place(opened)
        self._judged = np.concatenate((self._judged, hits[~neutral]))[-RECENT:]
        if len(self._judged) >= JUDGED_MIN and 2 * int(self._judged.sum()) < len(self._judged):
            self.following = False
            self._find()

    def _place(self, opened: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Move on; returns which opens were expected, and which say nothing."""
        now, length = self._now, len(self._now)
        position = now.position_of[opened]
        low, reach = max(0, self.head - self.slack), self.head + self.slack + len(opened)
        again = self._opened[opened]
        hits = ~again & (position >= low) & (position < reach)
        beyond = np.zeros(len(opened), bool)
        if reach > length:  # the next epoch may have begun
            position_next = self._following_epoch().position_of[opened]
            beyond = ~hits & (position_next >= 0) & (length + position_next < reach)
        neutral = again & (position >= low)
        if self._before is not None:  # late ones of the epoch before
            neutral |= ~self._before[opened]
        self._opened[opened[hits]] = True
        if hits.any():
            self.head = max(self.head, int(position[hits].max()) + 1)
        if beyond.any():
            head = int(position_next[beyond].max()) + 1
            self._turn_over(opened[beyond], head)
        hits |= beyond
        return hits, neutral & ~hits

    def _turn_over(self, opened: NDArray[np.int64], head: int) -> None:
        """The next epoch has begun."""
        # Files that are in no epoch's order are none that is late.
        self._before = self._opened | (self._now.position_of < 0)
        self._now, self._next = self._following_epoch(), None
        self._number += 1
        self.head = head
        self._opened = np.zeros(self._files, bool)
        self._opened[opened] = True

    def _following_epoch(self) -> _Epoch:
        if self._next is None:
            sequence = self._order_of(self._number + 1)
            same = sequence is self._now.sequence
            self._next = self._now if same else _Epoch(sequence, self._files)
        return self._next

    def _find(self) -> None:
        """Look for a place where the last opens lie together, in this epoch or the next."""
        if len(self._last) < EVIDENCE:
            return
        here = self._together(self._now)
        if here is None:
            after = self._following_epoch()
            there = self._together(after) if after is not self._now else None
            if there is None:
                return
            self._turn_over(self._last, there)
        else:
            self._opened[:] = False
            self._opened[self._last] = True
            self.head = here
        self._before = None
        self._judged = np.empty(0, bool)
        self.following = True

    def _together(self, epoch: _Epoch) -> int | None:
        """The position behind the last opens, if they lie together there."""
        positions = sorted(
            epoch.position_of[self._last].tolist()
        )  # faster than numpy: there are 16
        middle, reach = positions[EVIDENCE // 2], self.slack // 2
        near = {p for p in positions if p >= 0 and abs(p - middle) <= reach}
        return max(near) + 1 if len(near) >= EVIDENCE_MIN else None

    def coming(self, count: int) -> NDArray[np.int64]:
        """The next files, at most so many; none while the program does not keep to the order."""
        if not self.following:
            return np.empty(0, np.int64)
        found = self._now.sequence[self.head : self.head + count]
        if len(found) < count:
            rest = self._following_epoch().sequence[: count - len(found)]
            found = np.concatenate((found, rest))
        return found

    def until(self, files: NDArray[np.int64], grace: int = 0) -> NDArray[np.int64]:
        """Opens until each of these files is next opened; `NEVER` for what is in no order.

        Args:
            files: their numbers.
            grace: files that were opened within so many positions count as opened now: other workers may
                still be about to. Never more than `slack`.
        """
        position = self._now.position_of[files]
        later = self._following_epoch().position_of[files]
        again = np.where(later >= 0, len(self._now) - self.head + later, NEVER)
        opened = self._opened[files] | (position < 0)
        recent = opened & (position >= self.head - min(grace, self.slack))
        found = np.where(opened, again, np.maximum(0, position - self.head))
        return np.where(recent & (grace > 0), 0, found)
