"""Watching: what the read-ahead is told in the process that fetches samples, and what fetching costs.

The read-ahead is told which indices come, from the batches that wait; and which sample is being fetched,
by the index list itself: torch fetches a batch by going through its list of indices, and the list that we
hand it reports each step. Nothing stands between torch and the user's data set.

`Making` stands around `collate_fn` and takes the batch's trace: waiting for files, decoding, collating.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from resource import RUSAGE_THREAD, getrusage
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch.utils import data as torch_data

from headrace.control import Plane
from headrace.control.knob_limits import Bounds, Limits, read_limits
from headrace.io.replaced import real_open
from headrace.plane.batch_trace import BatchTrace, read_record
from headrace.plane.read_ahead import ReadAhead
from headrace.plane.read_ahead.sample_files import NO_FILES
from headrace.plane.read_ahead.stage import (
    CACHED,
    CACHED_AGAIN,
    READS_AHEAD,
    WATCHING,
    WATCHING_NONE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence

    from headrace.frameworks.torch.dropin.pictures import NativePictures
    from headrace.plane.read_ahead import ReadAheadOptions, SharedLog


READS_MIN = 16
"""Fewer save nothing that can be measured, and finding that out costs reads."""

READS_MAX = 128
"""Of one process: each read has a thread. Eight workers reach the 1,024 of a plane."""


def tuned(ahead: ReadAhead) -> Plane:
    """Return the handle to keep beside the read-ahead; `wake` it while files are read."""
    return Plane(
        f"files read ahead in process {os.getpid()}",
        [ahead],
        ahead.consumer,
        _limits,
        frozen=("buffer_bytes",),
    )


def _limits(held_bytes: int) -> Limits:
    limits = read_limits(held_bytes=held_bytes)
    high = min(limits.reads_in_flight.high, READS_MAX)
    return replace(limits, reads_in_flight=Bounds(min(READS_MIN, high), high))


_SCHEDSTAT = "/proc/thread-self/schedstat"

_LONG_S = 0.001
"""Whoever stood still for less has not waited for files; asking why costs 20 microseconds."""


class Timing(NamedTuple):
    """When and how a batch was prepared; monotonic seconds."""

    begun_s: float
    collating_s: float
    collated_s: float
    done_s: float
    waited_s: float
    """For files, in all."""
    opened_s: float
    """Of that, for opening them."""
    cpu_s: float
    """Processor time until it was collated."""

    def trace(self) -> BatchTrace:
        """The batch's trace: what was waited for comes first."""
        ready_s = min(self.begun_s + self.waited_s, self.collating_s)
        trace = BatchTrace(read_record(self.begun_s, ready_s, self.waited_s, self.opened_s))
        trace.serial = True
        trace.decoding_s = ready_s
        trace.decoded_s, trace.collated_s = self.collating_s, self.collated_s
        trace.work_s, trace.cpu_s = trace.decoded_s - trace.decoding_s, self.cpu_s
        return trace


