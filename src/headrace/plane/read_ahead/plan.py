"""Plan: whether coming files are read ahead, which files they are, and the reader that fetches them.

Policies come first: read ahead past the page cache, through it, or leave the files to the data set. Then the
plan: the same path may be planned several times; each is served once, the earliest first. Not safe for
concurrent users: ReadAhead holds its lock.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace import _native
from headrace.io.simulation import simulated_paths
from headrace.machine.host import fits_in_free_memory
from headrace.plane.stage import latency_percentile_s, own_knobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.plane.read_ahead.stage import Cold, ReadAheadOptions


@dataclass(slots=True)
class CacheBypass:
    """Pauses reading ahead while coming files lie in the page cache."""

    looks: int = 24
    """Files that are looked at: if one in ten were not resident, all but 8 % of looks would see it."""
    pause: int = 2048  # samples between two looks
    window: int = 128  # files that were read, between two verdicts on them
    resident_share: float = 0.98
    latency_s_max: float = 0.0005
    """Reads that take longer are worth hiding, also from the page cache: opening may be slow."""
    paused: bool = False
    _left: int = 0
    _seen: int = 0
    _bytes: int = 0
    _resident: int = 0

    def due(self) -> bool:
        """Whether to look before this sample is planned: at first, and while paused now and then."""
        if self._left > 0:
            self._left -= 1
            return False
        return self.paused or not self._seen + self._bytes

    def skips(self, samples: int) -> bool:
        """Whether so many samples need no look at all: paused, and the next look is not due."""
        if not self.paused or self._left < samples:
            return False
        self._left -= samples
        return True

    def look(self, paths: Iterable[str]) -> None:
        """Decide by where some files are that come until the next look; none: all stays as it is."""
        raw = [path.encode(errors="surrogateescape") for path in paths]
        self._left = self.pause
        if raw:
            resident, _ = _native.look_at_files(raw, self.latency_s_max * len(raw))
            self.paused = resident == len(raw)

    def note_served(self) -> bool:
        """A file was served; True when `judge` should be asked."""
        self._seen += 1
        return self._seen >= self.window

    def judge(self, total_bytes: int, resident_bytes: int, latency_s: float) -> None:
        """Decide by what was read since the last time.

        Bytes, and those of them from the page cache, count from the start; `latency_s` is the median read
        lately.
        """
        new = total_bytes - self._bytes
        resident = resident_bytes - self._resident
        self._seen = 0
        if not new:  # what was served had been read before the last verdict: nothing to judge by
            return
        self._bytes, self._resident = total_bytes, resident_bytes
        self.paused = resident >= self.resident_share * new and latency_s <= self.latency_s_max
        self._left = self.pause


@dataclass(slots=True)
class Usefulness:
    """Switches reading ahead off while most of what is read ahead is not used.

    After `window` files of which more than half were skipped or had changed, nothing is planned for
    `pause` samples; each time in a row the pause doubles.
    """

    window: int = 64
    pause: int = 2048
    pause_max: int = 1 << 20
    reason: str | None = None  # why it is off; None: it is on
    _good: int = 0
    _skipped: int = 0
    _changed: int = 0
    _left: int = 0
    _next_pause: int = 0

    def note(self, *, good: int = 0, skipped: int = 0, changed: int = 0) -> None:
        """Files that were planned have come to their end."""
        self._good += good
        self._skipped += skipped
        self._changed += changed
        total = self._good + self._skipped + self._changed
        if total < self.window:
            return
        if 2 * self._good >= total:
            self._next_pause = 0
        elif self.reason is None:
            self._next_pause = min(max(2 * self._next_pause, self.pause), self.pause_max)
            self._left = self._next_pause
            self.reason = (
                f"off for {self._left} samples: of the last {total} files read ahead {self._good} "
                f"were used, {self._skipped} were never opened and {self._changed} had changed"
            )
        self._good = self._skipped = self._changed = 0

    def admits(self) -> bool:
        """Whether one more sample may be planned."""
        if self.reason is None:
            return True
        self._left -= 1
        if self._left <= 0:
            self.reason = None
        return False


FIRST_FILES = 64  # all wait for the first reads: they say nothing
WINDOW_FILES = 256

WAITED_SHARE = 0.25  # of a window's time: opens that wait longer are held up
BUSY_SHARE = 0.75
"""Of the reads that may be in flight: with more of them under way, the device is at its limit."""

BOUND_WINDOWS = 2  # in a row that must say so


class ColdChoice:
    """Chooses between `direct` and `fill`; `auto` begins with the former, and changes once at most."""

    def __init__(self, wanted: Cold, samples: int) -> None:
        self.now = "direct" if wanted == "auto" else wanted
        self._open = wanted == "auto"
        self._samples = samples
        self._left = FIRST_FILES
        self._bound_windows = 0
        self._window: tuple[float, float, float] | None = None

    def note_served(self) -> bool:
        """A file was served; True when `judge` should be asked."""
        self._left -= self._open
        return self._open and self._left <= 0

    def judge(
        self, waited_s: float, busy_s: float, reads_in_flight: int, mean_bytes: float
    ) -> bool:
        """Decide by what happened since the last time; returns whether `now` has changed.

        `waited_s` (by all opens) and `busy_s` (sum over all reads) count from the start.
        """
        before, self._window = self._window, (time.monotonic(), waited_s, busy_s)
        self._left = WINDOW_FILES
        if before is None:
            return False
        seconds, waited, busy = (a - b for a, b in zip(self._window, before, strict=True))
        held_up = waited > WAITED_SHARE * seconds
        bound = held_up and busy >= BUSY_SHARE * reads_in_flight * seconds
        self._bound_windows = self._bound_windows + 1 if bound else 0
        if self._bound_windows < BOUND_WINDOWS:
            return False
        self._open = False
        if not fits_in_free_memory(self._samples * mean_bytes):
            return False
        self.now = "fill"
        return True


@dataclass(slots=True, eq=False)
class ReadJob:
    """Files that are read together, and how many of them are still to be taken or dropped."""

    native: _native.FileJob | None = None
    left: int = 0


@dataclass(slots=True, eq=False)
class PlannedFile:
    """One file of one coming sample."""

    path: str
    occurrence: PlannedSample
    job: ReadJob
    slot: int


@dataclass(slots=True, eq=False)
class PlannedSample:
    """One coming sample: `number` is its place among all that were ever planned."""

    key: int | str
    number: int
    files: list[PlannedFile] = field(default_factory=list)
    over: bool = False


class Plan:
    """Coming samples and their files: of each path, and of each sample, the earliest use comes first."""

    def __init__(self) -> None:
        self.by_path: dict[str, deque[PlannedFile]] = {}
        self._by_key: dict[int | str, deque[PlannedSample]] = {}
        self._order: deque[PlannedSample] = deque()
        self.next_number = 0  # the number of the next occurrence

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: int | str, paths: list[tuple[str, int]], job: ReadJob) -> None:
        """Append a sample with its (path, slot of the job) pairs."""
        occurrence = PlannedSample(key, self.next_number)
        self.next_number += 1
        for path, slot in paths:
            planned = PlannedFile(path, occurrence, job, slot)
            occurrence.files.append(planned)
            self.by_path.setdefault(path, deque()).append(planned)
        job.left += len(paths)
        self._order.append(occurrence)
        self._by_key.setdefault(key, deque()).append(occurrence)

    def begin(self, key: int | str) -> PlannedSample | None:
        """The earliest occurrence of a sample; it stays until `finish`."""
        same = self._by_key.get(key)
        return same[0] if same else None

    def take(self, path: str) -> PlannedFile | None:
        """The earliest planned use of a file, which is removed."""
        same = self.by_path.get(path)
        if not same:
            return None
        planned = same[0]
        self._remove(planned)
        return planned

    def _remove(self, planned: PlannedFile) -> None:
        planned.occurrence.files.remove(planned)
        _take_out(self.by_path, planned.path, planned)

    def finish(self, occurrence: PlannedSample) -> list[PlannedFile]:
        """A sample is over, or its turn has passed: the files that nobody opened."""
        if occurrence.over:
            return []
        occurrence.over = True
        left = list(occurrence.files)
        for planned in left:
            self._remove(planned)
        _take_out(self._by_key, occurrence.key, occurrence)
        return left

    def pass_before(self, number: int) -> list[PlannedFile]:
        """Finish all occurrences before `number`: the files that nobody opened."""
        dropped: list[PlannedFile] = []
        order = self._order
        while order and (order[0].over or order[0].number < number):
            dropped += self.finish(order.popleft())
        return dropped

    def clear(self) -> list[PlannedFile]:
        """Finish everything."""
        return self.pass_before(self.next_number)


def _take_out(table: dict[Any, deque[Any]], key: int | str, planned: object) -> None:
    same = table[key]
    same.remove(planned)
    if not same:
        del table[key]


_ORDER_FILES_MAX = 64
_ORDERS_MAX = 64
_ORDERS_IN_BUFFER = 8  # an order's memory is free again when the last of its files is
_MEAN_BYTES_FIRST = 128 << 10  # of a file, until some were seen


class PlannedReader:
    """Reads files in orders of some at a time. Its threads begin with the first order.

    Attributes:
        knobs: `reads_in_flight` and `buffer_bytes`.
    """

    def __init__(
        self, options: ReadAheadOptions, samples: int, knobs: Mapping[str, int] | None = None
    ) -> None:
        self.knobs = {
            "reads_in_flight": options.reads_in_flight,
            "buffer_bytes": options.buffer_bytes,
            **(knobs or {}),
        }
        self.simulation = ""  # the label of the simulated storage that is read; '': it is real
        self.began_s = 0.0  # when the first files were ordered, monotonic; 0.0: not yet
        self._native: _native.FileReader | None = None
        self._cold = ColdChoice(options.cold, samples)
        self._latencies: tuple[int, ...] = ()
        self._mean_bytes = float(_MEAN_BYTES_FIRST)

    @property
    def working(self) -> bool:
        """Whether files were ordered."""
        return self._native is not None

    def sizes(self) -> tuple[int, int]:
        """How many files make one order, and how many orders may be under way: the buffer holds them."""
        files = self.knobs["buffer_bytes"] / self._mean_bytes
        each = min(max(int(files / _ORDERS_IN_BUFFER), 1), _ORDER_FILES_MAX)
        return each, min(int(files / each) + 1, _ORDERS_MAX)

    def order(self, paths: list[bytes]) -> _native.FileJob:
        """Have some files read; returns at once."""
        if self._native is None:
            simulated = simulated_paths()
            self.simulation = "" if simulated is None else simulated.model.label
            self.began_s = time.monotonic()
            self._native = _native.FileReader(
                reads_in_flight=self.knobs["reads_in_flight"],
                buffer_bytes=self.knobs["buffer_bytes"],
                cold=self._cold.now,
                simulate=None if simulated is None else simulated.model,
                simulated_roots=[] if simulated is None else list(simulated.roots),
            )
        return self._native.submit(paths)

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Turn those of the knobs that are its own.

        Raises ValueError if a value is not positive.
        """
        mine = own_knobs(knobs, self.knobs)
        self.knobs.update(mine)
        if self._native is not None and mine:
            self._native.turn(
                reads_in_flight=mine.get("reads_in_flight"), buffer_bytes=mine.get("buffer_bytes")
            )

    def note_served(self, size: int, waited_s: float) -> None:
        """A file was used; `waited_s`: by all who wanted one, since the start."""
        self._mean_bytes += (max(size, 4096) - self._mean_bytes) / 64
        if self._native is not None and self._cold.note_served():
            busy_s, allowed = self._native.stats()["busy_s"], self.knobs["reads_in_flight"]
            if self._cold.judge(waited_s, busy_s, allowed, self._mean_bytes):
                self._native.turn(cold=self._cold.now)

    def recent(self) -> tuple[int, int, float] | None:
        """What reads say of where the files lie; None before there were any.

        Returns:
            Bytes read since the start; how many of them came from the page cache; and the median latency since
            the last time that this was asked, in seconds.
        """
        if self._native is None:
            return None
        stats = self._native.stats()
        latencies = stats["latency_us"]
        before = self._latencies or (0,) * len(latencies)
        self._latencies = latencies
        new = [a - b for a, b in zip(latencies, before, strict=True)]
        resident_bytes = stats["bytes_by_tier"]["page_cache"]
        return stats["bytes"], resident_bytes, latency_percentile_s(new, 0.5)

    def stats(self) -> dict[str, Any]:
        """The native reader's figures since the first order; {} before."""
        return {} if self._native is None else self._native.stats()

    def detach(self) -> _native.FileReader | None:
        """Let go of what has threads and memory, for whoever closes it; None: nothing was ordered."""
        native, self._native = self._native, None
        return native
