"""What runs in a worker process, around torch's own worker loop.

Torch's loop takes tasks from one queue and puts answers into another; `TaskQueue` and `AnswerQueue`
stand in for the two. The first looks ahead: it tells the read-ahead which indices wait, hands torch
index lists that say which sample is being fetched, and begins with tasks to be replayed. The second
packs batches into the arena and adds, now and then, where the generators stand.

The data set, `worker_info` and `collate_fn` are the user's own objects, untouched.
"""

from __future__ import annotations

import functools
import queue
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from headrace.frameworks.torch.dropin.iterators import keep_freed_memory
from headrace.frameworks.torch.dropin.messages import Answer, Begun, Coming, Mark, Sender
from headrace.frameworks.torch.dropin.position import DataPosition
from headrace.frameworks.torch.dropin.progress import Snapshot
from headrace.frameworks.torch.dropin.shared_batches import ArenaCollate, Regions, pack
from headrace.frameworks.torch.dropin.watching import Making, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.frameworks.torch.dropin.messages import WorkerPlan

MARK_INTERVAL_S = 0.02
"""A mark costs 20 to 30 microseconds. Every 20 ms that is 0.1 %, and what has to be done again after
a resume is at most what a worker does in that time."""


class _Replayed:
    """The number of a task that is done again."""


_REPLAYED = _Replayed()


def serve(plan: WorkerPlan, loop: Callable[..., None], arguments: dict[str, Any]) -> None:
    """Run torch's worker loop with our queues. Must be importable: spawned workers find it by name.

    Args:
        plan: what this worker does beyond torch's loop.
        loop: torch's loop.
        arguments: torch's, by name.
    """
    keep_freed_memory()
    regions = None
    if plan.arena is not None:
        plan.arena.keep_mapping_only()
        regions = Regions(plan.arena)
        ArenaCollate(regions).install()
    dataset = arguments["dataset"]
    watcher = None if plan.reading is None else Watcher(dataset, plan.reading)
    position = DataPosition(dataset)
    iterable = arguments["dataset_kind"] != 0
    if iterable:
        position.follow(plan.mark)
    making = Making(arguments["collate_fn"], watcher)
    answers = AnswerQueue(arguments["data_queue"], plan, regions, position, watcher, making)
    tasks = TaskQueue(arguments["index_queue"], answers, plan.replay, watcher)
    init_fn = arguments["init_fn"]
    if plan.mark is not None or plan.announced:
        init_fn = functools.partial(
            _begin, init_fn, plan.mark, None if iterable else position, answers
        )
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


def _begin(
    init_fn: Callable[[int], None] | None,
    mark: Mark | None,
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
    """The queue that torch's loop takes tasks from.

    Args:
        inner: the queue that the main process fills.
        answers: where torch's loop puts what it did.
        replay: indices to begin with.
        watcher: is told what comes; None if nothing is read ahead.
    """

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
    """The queue that torch's loop puts batches into.

    Args:
        inner: the queue that the main process takes from.
        plan: what this worker does beyond torch's loop.
        regions: of its arena, None if it has none.
        position: where the data set stands, if it can say so.
        watcher: says what there is to say about reading ahead.
        making: knows how each batch is made.
    """

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

    def put(self, answer: tuple[Any, Any]) -> None:
        """Send what torch's loop did."""
        idx, data = answer
        self._unmarked += 1
        if idx is _REPLAYED:
            if isinstance(data, torch_worker._IterableDatasetStopIteration):  # noqa: SLF001
                self.ended = data  # said again when the consumer asks, which counts its questions
            return
        # Where an epoch begins or an iterable ends, the next epoch goes on.
        border = isinstance(idx, torch_worker._ResumeIteration) or isinstance(  # noqa: SLF001
            data,
            torch_worker._IterableDatasetStopIteration,  # noqa: SLF001
        )
        mark = None
        try:
            mark = self._mark(anyway=border)
        except Exception:  # noqa: BLE001 - the user's state_dict() raised: torch's loop would end without a word
            data = self._failure()
        note = None if self._watcher is None else self._watcher.news()
        made = self.making.made()
        packed = self._packed(data)
        told = None if made is None else tuple(made)
        answered = Answer(self._worker, idx, packed, mark, note, told)
        try:
            self._sender.put(answered.message())
        except Exception:  # a state that cannot be pickled
            if mark is None or mark.data is None:
                raise
            answered = answered._replace(data=self._failure(), mark=None)
            self._sender.put(answered.message())

    def announce(self, *, failed: bool = False) -> None:
        """Say once that the worker has begun, and where it stands, or why it cannot."""
        if not self._announcing:
            return
        self._announcing = False
        mark, failure = None, self._failure() if failed else None
        if failure is None:
            try:
                mark = Mark(None, self._position.take())
            except Exception:  # noqa: BLE001 - the user's state_dict()
                failure = self._failure()
        begun = Begun(self._worker)
        try:
            self._sender.put(Answer(self._worker, begun, failure, mark, None).message())
        except Exception:  # noqa: BLE001 - a state that cannot be pickled
            self._sender.put(Answer(self._worker, begun, self._failure(), None, None).message())

    def _failure(self) -> ExceptionWrapper:
        """The exception being handled, to be raised where the batch is asked for."""
        where = f"in DataLoader worker process {self._worker}"
        return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]

    def take_end(self) -> Any:
        """Return the end of the data set that a replay met."""
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

    def _packed(self, data: Any) -> Any:
        if data is None or isinstance(
            data,
            (ExceptionWrapper, torch_worker._IterableDatasetStopIteration),  # noqa: SLF001
        ):
            return data
        try:
            packed = pack(data, self._regions)
        except Exception:  # noqa: BLE001 - torch's queue would print it and let the consumer wait for ever
            return self._failure()
        return data if packed is None else packed

    def _mark(self, *, anyway: bool) -> Mark | None:
        now = time.monotonic()
        stateful = self._position.stateful
        due = self._every and self._unmarked >= self._every
        if not anyway and not (due if stateful else now - self._marked_at >= MARK_INTERVAL_S):
            return None
        self._marked_at = now
        self._unmarked = 0
        snapshot, data = Snapshot.take(), self._position.take()
        if snapshot == self._last and not anyway:
            return Mark(None, data)
        self._last = snapshot
        return Mark(snapshot, data)