class Making:
    """Stands around the making of batches in one thread.

    Args:
        watcher: knows how long opens of files that were read ahead had to wait; None: nobody does.
        collate: torch's `collate_fn`.
        pictures: whose native threads decode; None: nobody's do.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        watcher: Watcher | None = None,
        pictures: NativePictures | None = None,
    ) -> None:
        self.collate = collate
        self.watcher = watcher
        self.pictures = pictures
        self._decoding = 0.0, 0.0
        self._begun_s = self._collating_s = self._collated_s = 0.0
        self._cpu_s = self._collating_cpu_s = 0.0
        self._queued_ns: int | None = None
        self._waited_s = self._opened_s = 0.0

    def begin(self) -> None:
        """A batch is begun."""
        self._collating_s = 0.0
        self._waited_s = 0.0 if self.watcher is None else self.watcher.waited_s
        if self.pictures is not None:
            self._decoding = self.pictures.waited_s, self.pictures.cpu_s
        if self._queued_ns is None:
            self._queued_ns = _queued_ns()
        self._cpu_s = time.thread_time()
        self._begun_s = time.perf_counter()

    def __call__(self, samples: Any) -> Any:
        """Collate, and note when."""
        self._collating_s = time.perf_counter()
        self._collating_cpu_s = time.thread_time()
        batch = self.collate(samples)
        self._collated_s = time.perf_counter()
        return batch

    def timing(self) -> Timing | None:
        """The batch is complete; None: nobody said that it was begun."""
        begun_s, self._begun_s = self._begun_s, 0.0
        if not begun_s:
            return None
        now_s = time.perf_counter()
        if not self._collating_s:  # an error, or an end
            return Timing(begun_s, now_s, now_s, now_s, 0.0, 0.0, 0.0)
        cpu_s = self._collating_cpu_s - self._cpu_s
        ahead_s = 0.0 if self.watcher is None else self.watcher.waited_s - self._waited_s
        # What neither ran nor waited for a processor waited for something else: for files, here.
        stopped_s = self._collating_s - begun_s - cpu_s
        if self.pictures is not None:  # whose threads worked while this one stood still
            stopped_s -= self.pictures.waited_s - self._decoding[0]
            cpu_s += self.pictures.cpu_s - self._decoding[1]
        if self.watcher is not None:
            self.watcher.fetched(max(ahead_s, stopped_s), self._collating_s - begun_s)
        if stopped_s > _LONG_S:
            stopped_s -= self._queued_s()
        waited_s = max(0.0, ahead_s, stopped_s)
        return Timing(begun_s, self._collating_s, self._collated_s, now_s, waited_s, 0.0, cpu_s)

    def _queued_s(self) -> float:
        """How long this thread has waited for a processor since this was last asked."""
        before, now = self._queued_ns, _queued_ns()
        self._queued_ns = now
        return 0.0 if before is None else (now - before) * 1e-9

    def __reduce__(self) -> Any:
        return Making, (self.collate,)


MESSAGE_BYTES = 4096
"""Of a batch, the most that a thread reads which is not told more than what is wanted."""


def _read_so_far() -> tuple[int, int] | None:
    """Bytes that this thread has read by any call, and pages that it waited for; None: not known."""
    try:
        with real_open("/proc/thread-self/io", "rb", 0) as f:
            return int(f.read(32).split()[1]), getrusage(RUSAGE_THREAD).ru_majflt
    except (OSError, ValueError, IndexError):
        return None


def _queued_ns() -> int:
    """How long this thread has waited for a processor; 0 where the kernel does not say."""
    try:
        with real_open(_SCHEDSTAT, "rb", 0) as f:
            return int(f.read(64).split()[1])
    except (OSError, ValueError, IndexError):
        return 0


READ_NONE = f"{NO_FILES}, and read none"
"""What a watcher says where the kernel says so of its thread: C code opens files, too, and maps them."""

MAY_READ = frozenset({
    READS_AHEAD, WATCHING, WATCHING_NONE, WATCHING_NONE.replace(NO_FILES, READ_NONE), CACHED, CACHED_AGAIN,
})  # fmt: skip
"""What it says while nothing is in the way."""

REST_BATCHES_MAX = 1024
"""Where nothing is read ahead, batches go unwatched: first few, then up to this many in a row."""

CALM_SHARE = 0.05
"""Of the time that fetching takes. Whoever stands still for less, though hardly any file was read ahead, does
not wait for files. Which ones samples open is not learned then, nor are those that are known read ahead: that
costs 15 microseconds a sample and more, as much as 4 kB from the page cache."""

AHEAD_SHARE = 0.1
"""Of the samples of a window. With more files read ahead, that may be why nobody waits."""

CALM_WINDOW_S = 0.02
"""Fetching time that is judged together: how long it waited for a processor costs 20 microseconds to ask."""

AHEAD_VARIABLE: Final = "HEADRACE_AHEAD"
"""At 0 nothing is read ahead: each file is opened by whoever wants it, as torch does."""


def nothing_to_read(dataset: Any, *, map_style: bool) -> str | None:
    """Say why a data set's files cannot be read ahead, or None: they may."""
    if not map_style:
        return "an iterable data set does not say what it will read"
    if type(dataset) is torch_data.TensorDataset:
        return "the data set's samples are in memory"
    if os.environ.get(AHEAD_VARIABLE, "1") == "0":
        return f"{AHEAD_VARIABLE} is 0"
    return None


