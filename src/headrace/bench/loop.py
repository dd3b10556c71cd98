"""The step loops of all accelerators of a process, on one timer, and the threads that feed them.

Computing is an absolute deadline: a step that begins at s and computes t seconds ends at s + t, whenever
this is noticed, and the next step begins there. So lateness does not add up, and is measured. A step begins
when its batch is there and all accelerators have ended the one before, as the gradients' exchange makes it.

What the harness does wrong is never the storage's. A batch that was asked for late, because the loop was late,
may come so much later; and who does not run cannot read. Both are the harness's part of a wait. A process that
was stopped for longer than a scheduler's turn goes on where it is: the steps do not make up for it.

One thread for each accelerator waits for its batches, one at a time, and notes when each was there. Engines
that read ahead are asked for the next batch when the one before is taken; the others when the accelerator is
idle, as a training loop asks its loader. What is there already is taken by the loop's own thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import math
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.bench.metrics import Block
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Literal

    from numpy.typing import NDArray

    from headrace.bench.engines import BatchSource, Delivered

_SWITCH_S: Final = 0.0005
_SLACK_NS: Final = 1
_PR_SET_TIMERSLACK: Final = 29
_PR_GET_TIMERSLACK: Final = 30
_RESET_ON_FORK: Final = 0x40000000
_PRIORITY: Final = 1
"""The lowest that is real-time."""

_SLICE_S: Final = 0.05
"""A long wait is many of these: it sees Ctrl-C, and how long the process did not run."""

_OTHERS_CHECK_S: Final = 0.5
"""How often a block checks that the other processes live."""

_STALL_S: Final = 0.1
"""A step that is noticed later than this was not merely waiting for its turn: the process did not run."""

_OVERSLEPT_S: Final = 0.02
"""A wait that ends so long after it was to end was not the storage's."""

_COMPUTE_S_LEAST: Final = 0.005
"""Of a step on average: with less the loop hardly sleeps, and must not come before those that read."""


@contextlib.contextmanager
def punctual() -> Iterator[None]:
    """Quick thread switches and sharp timers for the calling thread; threads that it starts have its timers.

    The interpreter's lock changes hands after 0.5 ms instead of 5, since the thread must not wait so long for a
    feeder's; and timers ring when they are asked to, where Linux would let them be 50 us late.
    """
    interval, slack_ns = sys.getswitchinterval(), _prctl(_PR_GET_TIMERSLACK, 0)
    sys.setswitchinterval(_SWITCH_S)
    _prctl(_PR_SET_TIMERSLACK, _SLACK_NS)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if slack_ns > 0:
            _prctl(_PR_SET_TIMERSLACK, slack_ns)


@contextlib.contextmanager
def before_others() -> Iterator[None]:
    """Real-time priority for the calling thread, where it may have it (root, CAP_SYS_NICE or `ulimit -r`).

    The thread needs a percent of a processor. On a busy machine it would wait for its turn for milliseconds:
    6 ms were seen, and 0.09 ms with it (p99 of 150 timers, two processors, load average 8). Threads and
    processes that are started within do not inherit it, and lose their `nice` value with it: start them before.
    """
    try:
        policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO | _RESET_ON_FORK, os.sched_param(_PRIORITY))
    except (AttributeError, OSError):  # another system, or not allowed
        yield
        return
    try:
        yield
    finally:
        try:
            os.sched_setscheduler(0, policy, param)
        except PermissionError:  # who is not root may not take back what children would get
            os.sched_setscheduler(0, policy | _RESET_ON_FORK, param)


def _prctl(option: int, value: int) -> int:
    """-1 where the system has no such call: timers are as they are there."""
    call = getattr(ctypes.CDLL(None), "prctl", None)
    if call is None:
        return -1
    return int(call(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))


class Arrival(NamedTuple):
    """A batch that is there, or why there is none."""

    number: int
    asked_s: float
    batch: Delivered | None
    error: BaseException | None
    at_s: float


