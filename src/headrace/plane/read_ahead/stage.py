"""ReadAhead: reads the files of coming samples before the user's code opened them.

A stage between files and a dataset that opened them itself. It is told which samples come
(`coming`), knows their files (from the dataset's attributes or from what it learned), has them read
natively within its budget, and answers the dataset's `open` from memory (`opens`). Bytes are
served only if the path still names exactly the file that was read; in every other case the real open
happens, with its own errors: a plan that is wrong costs time and nothing else.

It belongs to one process; in a forked child it begins anew, with what was learned before the fork.
It never decides its own depth: `turn` does. Safe for concurrent threads.

Invariants:
  - a planned file is served at most once, and dropped when its sample is over or was passed by
  - an open never waits for a read that has not begun, nor much longer than reads usually take
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from headrace.base.lifetime import Closing
from headrace.io.simulation import simulated_paths
from headrace.plane.read_ahead import opens
from headrace.plane.read_ahead.plan import (
    CacheBypass,
    Plan,
    PlannedFile,
    PlannedReader,
    PlannedSample,
    ReadJob,
    Usefulness,
)
from headrace.plane.read_ahead.sample_files import NO_FILES, Paths, PredictedFiles, guess_paths
from headrace.plane.stage import ConsumerStats, StageStats, native_figures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from headrace import _native
    from headrace.plane.read_ahead.sample_files import SharedLog


@dataclass(slots=True)
class Counts:
    """Counts since the start. One `planned` file ends as exactly one of the others, up to `late`."""

    planned: int = 0
    served: int = 0
    skipped: int = 0
    """Nobody opened it before its turn had passed."""
    changed: int = 0
    """It was no longer what had been read, or the read met an error: opened directly."""
    late: int = 0
    """Opened before its read had begun, or a read that took too long: opened directly."""
    unplanned: int = 0
    """Files that samples opened though nobody had planned them (counted while learning)."""
    bytes_served: int = 0
    wait_s: float = 0.0
    """How long opens waited for reads that had begun."""


Cold = Literal["auto", "direct", "fill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAheadOptions:
    """Bounds and first settings of a ReadAhead; the knobs are turned later.

    Raises ValueError if a value is out of bounds.
    """

    reads_in_flight: int = 16
    """Files in work at a time. 16 saturate an NVMe device at 110 kB."""

    buffer_bytes: int = 64 << 20
    """Memory for files that are being read, or were read and not opened yet."""

    cold: Cold = "auto"
    """How files that are not in the page cache are read: `direct` past it, with the least CPU, or
    `fill`, so that the next epoch finds them there. `auto` fills if the device is what the consumer
    waits for, and the dataset fits into half of the memory that is free."""

    plan_max: int = 1 << 20
    """Coming samples that are kept; what is announced beyond that is opened directly."""

    learn: bool = True
    """Watch which files samples open, where no list of the data set says it."""

    knowledge_bytes: int = 256 << 20
    """Memory for what was learned."""

    bypass: bool = True
    """Pause while all files come from the page cache anyway."""

    wait_s: float = 60.0
    """An open waits for a read that has begun, never longer than this; much less as a rule."""

    def __post_init__(self) -> None:
        bounds = {
            "reads_in_flight": (1, 1024),
            "buffer_bytes": (64 << 10, 1 << 48),
            "plan_max": (1, 1 << 32),
            "knowledge_bytes": (1 << 16, 1 << 48),
            "wait_s": (0.0, 1e9),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, expected {low} to {high}")
        if self.cold not in get_args(Cold):
            raise ValueError(f"cold is {self.cold!r}, expected one of {get_args(Cold)}")


_CATCH_UP_MAX = 4096  # coming samples that are searched for one that was not planned yet
_SLACK = 64  # samples that the consumer may leave behind while nobody says which it makes
_STRAYS_MAX = 64  # samples in a row outside the plan, after which what is planned is dropped
READS_AHEAD = "files are read ahead"
WATCHING = "watching what samples open"
WATCHING_NONE = f"{WATCHING}: so far {NO_FILES}"
CACHED = "not needed: the files are opened as ever, because they lie in the page cache"
CACHED_AGAIN = f"{CACHED} by now"
_NOT_BEGUN = frozenset({errno.ECANCELED, errno.ETIMEDOUT, errno.EFBIG, errno.ENOBUFS})

_all: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


class ReadAhead(Closing):
    """Serves the files of coming samples from memory."""

    name = "ahead"

    def __init__(
        self,
        samples: int,
        source: Paths | None = None,
        options: ReadAheadOptions | None = None,
        log: SharedLog | None = None,
    ) -> None:
        self.options = options or ReadAheadOptions()
        self.figures = Counts()
        self._samples = samples
        self._files = PredictedFiles(samples, source, self.options, log)
        self._closed = False
        self._start(PlannedReader(self.options, samples))
        _all.add(self)

    def _start(self, reader: PlannedReader) -> None:
        """What belongs to one process."""
        self._reader = reader
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._plan = Plan()
        self.planned = self._plan.by_path
        self._judge = Usefulness()
        self._bypass = CacheBypass()
        self._later: deque[int | str] = deque()
        self._serves = False
        self._jobs: set[ReadJob] = set()
        self._active = self._active_max = 0
        self._strays = 0

    @classmethod
    def for_dataset(
        cls,
        dataset: Any,
        options: ReadAheadOptions | None = None,
        *,
        log: SharedLog | None = None,
    ) -> Self | None:
        """Read ahead for a map-style dataset.

        Returns:
            None where nothing can be read ahead: no length, no `__getitem__`, or (learning
            switched off) no list that names its files.
        """
        if not hasattr(dataset, "__getitem__"):
            return None
        try:
            samples = len(dataset)
        except Exception:  # noqa: BLE001  # a user's __len__ may raise anything
            return None
        source = guess_paths(dataset)
        options = options or ReadAheadOptions()
        if source is None and not options.learn:
            return None
        return cls(samples, source, options, log)

    # -- the plan ------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more samples `coming` takes."""
        return max(0, self.options.plan_max - len(self._later) - len(self._plan))

    def coming(self, items: Iterable[Any]) -> int:
        """Announce what will be asked for, in this order, after all that was announced before.

        Returns:
            How many were taken; the others will be opened directly.
        """
        taken = 0
        with self._lock:
            if self._closed:
                return 0
            idle = not self._serves and not self._later
            if idle and isinstance(items, (list, tuple)) and self._bypass.skips(len(items)):
                return len(items)
            room = self.room
            for item in items:
                if taken == room:
                    break
                self._later.append(_key(item))
                taken += 1
            self._pump()
        return taken

    def _pump(self) -> None:
        """Hand files to the reader while its memory lasts."""
        files_max, jobs_max = self._reader.sizes()
        while self._later and len(self._jobs) < jobs_max:
            self._submit(files_max)

    def _submit(self, files_max: int) -> None:
        job = ReadJob()
        raw: list[bytes] = []
        while self._later and len(raw) < files_max:
            if self._bypass.due():
                self._look()
            key = self._later.popleft()
            paths = () if self._bypass.paused else self._files.of(key)
            if paths and self._judge.admits():
                self._plan.add(key, [(p, len(raw) + i) for i, p in enumerate(paths)], job)
                raw += map(os.fsencode, paths)
        if not raw:
            if self._bypass.paused and not self._plan:
                self._stop_serving()  # the real `open` is the fastest
            return
        opens.serve(self)
        self._serves = True
        self.figures.planned += len(raw)
        job.native = self._reader.order(raw)
        self._jobs.add(job)

    def _look(self) -> None:
        """See whether the coming files lie in the page cache; simulated storage has none."""
        paths = list[str]()
        if self.options.bypass and simulated_paths() is None:
            coming = len(self._later)
            looks = min(coming, self._bypass.looks)
            for at in range(looks):
                paths += self._files.of(self._later[at * coming // looks])[:1]
        self._bypass.look(paths)

    # -- serving -------------------------------------------------------------------------------

    def take(self, path: str) -> _native.FileBytes | None:
        """The bytes of a planned file, if they were read and are still true.

        Returns:
            None when the file must be opened directly. Each planned use is served once.
        """
        with self._lock:
            planned = self._plan.take(path)
            if planned is None:
                return None
            if not self._active:  # no samples are announced: opens tell how far the consumer is
                self._pass(planned.occurrence.number)
            native = planned.job.native
        if native is None:
            return None
        begun = time.perf_counter()
        content = native.take(planned.slot, self.options.wait_s)
        waited = time.perf_counter() - begun
        with self._lock:
            self.figures.wait_s += waited
            if not isinstance(content, int):
                self._note_served(len(content))
            elif content in _NOT_BEGUN:
                self.figures.late += 1
                self._judge.note(good=1)  # right, and too slow: no reason to stop
            else:
                self.figures.changed += 1
                self._judge.note(changed=1)
            del native  # the job's memory goes with its last file
            self._leave(planned)
        return None if isinstance(content, int) else content

    def _note_served(self, size: int) -> None:
        self.figures.served += 1
        self.figures.bytes_served += size
        self._judge.note(good=1)
        self._reader.note_served(size, self.figures.wait_s)
        if self._bypass.note_served() and self.options.bypass and (recent := self._reader.recent()):
            self._bypass.judge(*recent)

    def _leave(self, planned: PlannedFile) -> None:
        """A file is served or dropped: its job may be over, and make room."""
        job = planned.job
        job.left -= 1
        if job.left == 0:
            job.native = None
            self._jobs.discard(job)
            self._pump()

    def _drop(self, files: list[PlannedFile]) -> None:
        for planned in files:
            if planned.job.native is not None:
                planned.job.native.forget(planned.slot)
            self.figures.skipped += 1
            self._judge.note(skipped=1)
            self._leave(planned)

    def _pass(self, number: int) -> None:
        """The consumer is at occurrence `number`: what lies well before it is dropped."""
        slack = 2 * (self._active_max - 1) if self._active_max else _SLACK
        self._drop(self._plan.pass_before(number - slack))

    @property
    def bypassed(self) -> bool:
        """Whether the files lie in the page cache, and nothing is read ahead or learned for now."""
        return self._bypass.paused and not self._files.watching

    @property
    def learns(self) -> bool:
        """Whether samples are watched to learn their files, and may go unwatched while that pays nothing."""
        return self.options.bypass and self._files.watching

    def let_go(self) -> None:
        """Drop what was announced and planned: its files are opened as ever."""
        with self._lock:
            self.figures.skipped += self._clear()
            self._stop_serving()

    def _clear(self) -> int:
        """Forget what was announced and planned, and how many files were planned."""
        self._later.clear()
        left = self._plan.clear()
        for planned in left:
            self._leave(planned)
        return len(left)

    def _stop_serving(self) -> None:
        if self._serves:
            opens.stop_serving(self)
            self._serves = False

    # -- samples -------------------------------------------------------------------------------

    def sample(self, index: Any) -> AbstractContextManager[Any]:
        """A context in which the calling thread makes sample `index`.

        What was planned for it and is not opened by its end is dropped, and so is what was planned
        for samples before it. While learning, the files that it opens are noted.
        """
        if self.bypassed and not self.planned:
            return _NOTHING
        return _Sample(self, _key(index))

    def samples(self) -> AbstractContextManager[Any]:
        """A context around the making of several samples, in which each costs less."""
        # Whoever replaces a builtin makes the interpreter forget what it had specialised: not for each sample.
        return opens.OpensWatch() if self._files.watching else _NOTHING

    def _begin(self, sample: _Sample) -> None:
        if self._files.watching:
            sample.watch = opens.OpensWatch()
            sample.watch.begin()
        with self._lock:
            self._active += 1
            self._active_max = max(self._active_max, self._active)
            sample.occurrence = self._plan.begin(sample.key)
            if sample.occurrence is not None:
                self._strays = 0
                self._pass(sample.occurrence.number)
            elif self._plan and self._files.of(sample.key):  # else nothing was to be planned
                self._catch_up(sample.key)

    def _catch_up(self, key: int | str) -> None:
        """The consumer is where nothing is planned: what it left behind must not hold the memory."""
        self._strays += 1
        near = enumerate(islice(self._later, _CATCH_UP_MAX))
        position = next((i for i, coming in near if coming == key), None)
        if position is not None:
            for _ in range(position + 1):
                self._later.popleft()
        if position is not None or self._strays >= _STRAYS_MAX:
            self._strays = 0
            self._pass(self._plan.next_number)

    def _end(self, sample: _Sample, *, failed: bool) -> None:
        paths = sample.watch.end() if sample.watch is not None else None
        with self._lock:
            self._active -= 1
            if sample.occurrence is not None:
                self._drop(self._plan.finish(sample.occurrence))
            if paths is not None and not failed and isinstance(sample.key, int):
                self._files.note(sample.key, paths)
                self.figures.unplanned = self._files.unplanned

    def sync(self) -> None:
        """Exchange what was learned with the processes that share the log. Cheap without news."""
        with self._lock:
            self._files.sync()

    # -- the stage -----------------------------------------------------------------------------

    def knobs(self) -> Mapping[str, int]:
        """The knobs as they stand."""
        return dict(self._reader.knobs)

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Turn `reads_in_flight` and `buffer_bytes`; other knobs belong to other stages.

        Raises ValueError if a value is not positive.
        """
        with self._lock:
            self._reader.turn(knobs)
            self._pump()

    def stats(self) -> StageStats:
        """Figures since the start, in this process."""
        with self._lock:
            native = self._reader.stats()
            figures = self.figures
            return StageStats(
                name=self.name,
                samples=figures.served,
                bytes=figures.bytes_served,
                simulation=self._reader.simulation,
                in_flight_s=native.get("busy_s", 0.0),
                **native_figures(native),
            )

    def consumer(self) -> ConsumerStats:
        """What the code that opens files has done since it opened the first: each file is a delivery."""
        with self._lock:
            figures = self.figures
            files = figures.served + figures.late
            seconds = time.monotonic() - self._reader.began_s if files else 0.0
            return ConsumerStats(
                waited_s=figures.wait_s,
                worked_s=max(0.0, seconds - figures.wait_s),
                batches=files,
                samples=files,
                bytes=figures.bytes_served,
            )

    @property
    def reads(self) -> bool:
        """Whether files are being read ahead at present."""
        return self._reader.working and not self._bypass.paused

    @property
    def why_off(self) -> str | None:
        """Why nothing is read ahead at present; None: it is, or may be."""
        if self._judge.reason is not None:
            return self._judge.reason
        return self._files.why_none

    @property
    def state(self) -> str:
        """What is done at present, or why nothing is: words that stay the same from batch to batch."""
        if self.why_off:
            return self.why_off
        if self.figures.planned:
            return READS_AHEAD
        if not self._bypass.paused:
            return WATCHING_NONE if self._files.none_so_far else WATCHING
        # Files that are known by having been opened lie there because of that.
        return CACHED_AGAIN if self._files.knowledge.known else CACHED

    def explain(self) -> str:
        """One line on what was read ahead, and what became of it."""
        f = self.figures
        if not f.planned:
            return self.state
        text = (
            f"{f.served} of {f.planned} planned files were served from memory "
            f"({self._files.explain()}); {f.skipped} were not opened, {f.changed} "
            f"had changed or could not be read, {f.late} were opened before they were read"
        )
        if self.why_off:
            return f"{text}; {self.why_off}"
        return f"{text}; now they lie in the page cache" if self._bypass.paused else text

    def close(self, seconds: float = 5.0) -> bool:
        """Stop: the real `open` serves again, memory is given back, the threads end.

        Returns:
            False if a read never answered and its thread was left behind.
        """
        with self._lock:
            self._closed = True
            self._clear()
            opens.stop_serving(self)  # within: a thread that opens a planned file would serve again
            self.sync()
            native = self._reader.detach()
        return native is None or native.close(seconds)

    def _forget_parent(self) -> None:
        """In a forked child: threads, memory and plan are the parent's."""
        self._files.knowledge.forget_lock()  # what was learned before the fork is ours
        self._start(PlannedReader(self.options, self._samples, self._reader.knobs))


_NOTHING = nullcontext()


class _Sample:
    """The time in which one thread makes one sample."""

    __slots__ = ("_ahead", "key", "occurrence", "watch")

    def __init__(self, ahead: ReadAhead, key: int | str) -> None:
        self._ahead = ahead
        self.key = key
        self.occurrence: PlannedSample | None = None
        self.watch: opens.OpensWatch | None = None

    def __enter__(self) -> Self:
        self._ahead._begin(self)  # noqa: SLF001  # two halves of one thing
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ahead._end(self, failed=kind is not None)  # noqa: SLF001


def _key(item: Any) -> int | str:
    if type(item) is int:
        return item
    try:
        return as_index(item)
    except TypeError:
        pass
    try:
        return os.fsdecode(item)
    except TypeError:
        return repr(item)  # a key of another kind: nothing is known of it


def _after_fork_in_child() -> None:
    opens.forget_in_child()
    for ahead in list(_all):
        ahead._forget_parent()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork_in_child)
