"""Context: torch's multiprocessing context with our ends on its queues.

Torch's iterator asks its context for one queue of results, an event, and for each worker a queue of
tasks and a process. `WorkerContext` passes all of it on to the user's context, and only lets the
processes run `worker.serve` around torch's loop, and the results be unpacked where they are taken.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from headrace.frameworks.torch.dropin.messages import Answer, Begun, Mark, Sender, WorkerPlan
from headrace.frameworks.torch.dropin.shared_batches import Arena, Packed, unpack
from headrace.frameworks.torch.dropin.watching import READS_AHEAD, Made
from headrace.frameworks.torch.dropin.worker import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.frameworks.torch.dropin.messages import Reading
    from headrace.plane.batch_trace import BatchTrace

ARENA_BYTES_MIN = 1 << 20
"""A smaller share is of no use."""

_NO_BATCH = (type(None), ExceptionWrapper, torch_worker._IterableDatasetStopIteration)  # noqa: SLF001

log = logging.getLogger("headrace.torch")


class WorkerContext:
    """Stands in for a multiprocessing context while torch's iterator is made.

    Args:
        given: the user's context; None: torch.multiprocessing, as torch has it.
        arena_bytes: room for each worker's batches; 0: none.
        reading: how files are read ahead, None for not at all.
        every: tasks of a worker after which its data set is asked where it stands, if it can say so.
        announced: workers say when they have begun.
    """

    def __init__(
        self,
        given: Any,
        arena_bytes: int,
        reading: Reading | None,
        *,
        every: int = 1,
        announced: bool = False,
    ) -> None:
        self._given = torch.multiprocessing if given is None else given
        self._arena_bytes = arena_bytes
        self._reading = reading
        self._every = every
        self.announced = announced
        self.beginnings: list[tuple[Mark | None, list[Any]]] | None = None
        self.results: ResultQueue | None = None
        self.arenas: list[Arena | None] = []

    def Queue(self) -> Any:  # noqa: N802 - a context's own name
        """Return the queue of results the first time, then queues of tasks."""
        queue = self._given.Queue()
        if self.results is None:
            self.results = ResultQueue(queue, self.arenas)
            return self.results
        return TaskOutlet(queue)

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...]) -> Any:  # noqa: N802
        """Return a process that runs torch's loop between our queues."""
        assert self.results is not None
        worker = len(self.arenas)
        self.arenas.append(self._new_arena())
        mark, replay = (None, []) if self.beginnings is None else self.beginnings[worker]
        plan = WorkerPlan(
            worker, self.arenas[-1], self._reading, mark, self._every, self.announced, replay
        )
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

    @property
    def wants_more(self) -> bool:
        """Whether a worker's read-ahead would like to know more of what comes."""
        return self.results is not None and READS_AHEAD in self.results.notes.values()

    def said(self) -> list[tuple[int, str]]:
        """Return what each worker says of its reading ahead."""
        return [] if self.results is None else sorted(self.results.notes.items())

    def explain(self) -> str:
        """One line on how batches came."""
        if self.results is None:
            return "none came yet"
        text = f"{self.results.packed} came through headrace's shared memory"
        if self.results.plain:
            text += (
                f", {self.results.plain} torch's own way: they were too large for the budget, or "
                "too many are kept"
            )
        return text

    def mark_of(self, idx: int) -> Mark | None:
        """Return the mark that came with a task's batch, if one did."""
        assert self.results is not None
        return self.results.marks.pop(idx, (0, None))[1]

    def made(self, idx: int) -> BatchTrace | None:
        """How a task's batch was made, if its worker said so."""
        assert self.results is not None
        made = self.results.made.pop(idx, None)
        return None if made is None else Made(*made).trace()

    def begun(self) -> list[tuple[int, Mark]]:
        """Return where the workers stood when they had begun, by worker."""
        assert self.results is not None
        return self.results.begun

    def resumed(self) -> list[tuple[int, Mark]]:
        """Return where the workers stood when this epoch began, by worker."""
        assert self.results is not None
        marks, self.results.resumed = self.results.resumed, []
        self.results.made.clear()  # torch counts anew
        return marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def _new_arena(self) -> Arena | None:
        if self._arena_bytes < ARENA_BYTES_MIN:
            return None
        try:
            return Arena(self._arena_bytes)
        except OSError as e:
            log.info("batches travel torch's own way: no shared memory (%s)", e)
            return None


class TaskOutlet:
    """A queue of tasks, as torch's iterator fills it.

    Args:
        inner: the queue that the worker takes from.
    """

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

    Args:
        inner: the queue itself.
        arenas: of the workers, by number.
    """

    def __init__(self, inner: Any, arenas: list[Arena | None]) -> None:
        self.inner = inner
        self._arenas = arenas
        self.marks: dict[Any, tuple[int, Mark]] = {}
        self.made: dict[int, tuple[float, ...]] = {}
        self.resumed: list[tuple[int, Mark]] = []
        self.begun: list[tuple[int, Mark]] = []
        self.notes: dict[int, str] = {}
        self.packed = 0
        self.plain = 0

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's (number, batch) of the next result.

        Raises:
            queue.Empty: none came in time.
        """
        message = self.inner.get(*args, **kwargs)
        answer = Answer.of(message)
        if answer is None:
            return message  # torch wakes its pinning thread by one
        if answer.made is not None and isinstance(answer.idx, int):
            self.made[answer.idx] = answer.made
        if answer.note is not None:
            self.notes[answer.worker] = answer.note
        if answer.mark is not None:
            self._take_mark(answer.worker, answer.idx, answer.mark)
        data = answer.data
        if type(data) is Packed:
            self.packed += 1
            data = unpack(data, self._arenas[answer.worker])
        elif not isinstance(data, _NO_BATCH):
            self.plain += 1
        return answer.idx, data

    def _take_mark(self, worker: int, idx: Any, mark: Mark) -> None:
        if isinstance(idx, int):
            self.marks[idx] = (worker, mark)
            return
        if isinstance(idx, Begun):
            self.begun.append((worker, mark))
            return
        # The worker begins an epoch. What it sent of the last one was left, and torch counts anew.
        for old in [old for old, (other, _) in self.marks.items() if other == worker]:
            del self.marks[old]
        self.resumed.append((worker, mark))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