class Feeder:
    """Feeds one accelerator for one epoch."""

    def __init__(self, number: int, source: BatchSource, inbox: SimpleQueue[Arrival]) -> None:
        self._number, self._source = number, source
        self._poll: Callable[[], Delivered | None] | None = getattr(source, "poll", None)
        self._inbox = inbox
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._feed, name=f"headrace-bench-{number}", daemon=True
        )
        self._thread.start()

    def poll(self) -> Arrival | None:
        """The next batch if it is there, by the calling thread; None: `permit`, and it comes to the inbox.

        Errors as the source's. Only while nothing is permitted: the source is one thread's at a time.
        """
        asked_s = time.perf_counter()
        batch = None if self._poll is None else self._poll()
        return None if batch is None else self._arrival(asked_s, batch)

    def permit(self) -> None:
        """Let it wait for one more batch."""
        self._permits.put(True)

    def close(self, *, keep: bool = False) -> None:
        """End the thread, and the source unless another block goes on with it.

        A thread that is stuck in a read is left behind, with its source.
        """
        self._permits.put(False)
        self._thread.join(5.0)
        if not keep and not self._thread.is_alive():
            self._source.close()

    def _feed(self) -> None:
        while self._permits.get():
            asked_s = time.perf_counter()
            try:
                batch = self._source.next()
            except BaseException as e:  # noqa: BLE001 - raised in the loop's thread
                self._inbox.put(Arrival(self._number, asked_s, None, e, time.perf_counter()))
                return
            self._inbox.put(self._arrival(asked_s, batch))

    def _arrival(self, asked_s: float, batch: Delivered) -> Arrival:
        at_s = time.perf_counter() if batch.at_s is None else batch.at_s
        return Arrival(self._number, asked_s, batch, None, at_s)


class RealClock:
    """The machine's clock; feeders are threads."""

    now = staticmethod(time.perf_counter)

    def take(self, inbox: SimpleQueue[Arrival], wait_s: float) -> Arrival | None:
        """Wait for the next arrival.

        The queue is looked at first: CPython's takes a lock that is free, and if the time is over by then, it
        waits for ever. After a look in vain it holds the lock.
        """
        with contextlib.suppress(Empty):
            return inbox.get_nowait()
        with contextlib.suppress(Empty):
            return inbox.get(timeout=wait_s) if wait_s > 0 else None
        return None

    def feeder(self, number: int, source: BatchSource, inbox: SimpleQueue[Arrival]) -> Feeder:
        """A thread that waits for the source."""
        return Feeder(number, source, inbox)


class _Steps:
    """One accelerator's recorded steps."""

    def __init__(self, steps: int, start_s: float) -> None:
        self.load, self.compute, self.harness = np.zeros((3, steps))
        self.late, self.waits_s = np.zeros((2, steps))
        self.step = self.nbytes = 0
        self.gate_s = self.end_s = start_s
        """When the step may begin, as far as the accelerators are concerned; when the last one ended."""
        self.due_s, self.overslept_s = math.inf, 0.0
        """When the next batch was to be asked for; how long the process had not run by then."""


