"""Workers: both ends of torch's queues, and what runs in a worker process around torch's own loop.

In the consumer's process, torch's iterator asks its multiprocessing context for one queue of results, an
event, and for each worker a queue of tasks and a process. `WorkerContext` passes all of it on to the user's
context, lets the processes run `serve` around torch's loop, and unpacks results where they are taken
(`ResultQueue`).

In a worker, torch's loop takes tasks from one queue and puts answers into another; `TaskQueue` and
`AnswerQueue` stand in for the two. The first looks ahead: it tells the read-ahead which indices wait, hands
torch index lists that say which sample is being fetched, and begins with tasks to be replayed. The second
packs batches into the arena and adds, now and then, where the generators stand.

The data set, `worker_info` and `collate_fn` are the user's own objects, untouched.
"""

from __future__ import annotations

import functools
import inspect
import logging
import queue
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from headrace.errors import StateMismatch
from headrace.frameworks.torch.dropin.iterators import keep_freed_memory
from headrace.frameworks.torch.dropin.position import GIVE_THE_SAME, DataPosition, content_of
from headrace.frameworks.torch.dropin.progress import Snapshot, WorkerMark
from headrace.frameworks.torch.dropin.sending import Sender
from headrace.frameworks.torch.dropin.shared_batches import (
    Arena,
    ArenaCollate,
    Packed,
    Regions,
    pack,
    unpack,
)
from headrace.frameworks.torch.dropin.watching import MAY_READ, Coming, Making, Timing, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.frameworks.torch.dropin.pictures import NativePictures
    from headrace.frameworks.torch.dropin.watching import FileReading
    from headrace.plane.batch_trace import BatchTrace

ARENA_BYTES_MIN = 1 << 20
"""A smaller share is of no use."""

MARK_INTERVAL_S = 0.02
"""A mark costs 20 to 30 microseconds. Every 20 ms that is 0.1 %, and what has to be done again after
a resume is at most what a worker does in that time."""

_End = torch_worker._IterableDatasetStopIteration  # noqa: SLF001
_NO_BATCH = (type(None), ExceptionWrapper, _End)

log = logging.getLogger("headrace.torch")


class Begun(NamedTuple):
    """In the place of a task's number: the worker has begun, or failed to."""

    worker: int


_ANSWER_FIELDS: Final = 7
"""An answer is a bare tuple, as pickling a class by its name costs more than the rest: the worker's number;
torch's number of the task; the batch as it is, or None; the batch as the fields of `Packed`, or None; a mark;
what the worker does to be fast, if that changed; the fields of `Timing`. Torch's own messages are shorter."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker is told when it starts."""

    worker: int
    arena: Arena | None
    """Where its batches go; None: as torch sends them."""

    reading: FileReading | None
    """How files are read ahead, None for not at all."""

    mark: WorkerMark | None
    """Where to go on from, instead of from torch's seeds."""

    every: int
    """A data set that has a state of its own is asked for it after so many tasks; 0: at ends only."""

    announced: bool
    """The consumer waits until the worker has begun."""

    replay: list[Any]
    """Tasks done after the mark whose batches were delivered: done again, for the generators' and
    iterators' sake, and not sent."""

    content: int | None
    """What the batches of `replay` hold together; None: nobody knows."""

    pictures: NativePictures | None
    """Fetched from in the data set's place."""


