"""The files that samples are about to open, in the order in which the samples come.

An `Occurrence` is one coming sample, a `Planned` one of its files. The same path may be planned
several times; each is served once, the earliest first. Not safe for concurrent users: ReadAhead
holds its lock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace import _native

__all__ = ["Occurrence", "OpenJob", "Plan", "Planned"]


class OpenJob:
    """Files that are read together, and how many of them are still to be taken or dropped."""

    __slots__ = ("left", "native")

    def __init__(self) -> None:
        self.native: _native.FileJob | None = None
        self.left = 0


class Planned:
    """One file of one coming sample."""

    __slots__ = ("job", "later", "occurrence", "path", "slot")

    def __init__(self, path: str, occurrence: Occurrence, job: OpenJob, slot: int) -> None:
        self.path = path
        self.occurrence = occurrence
        self.job = job
        self.slot = slot
        self.later: deque[Planned] | None = None  # the same path again; held by the first


class Occurrence:
    """One coming sample: `number` is its place among all that were ever planned."""

    __slots__ = ("files", "key", "number", "over")

    def __init__(self, key: int | str, number: int) -> None:
        self.key = key
        self.number = number
        self.files: list[Planned] = []
        self.over = False


class Plan:
    """Coming samples and their files."""

    def __init__(self) -> None:
        self.by_path: dict[str, Planned] = {}
        self._by_key: dict[int | str, deque[Occurrence]] = {}
        self._order: deque[Occurrence] = deque()
        self.next_number = 0
        """The number of the next occurrence."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: int | str, paths: list[tuple[str, int]], job: OpenJob) -> None:
        """Append a sample with its (path, slot of the job) pairs."""
        occurrence = Occurrence(key, self.next_number)
        self.next_number += 1
        for path, slot in paths:
            planned = Planned(path, occurrence, job, slot)
            occurrence.files.append(planned)
            first = self.by_path.setdefault(path, planned)
            if first is not planned:
                if first.later is None:
                    first.later = deque()
                first.later.append(planned)
        job.left += len(paths)
        self._order.append(occurrence)
        same = self._by_key.get(key)
        if same is None:
            same = self._by_key[key] = deque()
        same.append(occurrence)

    def begin(self, key: int | str) -> Occurrence | None:
        """The earliest occurrence of a sample; it stays until `finish`."""
        same = self._by_key.get(key)
        return same[0] if same else None

    def take(self, path: str) -> Planned | None:
        """The earliest planned use of a file, which is removed."""
        planned = self.by_path.get(path)
        if planned is not None:
            self._remove(planned)
        return planned

    def _remove(self, planned: Planned) -> None:
        planned.occurrence.files.remove(planned)
        first = self.by_path[planned.path]
        if first is not planned:
            if first.later is not None:
                first.later.remove(planned)
            return
        if not planned.later:
            del self.by_path[planned.path]
            return
        heir = planned.later.popleft()
        heir.later = planned.later or None
        self.by_path[planned.path] = heir

    def finish(self, occurrence: Occurrence) -> list[Planned]:
        """A sample is over, or its turn has passed: the files that nobody opened."""
        if occurrence.over:
            return []
        occurrence.over = True
        left = list(occurrence.files)
        for planned in left:
            self._remove(planned)
        same = self._by_key[occurrence.key]
        same.remove(occurrence)
        if not same:
            del self._by_key[occurrence.key]
        return left

    def pass_before(self, number: int) -> list[Planned]:
        """Finish all occurrences before `number`: the files that nobody opened."""
        dropped: list[Planned] = []
        order = self._order
        while order and (order[0].over or order[0].number < number):
            dropped += self.finish(order.popleft())
        return dropped

    def clear(self) -> list[Planned]:
        """Finish everything."""
        return self.pass_before(self.next_number)
