"""Order: which files a program opens next, by all that is known of its order.

Orders are believed in this sequence, the first one that the program keeps to: what the user gave (a file
of paths, or a seed), the program's last epoch, the last epoch of an earlier run, and the sorted order.

`OrderFollower` finds where the program is in a known order: opens come a little out of order, because several
workers take their batches from one sequence. An open within `slack` of where the program is counts as
expected. When fewer than half are, the program has diverged: nothing is predicted until most opens lie
close together again somewhere in the order. `Epochs` learns the order of a program: an epoch ends where
files begin to repeat. `read_order_file` reads a given one.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

LINES_MAX = 1 << 27  # more are not read: 90 epochs of ImageNet are 115 million
_LINE_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True, eq=False)
class OrderFile:
    """What an order file says: the files of each epoch, and lines that name no known file."""

    epochs: tuple[NDArray[np.int64], ...]
    unknown: int = 0
    first_unknown: bytes = b""


def read_order_file(
    path: bytes, roots: Sequence[tuple[bytes, bytes]], find: Callable[[bytes], int], files: int
) -> OrderFile:
    """Read an order file.

    `roots` are (as it may be spelled, resolved path); `find` gives a file's number by its path below a
    resolved root, -1 where there is none.
    """
    epochs: list[NDArray[np.int64]] = []
    seen = np.zeros(files, bool)
    now: list[int] = []
    unknown, first = 0, b""
    with open(path, "rb") as lines:
        for count, line in enumerate(lines):
            name = line.rstrip(b"\r\n")
            if count >= LINES_MAX:
                break
            if not name:
                continue
            number = _number(name, roots, find) if len(line) <= _LINE_BYTES_MAX else -1
            if number < 0:
                unknown, first = unknown + 1, first or name[:256]
                continue
            if seen[number]:
                epochs.append(np.array(now, np.int64))
                seen[now] = False
                now = []
            seen[number] = True
            now.append(number)
    if now:
        epochs.append(np.array(now, np.int64))
    return OrderFile(tuple(epochs), unknown, first)


def _number(name: bytes, roots: Sequence[tuple[bytes, bytes]], find: Callable[[bytes], int]) -> int:
    if not name.startswith(b"/"):
        for _, resolved in roots:
            if (number := find(os.path.normpath(os.path.join(resolved, name)))) >= 0:
                return number
        return -1
    name = os.path.normpath(name)
    for spelled, resolved in roots:
        top = spelled.rstrip(b"/")
        if name.startswith(top + b"/") and (number := find(resolved + name[len(top) :])) >= 0:
            return number
    return find(name)


REPEATS = 8  # more repeats than new files by so many: an epoch has begun
RECENT_SHARE, RECENT_MIN, RECENT_MAX = 4, 8, 64
"""A repeat of one of the last 8 to 64 files (a quarter of the epoch so far) is no new epoch."""


class Epochs:
    """Cuts a stream of opens into epochs."""

    def __init__(self, files: int) -> None:
        self._at = np.full(files, -1, np.int64)
        self._order = array("q")
        self._again: dict[int, None] = {}
        self._score = 0
        self.ended = 0  # epochs that have ended

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


class OrderFollower:
    """Follows a program through epochs; if it is `following`, the order is believed before any open."""

    def __init__(
        self, files: int, order_of: Callable[[int], NDArray[np.int64]], *, following: bool
    ) -> None:
        self._files = files
        self._order_of = order_of  # gives the same array again where epochs are alike
        self._number = 0
        self._now = _Epoch(order_of(0), files)
        self._next: _Epoch | None = None
        self.following = following and len(self._now) > 0  # whether the program keeps to the order
        self.head = 0  # the position behind the furthest open
        self._opened = np.zeros(files, bool)
        self._before: NDArray[np.bool_] | None = None
        self._judged = np.empty(0, bool)
        self._last = np.empty(0, np.int64)

    @property
    def slack(self) -> int:
        """Positions by which opens may be out of order."""
        return min(SLACK_MAX, max(SLACK_MIN, len(self._now) // SLACK_SHARE))

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
        files = self._now.sequence[self.head : self.head + count]
        if len(files) < count:
            rest = self._following_epoch().sequence[: count - len(files)]
            files = np.concatenate((files, rest))
        return files

    def until(self, files: NDArray[np.int64], grace: int = 0) -> NDArray[np.int64]:
        """Opens until each of these files is next opened; `NEVER` for what is in no order.

        Files that were opened within `grace` positions (never more than `slack`) count as opened now: other
        workers may still be about to.
        """
        position = self._now.position_of[files]
        later = self._following_epoch().position_of[files]
        again = np.where(later >= 0, len(self._now) - self.head + later, NEVER)
        opened = self._opened[files] | (position < 0)
        recent = opened & (position >= self.head - min(grace, self.slack))
        opens = np.where(opened, again, np.maximum(0, position - self.head))
        return np.where(recent & (grace > 0), 0, opens)


GivenOrder = tuple[str, "Callable[[int], NDArray[np.int64]]"]
"""What the user says: a name for it, and the order of each epoch."""


def given_order(
    files: int, epochs: Sequence[NDArray[np.int64]] = (), seed: int | None = None
) -> GivenOrder | None:
    """The order by the files of each epoch, begun again after the last one, or by a seed over all files."""
    if epochs:
        return "given", lambda epoch: epochs[epoch % len(epochs)]
    if seed is None or not files:
        return None
    from headrace.order import Shuffled

    shuffled = Shuffled(files, seed=seed)
    return "seed", lambda epoch: shuffled.indices(epoch, 0, files)


class Foresight:
    """Watches opens of files, numbered in the order of their paths, and says what comes.

    It may be given an order by the user, and that of an earlier run of the same job.
    """

    def __init__(
        self,
        files: int,
        given: GivenOrder | None = None,
        earlier: NDArray[np.int64] | None = None,
    ) -> None:
        self._files = files
        self._epochs = Epochs(files)
        self._followers: dict[str, OrderFollower] = {}
        self.learned: NDArray[np.int64] | None = None  # the last epoch's; None: none has ended
        self.divergences = 0  # how often the program left the order that it was believed to keep to
        if given is not None:
            self._followers[given[0]] = OrderFollower(files, given[1], following=True)
        self._followers["learned"] = _same_again(files, np.empty(0, np.int64), following=False)
        if earlier is not None:
            self._followers["earlier run"] = _same_again(files, earlier, following=False)
        every = np.arange(files, dtype=np.int64)
        self._followers["sorted"] = _same_again(files, every, following=False)

    @property
    def epochs(self) -> int:
        """Epochs that have ended."""
        return self._epochs.ended

    def opened_mask(self) -> NDArray[np.bool_]:
        """Which files were opened in the epoch so far."""
        return self._epochs.opened_mask()

    def worth_keeping(self) -> NDArray[np.int64] | None:
        """The order for a later run: of the last epoch, or of one that is well under way."""
        if self.learned is not None:
            return self.learned
        return self._epochs.order() if 2 * self._epochs.opened > self._files else None

    @property
    def order(self) -> str:
        """Which order the program keeps to; '': none that is known."""
        return next((name for name, one in self._followers.items() if one.following), "")

    def note(self, opened: NDArray[np.int64]) -> None:
        """Take in what was opened, in order; int64 numbers of files."""
        best = self._best()
        for one in self._followers.values():
            one.note(opened)
        if best is not None and not best.following:
            self.divergences += 1
        ended = self._epochs.note(opened)
        if ended is None:
            return
        self.learned = ended  # the next epoch may be like it
        if not self._followers["learned"].following:  # else it goes on in what it knows already
            after = _same_again(self._files, ended, following=True)
            after.note(self._epochs.order())
            self._followers["learned"] = after

    def coming(self, count: int) -> NDArray[np.int64]:
        """The next files, at most so many; none where no order is known."""
        best = self._best()
        return best.coming(count) if best is not None else np.empty(0, np.int64)

    def until(self, files: NDArray[np.int64], grace: int = 0) -> NDArray[np.int64] | None:
        """Opens until each of these files is next opened, see `OrderFollower.until`; None: not known."""
        best = self._best()
        return best.until(files, grace) if best is not None else None

    def _best(self) -> OrderFollower | None:
        return next((one for one in self._followers.values() if one.following), None)


def _same_again(files: int, order: NDArray[np.int64], *, following: bool) -> OrderFollower:
    return OrderFollower(files, lambda _: order, following=following)