class WorkerContext:
    """Stands in for a multiprocessing context while torch's iterator is made.

    Args:
        given: the user's context; None: torch.multiprocessing, as torch has it.
        arena_bytes: room for each worker's batches; 0: none.
        reading: how files are read ahead, None for not at all.
        every: tasks of a worker after which its data set is asked where it stands, if it can say so.
        announced: workers say when they have begun.
        pictures: what workers fetch from in the data set's place; None: from the data set.
    """

    def __init__(
        self,
        given: Any,
        arena_bytes: int,
        reading: FileReading | None,
        *,
        every: int = 1,
        announced: bool = False,
        pictures: NativePictures | None = None,
    ) -> None:
        self._pictures = pictures
        self._given = torch.multiprocessing if given is None else given
        self._arena_bytes = arena_bytes
        self._reading = reading
        self._every = every
        self.announced = announced
        self.beginnings: list[tuple[WorkerMark | None, list[Any], int | None]] | None = None
        self.arenas: list[Arena | None] = []
        self.results = ResultQueue(self._given.Queue(), self.arenas)
        self._asked = False

    def Queue(self) -> Any:  # noqa: N802 - a context's own name
        """Return the queue of results the first time, then queues of tasks."""
        if self._asked:
            return TaskOutlet(self._given.Queue())
        self._asked = True
        return self.results

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...]) -> Any:  # noqa: N802
        """Return a process that runs torch's loop between our queues."""
        worker = len(self.arenas)
        self.arenas.append(self._new_arena())
        mark, replay, content = (
            (None, [], None) if self.beginnings is None else self.beginnings[worker]
        )
        plan = WorkerPlan(
            worker, self.arenas[-1], self._reading, mark, self._every, self.announced, replay, content,
            self._pictures,
        )  # fmt: skip
        arguments = inspect.signature(target).bind(*args).arguments
        arguments["data_queue"] = self.results.inner
        arguments["index_queue"] = arguments["index_queue"].inner
        return self._given.Process(target=serve, args=(plan, target, arguments))

    def started(self) -> None:
        """All processes run: they have what they need."""
        for arena in self.arenas:
            if arena is not None:
                arena.keep_mapping_only()

    def retire(self) -> None:
        """All processes have ended: give their memory back when nothing lies in it any more."""
        for arena in self.arenas:
            if arena is not None:
                arena.retire()

    def explain(self) -> str:
        """One line on how batches came."""
        packed, batches = self.results.packed, self.results.packed + self.results.plain
        # Without persistent_workers each epoch has workers of its own.
        text = f"of {batches} since these workers began, {packed} came through headrace's shared memory"
        if self.results.plain:
            text += (
                f", {self.results.plain} torch's own way: they were too large for the budget, or "
                "too many are kept"
            )
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def _new_arena(self) -> Arena | None:
        # Threads in a process's place (MONAI's) would collate all of this process's batches there.
        if self._arena_bytes < ARENA_BYTES_MIN or not issubclass(self._given.Process, BaseProcess):
            return None
        try:
            return Arena(self._arena_bytes)
        except OSError as e:
            log.info("batches travel torch's own way: no shared memory (%s)", e)
            return None


