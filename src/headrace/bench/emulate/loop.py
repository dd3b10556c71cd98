"""The step loops of all accelerators of a process, on one timer.

Computing is an absolute deadline: a step that begins at s and computes t seconds ends at s + t, whenever
this is noticed, and the next step begins there. So lateness does not add up, and is measured. A step begins
when its batch is there and, with a barrier at every step, when all accelerators have ended the one before,
as the gradients' exchange makes it.
"""

from __future__ import annotations

import heapq
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.emulate.clock import Clock, Feeding, RealClock
from headrace.bench.emulate.punctual import before_others, punctual
from headrace.bench.metrics.timeline import Block
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from numpy.typing import NDArray

    from headrace.bench.emulate.clock import TimedSource
    from headrace.bench.emulate.engines.base import Source
    from headrace.bench.emulate.feeder import Arrival

__all__ = ["LoopOptions", "StepLoop"]

_SIGNAL_CHECK_S = 0.2
"""How often a long wait looks for Ctrl-C."""

_OTHERS_CHECK_S = 0.5
"""How often a block looks whether the other processes live."""


_COMPUTE_S_LEAST = 0.005
"""Of a step on average: with less the loop hardly sleeps, and must not come before those that read."""


class _Steps:
    """One accelerator's recorded steps."""

    __slots__ = (
        "compute",
        "end_s",
        "gate_s",
        "harness",
        "late",
        "load",
        "nbytes",
        "step",
        "waits_s",
    )

    def __init__(self, steps: int, start_s: float) -> None:
        self.load = np.zeros(steps)
        self.compute = np.zeros(steps)
        self.harness = np.zeros(steps)
        self.late = np.zeros(steps)
        self.waits_s = np.zeros(steps)
        self.step = 0
        self.nbytes = 0
        self.gate_s = start_s
        """When the step may begin, as far as the accelerators are concerned."""
        self.end_s = start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How steps are run.

    Attributes:
        first: the first accelerator's number among all processes'.
        barrier_every_step: all accelerators begin each step together.
        ahead: batches may be waited for while the one before is computed upon.
        meet: the barrier with other processes, if there are any.
        check: sees that the other processes live; raises if not.
        progress: called with the number of finished steps of all accelerators.
        deadline_s: how long nothing may happen at all.
        clock: the machine's, or a virtual one.
    """

    first: int = 0
    barrier_every_step: bool = True
    ahead: bool = True
    meet: Callable[[], None] | None = None
    check: Callable[[], None] | None = None
    progress: Callable[[int], None] | None = None
    deadline_s: float = 330.0
    clock: Clock = field(default_factory=RealClock)


class StepLoop:
    """Runs blocks of steps.

    Attributes:
        options: how.
        nbytes: bytes that came, of all blocks.
        batch_waits_s: how long each feeder waited for each batch, an array for each block.
    """

    def __init__(self, options: LoopOptions) -> None:
        self.options = options
        self.nbytes = 0
        self.batch_waits_s: list[NDArray[np.float64]] = []

    def run(
        self,
        sources: Sequence[Callable[[], Source | TimedSource]],
        compute_s: NDArray[np.float64],
        epoch: int,
        kind: Literal["train", "eval"] = "train",
        number: int = 1,
    ) -> list[Block]:
        """Run one block on all accelerators.

        Args:
            sources: one for each accelerator: begins its epoch, which counts as time of the first step.
            compute_s: (accelerators, steps) how long each step computes.
            epoch: from 1.
            kind: training or evaluation.
            number: of the epoch's blocks, from 1.

        Returns:
            A block for each accelerator.

        Raises:
            BenchError: a batch cannot be read, or nothing happened for `deadline_s`.
        """
        sleeps = compute_s.size > 0 and float(compute_s.mean()) >= _COMPUTE_S_LEAST
        with punctual():
            running = _Running(self.options, sources, compute_s)
            try:
                with before_others() if sleeps else nullcontext():
                    running.run()
            finally:
                running.close()
        blocks = []
        for accelerator, steps in enumerate(running.steps):
            self.nbytes += steps.nbytes
            self.batch_waits_s.append(steps.waits_s)
            blocks.append(Block(
                epoch=epoch, accelerator=self.options.first + accelerator, kind=kind, number=number,
                start_s=running.start_s, end_s=steps.end_s, load_s=steps.load, compute_s=steps.compute,
                harness_s=steps.harness, late_s=steps.late,
            ))  # fmt: skip
        return blocks


class _Running:
    """One block while it runs."""

    def __init__(
        self,
        options: LoopOptions,
        sources: Sequence[Callable[[], Source | TimedSource]],
        compute_s: NDArray[np.float64],
    ) -> None:
        self._options = options
        self._clock = options.clock
        self._compute_s = compute_s
        self._count, self._total = compute_s.shape
        self._inbox: SimpleQueue[Arrival] = SimpleQueue()
        self._ends: list[tuple[float, int]] = []
        self._arrived: dict[int, Arrival] = {}
        self._finished = 0
        self._at_barrier = 0
        self._barrier_s = 0.0
        if options.meet is not None:
            options.meet()
        self.start_s = self._clock.now()
        self.steps = [_Steps(self._total, self.start_s) for _ in sources]
        self._open = [True] * self._count
        """Which accelerators may begin their step once its batch is there."""
        self._feeders: list[Feeding] = []
        try:
            self._open_sources(sources)
        except BaseException:
            self.close()
            raise

    def _open_sources(self, sources: Sequence[Callable[[], Source | TimedSource]]) -> None:
        asks: list[Callable[[], bool]] = []
        for number, source in enumerate(sources):
            opened = source()
            self._feeders.append(self._clock.feeder(number, opened, self._inbox))
            if hasattr(opened, "ask"):
                asks.append(opened.ask)
        while asks:  # in turns: a batch of each, then another
            asks = [ask for ask in asks if ask()]

    def run(self) -> None:
        if not self._total:
            return
        for number in range(self._count):
            self._want(number)
        heard_s = checked_s = self._clock.now()
        while self._finished < self._count:
            now = self._clock.now()
            while self._ends and self._ends[0][0] <= now:
                end_s, number = heapq.heappop(self._ends)
                self._end(number, end_s, now)
                heard_s = now
            if self._finished == self._count:
                break
            if self._options.check is not None and now - checked_s > _OTHERS_CHECK_S:
                self._options.check()
                checked_s = now
            wait_s = min(_SIGNAL_CHECK_S, self._ends[0][0] - now) if self._ends else _SIGNAL_CHECK_S
            arrival = self._clock.take(self._inbox, max(0.0, wait_s))
            if arrival is not None:
                heard_s = arrival.at_s
                self._arrive(arrival)
            elif not self._ends and now - heard_s > self._options.deadline_s:
                raise BenchError(f"no batch came for {self._options.deadline_s:g} s.")

    def close(self) -> None:
        for feeder in self._feeders:
            feeder.close()

    def _arrive(self, arrival: Arrival) -> None:
        if arrival.error is not None:
            raise arrival.error
        self._arrived[arrival.number] = arrival
        self._try_begin(arrival.number)

    def _want(self, number: int) -> None:
        """The accelerator's next batch, now or when it is there."""
        arrival = self._feeders[number].poll() if self._options.ahead else None
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
        harness_s = 0.0 if self._options.ahead else max(0.0, arrival.asked_s - steps.gate_s)
        steps.harness[at] = min(harness_s, begin_s - steps.gate_s)
        steps.load[at] = begin_s - steps.gate_s - steps.harness[at]
        steps.waits_s[at] = max(0.0, arrival.at_s - arrival.asked_s)
        assert arrival.batch is not None
        steps.nbytes += arrival.batch.nbytes
        compute_s = float(self._compute_s[number, at])
        steps.compute[at] = compute_s
        heapq.heappush(self._ends, (begin_s + compute_s, number))
        if self._options.ahead and at + 1 < self._total:
            self._want(number)

    def _end(self, number: int, end_s: float, now: float) -> None:
        steps = self.steps[number]
        steps.late[steps.step] = now - end_s
        steps.step += 1
        steps.end_s = end_s
        last = steps.step == self._total
        if self._options.barrier_every_step:
            self._barrier_s = max(self._barrier_s, end_s)
            self._at_barrier += 1
            if self._at_barrier == self._count:
                self._pass_barrier()
        elif not last:
            self._next(number, end_s)
        self._finished += last

    def _pass_barrier(self) -> None:
        gate_s = self._barrier_s
        self._at_barrier = 0
        if self._options.meet is not None:
            self._options.meet()
            gate_s = self._clock.now()
        done = self.steps[0].step
        if self._options.progress is not None:
            self._options.progress(done * self._count)
        for number in range(self._count):
            self.steps[number].end_s = gate_s
            if done < self._total:
                self._next(number, gate_s)

    def _next(self, number: int, gate_s: float) -> None:
        self.steps[number].gate_s = gate_s
        self._open[number] = True
        if not self._options.ahead:
            self._feeders[number].permit()
        self._try_begin(number)
