"""Order check: whether two runs opened the same files in the same order. Pure.

A program with several processes that read opens files in an order that depends on which of them was quicker:
then each process's own order is compared. A loader that reads ahead opens files when it likes, and some twice:
then only which files they are can be compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Match", "Sameness", "compare_orders", "worst"]


class Sameness(StrEnum):
    """How much two runs agree, best first."""

    SAME = "same order"
    BY_PROCESS = "same order in each process"
    AHEAD = "same files, read ahead"
    OTHER_ORDER = "same files, another order"
    OTHER_FILES = "other files"


@dataclass(frozen=True, slots=True)
class Match:
    """What two runs have in common.

    Attributes:
        sameness: how much.
        opens: of the first run.
        moved: how far an open is from its place in the first run, at most; 0 in the same order.
        only_first: files that the second did not open as often, a few of them.
        only_second: files that the first did not open as often, a few of them.
    """

    sameness: Sameness
    opens: int
    moved: int = 0
    only_first: tuple[bytes, ...] = ()
    only_second: tuple[bytes, ...] = ()

    @property
    def in_order(self) -> bool:
        """Whether each process opened the same files in the same order."""
        return self.sameness in (Sameness.SAME, Sameness.BY_PROCESS)


_NAMES_MAX = 3


def compare_orders(
    first: Sequence[tuple[int, bytes]], second: Sequence[tuple[int, bytes]], *, ahead: bool = False
) -> Match:
    """Compare the opens of two runs.

    Args:
        first: process and path of each open, by time.
        second: the other run's.
        ahead: one of them reads ahead: only files are compared.
    """
    paths, others = [path for _, path in first], [path for _, path in second]
    if ahead:
        paths, others = sorted(set(paths)), sorted(set(others))
        if paths == others:
            return Match(Sameness.AHEAD, len(first))
    if paths == others:
        return Match(Sameness.SAME, len(paths))
    counts, other_counts = Counter(paths), Counter(others)
    if counts != other_counts:
        missing, more = counts - other_counts, other_counts - counts
        return Match(
            Sameness.OTHER_FILES, len(first), 0,
            tuple(sorted(missing)[:_NAMES_MAX]), tuple(sorted(more)[:_NAMES_MAX]),
        )  # fmt: skip
    moved = _farthest(paths, others)
    if _by_process(first) == _by_process(second):
        return Match(Sameness.BY_PROCESS, len(paths), moved)
    return Match(Sameness.OTHER_ORDER, len(paths), moved)


def worst(matches: Iterable[Match]) -> Match | None:
    """The one that agrees least; None of none."""
    ranks = list(Sameness)
    return max(matches, key=lambda m: (ranks.index(m.sameness), m.moved), default=None)


def _by_process(opens: Sequence[tuple[int, bytes]]) -> Counter[tuple[bytes, ...]]:
    """What each process opened; their numbers differ from run to run."""
    found = defaultdict[int, list[bytes]](list)
    for process, path in opens:
        found[process].append(path)
    return Counter(map(tuple, found.values()))


def _farthest(paths: Sequence[bytes], others: Sequence[bytes]) -> int:
    places = defaultdict[bytes, deque[int]](deque)
    for place, path in enumerate(others):
        places[path].append(place)
    return max((abs(place - places[path].popleft()) for place, path in enumerate(paths)), default=0)