@dataclass(slots=True, kw_only=True)
class StepLoop:
    """Runs blocks of steps.

    Attributes:
        first: the first accelerator's number among all processes'.
        ahead: batches may be waited for while the one before is computed upon.
        meet: the barrier with other processes, if there are any: it takes when this process's step ended and
            when it would have without the harness's delays, and returns the latest of all.
        check: sees that the other processes live; raises if not.
        progress: called with the number of finished steps of all accelerators.
        deadline_s: how long nothing may happen at all.
        clock: the machine's, or a virtual one.
        nbytes: bytes that were delivered, of all blocks.
        batch_waits_s: how long each feeder waited for each batch, an array for each block.
    """

    first: int = 0
    ahead: bool = True
    meet: Callable[[float, float], tuple[float, float]] | None = None
    check: Callable[[], None] | None = None
    progress: Callable[[int], None] | None = None
    deadline_s: float = 330.0
    clock: RealClock = field(default_factory=RealClock)
    nbytes: int = field(default=0, init=False)
    batch_waits_s: list[NDArray[np.float64]] = field(default_factory=list, init=False)

    def run(
        self, sources: Sequence[Callable[[], BatchSource]], compute_s: NDArray[np.float64],
        epoch: int, kind: Literal["train", "eval"] = "train", number: int = 1, *, keep: bool = False,
    ) -> list[Block]:  # fmt: skip
        """Run one block on all accelerators; `compute_s` is (accelerators, steps).

        A source begins its accelerator's epoch when it is called, which counts as time of the first step. With
        `keep` the sources stay open for the epoch's next block.

        Returns:
            A block for each accelerator.

        Raises:
            BenchError: a batch cannot be read, or nothing happened for `deadline_s`.
        """
        sleeps = compute_s.size > 0 and float(compute_s.mean()) >= _COMPUTE_S_LEAST
        with punctual():
            running = _Running(self, sources, compute_s)
            try:
                with before_others() if sleeps else contextlib.nullcontext():
                    running.run()
            except BaseException:
                running.close()
                raise
            running.close(keep=keep)
        blocks = []
        for accelerator, steps in enumerate(running.steps):
            self.nbytes += steps.nbytes
            self.batch_waits_s.append(steps.waits_s)
            blocks.append(Block(
                epoch=epoch, accelerator=self.first + accelerator, kind=kind, number=number,
                start_s=running.start_s, end_s=steps.end_s, load_s=steps.load, compute_s=steps.compute,
                harness_s=steps.harness, late_s=steps.late,
            ))  # fmt: skip
        return blocks