def without_storage(notes: Collection[str], *, first: bool) -> str:
    """What shows that samples waited for no storage, of what whoever makes them says; '': nothing does.

    Later than in the `first` epoch, files may lie in the page cache because they were read.
    """
    if notes and all(READ_NONE in each for each in notes):
        return "samples opened and read no files"
    if first and notes and all(each == CACHED for each in notes):
        return "the files looked at lay in the page cache"
    return ""


class Coming(NamedTuple):
    """To a worker: indices that it will be asked for later. Nothing depends on it but speed."""

    batches: list[list[Any]]


@dataclass(frozen=True, slots=True)
class FileReading:
    """How files are read ahead, and what all who do it learn."""

    options: ReadAheadOptions
    log: SharedLog | None


class Watcher:
    """Feeds a `ReadAhead` with what is known. Makes it in the process that fetches, when it fetches."""

    def __init__(self, dataset: Any, reading: FileReading) -> None:
        self._dataset = dataset
        self._reading = reading
        self._ahead: ReadAhead | None = None
        self._tuning: Plane | None = None
        self._begun = False
        self._pid = os.getpid()
        self._foretold = 0  # batches said to come that have not come
        self._rest = 0  # batches that are left unwatched
        self._rest_next = 4
        self._calm = False  # fetching waits for nothing; it takes two windows to say otherwise
        self._disturbed = True  # the last window waited
        self._window_s = self._stopped_s = 0.0
        self._window_samples = self._served = 0
        self._queued_ns = 0
        self._batches = 0  # that were fetched
        self._read_first: tuple[int, int, int] | None = None
        self._reads_none = False
        self._last_news: str | None = None
        self._last_steps: _Steps | None = None
        # Subset goes through the list one by one; what another __getitems__ does with it is its own
        # affair, and it gets what torch would give it.
        self._steps = not hasattr(dataset, "__getitems__") or type(dataset) is torch_data.Subset

    @property
    def wants_more(self) -> bool:
        """Whether it helps to know of batches long before they are asked for."""
        ahead = self._ahead
        if ahead is None or self._rest or self._pays_nothing(ahead):
            return False
        return not ahead.bypassed and ahead.why_off is None

    @property
    def waited_s(self) -> float:
        """How long opens have waited for reads that were under way."""
        return 0.0 if self._ahead is None else self._ahead.figures.wait_s

    def foretold(self, batches: Sequence[Any]) -> None:
        """Say which batches will come later, in their order."""
        self._foretold += len(batches)
        for batch in batches:
            self._say(batch)

    def arrived(self, batch: Any) -> None:
        """Say that a batch was asked for, which waits now."""
        if self._foretold:
            self._foretold -= 1  # tasks come in the order in which they were foretold
        else:
            self._say(batch)

    def epoch(self) -> None:
        """Say that an epoch begins."""
        self._foretold = 0

    def fetched(self, stopped_s: float, seconds: float) -> None:
        """Say that a batch was fetched: in how long, and for how much of that the thread did not run."""
        self._batches += 1
        self._window_s += seconds
        self._stopped_s += stopped_s
        if self._window_s < CALM_WINDOW_S:
            return
        before, self._queued_ns = self._queued_ns, _queued_ns()
        waited_s = (
            self._stopped_s - (self._queued_ns - before) * 1e-9 if before else self._stopped_s
        )
        ahead = self._ahead
        served = 0 if ahead is None else ahead.figures.served
        waits = waited_s > CALM_SHARE * self._window_s
        helped = served - self._served > AHEAD_SHARE * self._window_samples
        was_disturbed, self._disturbed = self._disturbed, waits or helped
        self._calm = not self._disturbed or (self._calm and not was_disturbed)
        self._window_s = self._stopped_s = 0.0
        self._window_samples, self._served = 0, served
        self._note_reads()
        if not self._calm and self._rest and ahead is not None and ahead.learns:
            self._rest, self._rest_next = 0, 4

    def watched(self, index: Any) -> Any:
        """Return what torch is to fetch: equal to `index`, and reports each sample if it can."""
        ahead = self._ahead
        if ahead is None or not self._steps or type(index) is not list:
            return index
        self._window_samples += len(index)
        if (ahead.bypassed and not ahead.planned) or self._rests(ahead):
            return index
        if ahead.reads:
            if self._tuning is None:
                self._tuning = tuned(ahead)
            self._tuning.wake()
        self.leave()
        self._last_steps = _Steps(index, ahead)
        return self._last_steps

    def leave(self) -> None:
        """Say that nothing is fetched now: an error may have left a batch half-way."""
        if self._last_steps is not None:
            self._last_steps.close()

    def news(self) -> str | None:
        """Return `READS_AHEAD`, or why nothing is read ahead, when that changed."""
        if self._ahead is None:
            news = "the data set's length is unknown" if self._begun else None
        else:
            news = self.state
        if news == self._last_news:
            return None
        self._last_news = news
        return news

    @property
    def state(self) -> str:
        """What is done about files at present."""
        if self._ahead is None:
            return ""
        state = self._ahead.state
        return state.replace(NO_FILES, READ_NONE) if self._reads_none else state

    def explain(self) -> str:
        """One line on what was read ahead."""
        return "nothing was read ahead yet" if self._ahead is None else self._ahead.explain()

    def close(self) -> None:
        """End reading ahead."""
        self.leave()
        if self._tuning is not None:
            self._tuning.close()
        if self._ahead is not None:
            self._ahead.close()

    def __del__(self, _ending: Any = sys.is_finalizing, _pid: Any = os.getpid) -> None:
        # With the loader: whoever serves opens would be kept, and `open` replaced, for ever. At the
        # interpreter's end modules are gone already, and their names with them.
        if not _ending() and _pid() == self._pid:
            self.close()

    def _say(self, batch: Any) -> None:
        if not self._begun:
            self._begun = True
            self._ahead = ReadAhead.for_dataset(
                self._dataset, self._reading.options, log=self._reading.log
            )
        ahead = self._ahead
        if ahead is not None and not self._rest and not self._pays_nothing(ahead):
            ahead.coming(batch if isinstance(batch, (list, tuple)) else [batch])

    def _pays_nothing(self, ahead: ReadAhead) -> bool:
        """Whether learning and reading ahead would hide nothing now."""
        return self._calm and ahead.learns

    def _note_reads(self) -> None:
        """Note whether this thread reads more than the messages that say which batches are wanted."""
        if (read := _read_so_far()) is None:
            return
        first = self._read_first = self._read_first or (*read, self._batches)
        batches = self._batches - first[2]
        small = (
            read[0] - first[0] <= MESSAGE_BYTES * batches and 8 * (read[1] - first[1]) <= batches
        )
        self._reads_none = batches > 0 and small

    def _rests(self, ahead: ReadAhead) -> bool:
        if self._rest:
            self._rest -= 1
            return True
        pays_nothing = self._pays_nothing(ahead)
        if pays_nothing:
            ahead.let_go()
        if ahead.why_off is not None or pays_nothing:
            self._rest = self._rest_next
            self._rest_next = min(2 * self._rest_next, REST_BATCHES_MAX)
        return False


class _Steps(list[Any]):
    """A batch's indices. Going through them tells the read-ahead which sample is fetched."""

    def __init__(self, indices: list[Any], ahead: ReadAhead) -> None:
        super().__init__(indices)
        self._ahead = ahead
        self._under_way: Generator[Any, None, None] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._under_way = self._watched()
        return self._under_way

    def close(self) -> None:
        """Watch no more: whoever fetched may have met an error, and keep it with all that was under way."""
        if self._under_way is not None:
            self._under_way.close()

    def _watched(self) -> Generator[Any, None, None]:
        sample = self._ahead.sample
        with self._ahead.samples():
            for index in super().__iter__():
                with sample(index):
                    yield index

    def __reduce__(self) -> Any:
        return list, (self[:],)