class TaskOutlet:
    """A queue of tasks, as torch's iterator fills it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._sender = Sender(inner)
        self.put = self._sender.put

    def close(self) -> None:
        """Nothing more will be put."""
        self._sender.close()
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ResultQueue:
    """The queue of results, as the consumer (or torch's pinning thread) sees it.

    Attributes:
        begun: where the workers stood when they had begun, by worker.
        notes: what each worker says of its reading ahead.
        packed: batches that came through shared memory.
        plain: batches that torch sent.
    """

    def __init__(self, inner: Any, arenas: list[Arena | None]) -> None:
        self.inner = inner
        self._arenas = arenas
        self._marks: dict[Any, tuple[int, WorkerMark]] = {}
        self._timings: dict[int, tuple[float, ...]] = {}
        self._resumed: list[tuple[int, WorkerMark]] = []
        self.begun: list[tuple[int, WorkerMark]] = []
        self.notes: dict[int, str] = {}
        self.packed = 0
        self.plain = 0

    @property
    def wants_more(self) -> bool:
        """Whether a worker's read-ahead would like to know more of what comes."""
        return not MAY_READ.isdisjoint(self.notes.values())

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's (number, batch) of the next result.

        Raises:
            queue.Empty: none came in time.
        """
        message = self.inner.get(*args, **kwargs)
        if len(message) != _ANSWER_FIELDS:
            return message  # torch wakes its pinning thread by one
        worker, idx, data, packed, mark, note, timing = message
        if timing is not None and isinstance(idx, int):
            self._timings[idx] = timing
        if note is not None:
            self.notes[worker] = note
        if mark is not None:
            self._take_mark(worker, idx, mark)
        if packed is not None:
            self.packed += 1
            data = unpack(Packed(*packed), self._arenas[worker])
        elif not isinstance(data, _NO_BATCH):
            self.plain += 1
        return idx, data

    def _take_mark(self, worker: int, idx: Any, mark: WorkerMark) -> None:
        if isinstance(idx, int):
            self._marks[idx] = (worker, mark)
            return
        if isinstance(idx, Begun):
            self.begun.append((worker, mark))
            return
        # The worker begins an epoch. What it sent of the last one was left, and torch counts anew.
        for old in [old for old, (other, _) in self._marks.items() if other == worker]:
            del self._marks[old]
        self._resumed.append((worker, mark))

    def mark_of(self, idx: int) -> WorkerMark | None:
        """Return the mark that came with a task's batch, if one did."""
        return self._marks.pop(idx, (0, None))[1]

    def trace_of(self, idx: int) -> BatchTrace | None:
        """How a task's batch came to be, if its worker said so."""
        timing = self._timings.pop(idx, None)
        return None if timing is None else Timing(*timing).trace()

    def resumed(self) -> list[tuple[int, WorkerMark]]:
        """Return where the workers stood when this epoch began, by worker."""
        marks, self._resumed = self._resumed, []
        self._timings.clear()  # torch counts anew
        return marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Replayed:
    """The number of a task that is done again."""


_REPLAYED = _Replayed()


def serve(plan: WorkerPlan, loop: Callable[..., None], arguments: dict[str, Any]) -> None:
    """Run torch's worker loop with our queues. Must be importable: spawned workers find it by name."""
    keep_freed_memory()
    regions = None
    if plan.arena is not None:
        plan.arena.keep_mapping_only()
        regions = Regions(plan.arena)
        ArenaCollate(regions).install()
    holder = arguments.get("dataset_holder")  # from torch 2.14 on: a list, which the worker empties
    dataset = arguments["dataset"] if holder is None else holder[-1]
    watcher = None if plan.reading is None else Watcher(dataset, plan.reading)
    position = DataPosition(dataset)
    iterable = arguments["dataset_kind"] != 0
    if iterable:
        position.follow(plan.mark)
    making = Making(arguments["collate_fn"], watcher, plan.pictures)
    answers = AnswerQueue(arguments["data_queue"], plan, regions, position, watcher, making)
    tasks = TaskQueue(arguments["index_queue"], answers, plan.replay, watcher)
    init_fn = arguments["init_fn"]
    if plan.mark is not None or plan.announced:
        init_fn = functools.partial(
            _begin, init_fn, plan.mark, None if iterable else position, answers
        )
    if plan.pictures is not None:
        init_fn = functools.partial(_show_dataset, init_fn, dataset)
        if holder is None:
            arguments["dataset"] = plan.pictures
        else:
            holder[:] = [plan.pictures]
    try:
        loop(
            **{
                **arguments,
                "collate_fn": making,
                "data_queue": answers,
                "index_queue": tasks,
                "init_fn": init_fn,
            }
        )
        if not arguments["done_event"].is_set():
            answers.flush()
    finally:
        if watcher is not None:
            watcher.close()


def _show_dataset(init_fn: Callable[[int], None] | None, dataset: Any, worker_id: int) -> None:
    """Let `get_worker_info()` have the user's data set, whoever is fetched from."""
    info = torch_worker._worker_info  # noqa: SLF001
    object.__setattr__(info, "dataset", dataset)  # it is frozen
    if init_fn is not None:
        init_fn(worker_id)


def _begin(
    init_fn: Callable[[int], None] | None,
    mark: WorkerMark | None,
    position: DataPosition | None,
    answers: AnswerQueue,
    worker_id: int,
) -> None:
    """Go on from a mark, after the user's own beginning. An iterable follows with its iterator."""
    try:
        if init_fn is not None:
            init_fn(worker_id)
        if mark is not None:
            if position is not None and mark.data is not None:
                position.load_before(mark.data, under_way=mark.under_way)
            if mark.snapshot is not None:
                mark.snapshot.restore()
    except Exception:
        answers.announce(failed=True)
        raise


class TaskQueue:
    """The queue that torch's loop takes tasks from."""

    def __init__(
        self, inner: Any, answers: AnswerQueue, replay: list[Any], watcher: Watcher | None
    ) -> None:
        self._inner = inner
        self._answers = answers
        self._waiting: deque[Any] = deque((_REPLAYED, index) for index in replay)
        self._watcher = watcher

    def get(self, timeout: float | None = None) -> Any:
        """Return the next task.

        Raises:
            queue.Empty: none came in time.
        """
        self._answers.announce()  # torch's loop asks for tasks when all is made that fetches them
        if not self._waiting:
            self._receive(self._inner.get(timeout=timeout))
        if self._watcher is not None and self._watcher.wants_more:
            self._drain()
        while not self._waiting:  # only news came
            self._receive(self._inner.get(timeout=timeout))
        task = self._waiting.popleft()
        if type(task) is not tuple:
            return task
        idx, index = task
        if self._answers.ended is not None and idx is not _REPLAYED:
            self._answers.put((idx, self._answers.take_end()))
        self._answers.making.begin()
        if self._watcher is None:
            return task
        return idx, self._watcher.watched(index)

    def _drain(self) -> None:
        while True:
            try:
                task = self._inner.get(block=False)
            except queue.Empty:
                return
            self._receive(task)

    def _receive(self, task: Any) -> None:
        watcher = self._watcher
        if type(task) is Coming:
            if watcher is not None:
                watcher.foretold(task.batches)
            return
        self._waiting.append(task)
        if watcher is None:
            return
        if type(task) is tuple:
            watcher.arrived(task[1])
        elif task is not None:
            watcher.epoch()


class AnswerQueue:
    """The queue that torch's loop puts batches into."""

    def __init__(  # noqa: PLR0917
        self,
        inner: Any,
        plan: WorkerPlan,
        regions: Regions | None,
        position: DataPosition,
        watcher: Watcher | None,
        making: Making,
    ) -> None:
        self._inner = inner
        self.making = making
        self._sender = Sender(inner)
        self._worker = plan.worker
        self._regions = regions
        self._position = position
        self._every = plan.every
        self._unmarked = 0  # tasks since the last mark
        self._announcing = plan.announced
        self._watcher = watcher
        self._marked_at = time.monotonic()
        self._last: Snapshot | None = None
        self.ended: Any = None
        self._content = plan.content  # less what was done again
        self._replayed = len(plan.replay)  # less what was done again
        self._refusal: ExceptionWrapper | None = None

    def put(self, answer: tuple[Any, Any]) -> None:
        """Send what torch's loop did."""
        idx, data = answer
        self._unmarked += 1
        if idx is _REPLAYED:
            self._take_replayed(data)
            return
        if self._refusal is not None and not isinstance(data, _NO_BATCH):
            data = self._refusal
        # Where an epoch begins or an iterable ends, the next epoch goes on.
        border = isinstance(idx, torch_worker._ResumeIteration) or isinstance(data, _End)  # noqa: SLF001
        mark = None
        try:
            mark = self._mark(anyway=border)
        except Exception:  # noqa: BLE001 - the user's state_dict() raised: torch's loop would end without a word
            data = self._failure()
        note = None if self._watcher is None else self._watcher.news()
        measured = self.making.timing()
        timing = None if measured is None else tuple(measured)
        packed: tuple[Any, ...] | None = None
        if not isinstance(data, _NO_BATCH):
            try:
                packed = pack(data, self._regions)
            except Exception:  # noqa: BLE001 - torch's queue would print it and let the consumer wait for ever
                data = self._failure()
        if packed is not None:
            data, packed = None, tuple(packed)
        try:
            self._sender.put((self._worker, idx, data, packed, mark, note, timing))
        except Exception:  # a state that cannot be pickled
            if mark is None or mark.data is None:
                raise
            self._sender.put((self._worker, idx, self._failure(), None, None, note, timing))

    def _take_replayed(self, data: Any) -> None:
        """A batch that was delivered before was made again."""
        if isinstance(data, _End):
            self.ended = data  # said again when the consumer asks, which counts its questions
        elif self._content and not isinstance(data, ExceptionWrapper):
            self._content -= content_of(data)
        self._replayed -= 1
        if not self._content or (self._replayed and self.ended is None):
            return
        error = StateMismatch(
            "the data set's first samples are not those that were delivered before the state was saved: "
            "going on would repeat samples and miss others.",
            next_step=GIVE_THE_SAME,
        )
        self._refusal = self._failure((StateMismatch, error, None))

    def announce(self, *, failed: bool = False) -> None:
        """Say once that the worker has begun, and where it stands, or why it cannot."""
        if not self._announcing:
            return
        self._announcing = False
        mark, failure = None, self._failure() if failed else None
        if failure is None:
            try:
                mark = WorkerMark(None, self._position.take())
            except Exception:  # noqa: BLE001 - the user's state_dict()
                failure = self._failure()
        first = self._worker, Begun(self._worker)
        try:
            self._sender.put((*first, failure, None, mark, None, None))
        except Exception:  # noqa: BLE001 - a state that cannot be pickled
            self._sender.put((*first, self._failure(), None, None, None, None))

    def _failure(self, error: Any = None) -> ExceptionWrapper:
        """An exception, else the one being handled, to be raised where the batch is asked for."""
        where = f"in DataLoader worker process {self._worker}"
        return ExceptionWrapper(error, where)  # type: ignore[no-untyped-call]

    def take_end(self) -> Any:
        """Return the end of the data set that a replay met; before it, once, that it should not be there."""
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            return refusal
        ended, self.ended = self.ended, None
        return ended

    def cancel_join_thread(self) -> None:
        """Nobody waits for what was not sent; torch's loop says so when the loader was dropped."""
        self._sender.close()
        self._inner.cancel_join_thread()

    def flush(self) -> None:
        """Wait until all is sent."""
        self._sender.flush()

    def close(self) -> None:
        """As the queue does it; torch's loop asks for it at its end."""
        self._inner.close()

    def _mark(self, *, anyway: bool) -> WorkerMark | None:
        now = time.monotonic()
        stateful = self._position.stateful
        due = self._every and self._unmarked >= self._every
        if not anyway and not (due if stateful else now - self._marked_at >= MARK_INTERVAL_S):
            return None
        self._marked_at = now
        self._unmarked = 0
        snapshot, data = Snapshot.take(), self._position.take()
        if snapshot == self._last and not anyway:
            return WorkerMark(None, data)
        self._last = snapshot
        return WorkerMark(snapshot, data)