class _Running:
    """One block while it runs."""

    def __init__(
        self, loop: StepLoop, sources: Sequence[Callable[[], BatchSource]],
        compute_s: NDArray[np.float64],
    ) -> None:  # fmt: skip
        self._loop, self._clock = loop, loop.clock
        self._compute_s, (self._count, self._total) = compute_s, compute_s.shape
        self._inbox: SimpleQueue[Arrival] = SimpleQueue()
        self._ends: list[tuple[float, int]] = []
        self._arrived: dict[int, Arrival] = {}
        self._finished, self._at_barrier = 0, 0
        self._barrier_s = self._undelayed_s = -math.inf
        self._overslept_s = 0.0
        """How long this process did not run when it was to, as far as it was noticed."""
        self.start_s = self._clock.now()
        if loop.meet is not None:
            self.start_s = loop.meet(self.start_s, self.start_s)[0]
        self.steps = [_Steps(self._total, self.start_s) for _ in sources]
        self._open = [True] * self._count
        """Which accelerators may begin their step once its batch is there."""
        self._feeders: list[Feeder] = []
        asks: list[Callable[[], bool]] = []
        try:
            for number, source in enumerate(sources):
                opened = source()
                self._feeders.append(self._clock.feeder(number, opened, self._inbox))
                if hasattr(opened, "ask"):
                    asks.append(opened.ask)
            while asks:  # in turns: a batch of each, then another
                asks = [ask for ask in asks if ask()]
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        if not self._total:
            return
        for number in range(self._count):
            self._want(number)
        last_event_s = checked_s = self._clock.now()
        while self._finished < self._count:
            now = self._clock.now()
            while self._ends and self._ends[0][0] <= now:
                end_s, number = heapq.heappop(self._ends)
                self._end(number, end_s, now)
                # The barrier may have taken long: that was the others' waiting, and no oversleeping.
                last_event_s = now = self._clock.now()
            if self._finished == self._count:
                break
            if self._loop.check is not None and now - checked_s > _OTHERS_CHECK_S:
                self._loop.check()
                checked_s = now
            wait_s = min(_SLICE_S, self._ends[0][0] - now) if self._ends else _SLICE_S
            arrival = self._clock.take(self._inbox, max(0.0, wait_s))
            self._oversleep(self._clock.now() - now - max(0.0, wait_s))
            if arrival is not None:
                last_event_s = arrival.at_s
                self._arrive(arrival)
            elif not self._ends and now - last_event_s > self._loop.deadline_s:
                raise BenchError(f"no batch came for {self._loop.deadline_s:g} s.")

    def close(self, *, keep: bool = False) -> None:
        for feeder in self._feeders:
            feeder.close(keep=keep)

    def _oversleep(self, seconds: float) -> None:
        if seconds > _OVERSLEPT_S:
            self._overslept_s += seconds

    def _arrive(self, arrival: Arrival) -> None:
        if arrival.error is not None:
            raise arrival.error
        self._arrived[arrival.number] = arrival
        self._try_begin(arrival.number)

    def _want(self, number: int) -> None:
        """The accelerator's next batch, now or when it is there."""
        arrival = self._feeders[number].poll() if self._loop.ahead else None
        if arrival is None:
            self._feeders[number].permit()
        else:
            self._arrive(arrival)

    def _try_begin(self, number: int) -> None:
        arrival = self._arrived.get(number)
        if arrival is None or not self._open[number]:
            return
        del self._arrived[number]
        self._open[number] = False
        steps = self.steps[number]
        at = steps.step
        begin_s = max(steps.gate_s, arrival.at_s)
        asked_late_s = max(0.0, arrival.asked_s - steps.due_s)
        harness_s = asked_late_s + self._overslept_s - steps.overslept_s
        steps.harness[at] = min(harness_s, begin_s - steps.gate_s)
        steps.load[at] = begin_s - steps.gate_s - steps.harness[at]
        steps.waits_s[at] = max(0.0, arrival.at_s - arrival.asked_s)
        assert arrival.batch is not None
        steps.nbytes += arrival.batch.nbytes
        compute_s = float(self._compute_s[number, at])
        steps.compute[at] = compute_s
        heapq.heappush(self._ends, (begin_s + compute_s, number))
        if self._loop.ahead and at + 1 < self._total:
            steps.due_s, steps.overslept_s = begin_s, self._overslept_s
            self._want(number)

    def _end(self, number: int, end_s: float, now: float) -> None:
        steps = self.steps[number]
        steps.late[steps.step] = late_s = now - end_s
        if late_s > _STALL_S:
            steps.harness[steps.step] += late_s
            end_s = now
        steps.step += 1
        steps.end_s = end_s
        self._barrier_s = max(self._barrier_s, end_s)
        undelayed_s = end_s - float(steps.harness[steps.step - 1])
        self._undelayed_s = max(self._undelayed_s, undelayed_s)
        self._at_barrier += 1
        self._finished += steps.step == self._total
        if self._at_barrier == self._count:
            self._pass_barrier()

    def _pass_barrier(self) -> None:
        gate_s, undelayed_s = self._barrier_s, self._undelayed_s
        self._at_barrier = 0
        if self._loop.meet is not None:
            gate_s, undelayed_s = self._loop.meet(gate_s, undelayed_s)
            self._oversleep(self._clock.now() - gate_s)
        done = self.steps[0].step
        if self._loop.progress is not None:
            self._loop.progress(done * self._count)
        for number, steps in enumerate(self.steps):
            # Who waits for one that the harness held up is held up by it, too.
            held_s = min(gate_s - steps.end_s, gate_s - undelayed_s)
            steps.harness[done - 1] += max(0.0, held_s)
            steps.end_s = gate_s
            if done < self._total:
                self._next(number, gate_s)

    def _next(self, number: int, gate_s: float) -> None:
        steps = self.steps[number]
        steps.gate_s = gate_s
        self._open[number] = True
        if not self._loop.ahead:
            steps.due_s, steps.overslept_s = gate_s, self._overslept_s
            self._feeders[number].permit()
        self._try_begin(number)
