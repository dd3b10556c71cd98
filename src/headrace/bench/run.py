"""Run: from a workload to the recorded timelines of all its accelerators, and where its time went."""

from __future__ import annotations

import os
import resource
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from headrace.bench.checkpoint_runs import CheckpointTimes, RunCheckpointer
from headrace.bench.engines import engine_name, make_engine
from headrace.bench.engines.base import EngineContext
from headrace.bench.loop import LoopOptions, StepLoop
from headrace.bench.plan import plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.bench.config import LoadedWorkload
    from headrace.bench.engines.base import BatchSource, Delivered, Engine
    from headrace.bench.metrics import Block
    from headrace.bench.plan import StepPlan
    from headrace.bench.ranks import RankGroup
    from headrace.bench.values import TimeDistribution


Phase = Literal["staging", "training", "evaluation", "checkpointing", "other"]

PHASES: Final[tuple[Phase, ...]] = (
    "staging", "training", "evaluation", "checkpointing", "other",
)  # fmt: skip


class PhaseTimes:
    """A stopwatch that always counts for one phase; for `other` to begin with."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since_s = now()
        self._phase: Phase = "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Count for a phase, and then again for the one before."""
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def seconds(self) -> dict[Phase, float]:
        """So far, by phase."""
        self._switch(self._phase)
        return dict(self._seconds)

    def _switch(self, phase: Phase) -> Phase:
        now_s, before = self._now(), self._phase
        self._seconds[before] += now_s - self._since_s
        self._since_s, self._phase = now_s, phase
        return before


class EpochSource:
    """Batches of an epoch."""

    def __init__(self, engine: Engine, split: str, epoch: int, accelerator: int) -> None:
        self._engine, self._what = engine, (split, epoch, accelerator)
        self._source: BatchSource | None = None
        self._idle = True

    def part(self) -> EpochSource:
        """Begin a block: opens with the first, goes on with the others."""
        if self._source is None:
            self._source = self._engine.open(*self._what)
        self._idle = False
        return self

    def ask(self) -> bool:
        """Ask for one batch more of those that are read ahead; False when all are asked for."""
        ask: Callable[[], bool] | None = getattr(self._source, "ask", None)
        return ask is not None and ask()

    def poll(self) -> Delivered | None:
        """The next batch if it is there; None: ask `next`, which waits."""
        poll: Callable[[], Delivered | None] | None = getattr(self._source, "poll", None)
        return None if poll is None else poll()

    def next(self) -> Delivered:
        """The next batch; errors as the engine's."""
        assert self._source is not None
        return self._source.next()

    def close(self) -> None:
        """The end of a block: nobody waits in `next`, and there may be another block."""
        self._idle = True

    def end(self) -> None:
        """Give back what the epoch needed, unless a read is stuck in it."""
        if self._source is not None and self._idle:
            self._source.close()
            self._source = None


_CEILING_S: Final = 15.0
"""How long a ceiling is measured, about: it has one epoch of as many steps."""

_CEILING_STEPS_LEAST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a workload is run; what it is about is in the workload.

    Attributes:
        accelerators: of each process.
        barrier: at every step, as DLIO has it, or at the end of every epoch only.
        simulate: a slow storage to simulate: a preset's name or a SlowVolume.
        deadline_s: how long a batch may take.
    """

    accelerators: int = 1
    barrier: Literal["step", "epoch"] = "step"
    simulate: Any = None
    deadline_s: float = 300.0


@dataclass(slots=True)
class RunRecord:
    """What a run left, of this process's accelerators.

    Attributes:
        nbytes: that the engine delivered; 0 where it cannot tell.
        device_bytes: that this process and its workers read from devices.
        cpu_s: user and system time of this process and its workers.
        epoch_times: start and end of each epoch, seconds since 1970.
        phases_s: what this process's time went to.
    """

    engine: str
    blocks: list[Block] = field(default_factory=list)
    batch_waits_s: list[NDArray[np.float64]] = field(default_factory=list)
    nbytes: int = 0
    device_bytes: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    epoch_times: list[tuple[float, float]] = field(default_factory=list)
    engine_figures: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[CheckpointTimes] = field(default_factory=list)
    phases_s: dict[Phase, float] = field(default_factory=dict)


def plans_of(loaded: LoadedWorkload, world_accelerators: int) -> dict[str, StepPlan]:
    """The plans of what the workload does, by split; errors as for `plan_of`."""
    workload = loaded.workload
    plans: dict[str, StepPlan] = {}
    seed = workload.train.seed
    if workload.workflow.train:
        plans["train"] = plan_of(loaded, "train", world_accelerators, seed)
    if workload.workflow.evaluation and workload.workflow.train:
        plans["valid"] = plan_of(loaded, "valid", world_accelerators, seed + 1)
    return plans


def run_epochs(
    loaded: LoadedWorkload,
    options: RunOptions,
    group: RankGroup,
    files: Mapping[str, Sequence[str]],
    progress: Callable[[int, int], None] | None = None,
) -> RunRecord:
    """Train, and evaluate when it is due, for all epochs.

    Args:
        loaded: the workload.
        options: how.
        group: all processes.
        files: of each split, as `find_files` gives them.
        progress: called with (steps done, steps) of this process's accelerators.

    Raises:
        WorkloadError: the workload cannot be run so.
        BenchError: a batch cannot be read, or a rank is gone.
    """
    plans = plans_of(loaded, options.accelerators * group.place.world_size)
    context = EngineContext(
        loaded.workload, plans, files, options.accelerators, options.simulate, options.deadline_s
    )
    times = PhaseTimes()
    engine = make_engine(engine_name(loaded), context)
    try:
        epochs = _Epochs(
            loaded, options, group, engine, plans=plans, times=times, progress=progress
        )
        return epochs.run()
    finally:
        engine.close()


def run_ceiling(loaded: LoadedWorkload, options: RunOptions, group: RankGroup) -> RunRecord:
    """The same steps on a null store, one epoch of about 15 seconds."""
    plan = plans_of(loaded, options.accelerators * group.place.world_size)["train"]
    step_s = loaded.workload.train.computation_time.mean_s
    steps = int(_CEILING_S / step_s) if step_s > 0 else plan.steps
    steps = min(plan.steps, max(_CEILING_STEPS_LEAST, steps), 10_000)
    context = EngineContext(loaded.workload, {"train": plan}, {}, options.accelerators)
    engine = make_engine("null", context)
    epochs = _Epochs(
        loaded, options, group, engine, plans={"train": plan}, times=PhaseTimes(), checkpoints=False
    )
    recorded = RunRecord("null")
    recorded.blocks = epochs.block("train", 1, steps, loaded.workload.train.computation_time)
    recorded.batch_waits_s = epochs.loop.batch_waits_s
    return recorded


class _Epochs:
    """One run's epochs, with one loop and one engine."""

    def __init__(
        self,
        loaded: LoadedWorkload,
        options: RunOptions,
        group: RankGroup,
        engine: Engine,
        *,
        plans: dict[str, StepPlan],
        times: PhaseTimes,
        progress: Callable[[int, int], None] | None = None,
        checkpoints: bool = True,
    ) -> None:
        self._workload = loaded.workload
        self._group = group
        self._engine = engine
        self._plans = plans
        self._times = times
        self._count = options.accelerators
        self._first = options.accelerators * group.place.rank
        self._done = 0
        self._progress = progress
        self._deadline_s = options.deadline_s + 30
        self._checkpointer = None
        if loaded.workload.workflow.checkpoint and checkpoints:
            self._checkpointer = RunCheckpointer(loaded, group, self._count)
        self.loop = StepLoop(LoopOptions(
            first=self._first,
            barrier_every_step=options.barrier == "step",
            ahead=engine.ahead,
            meet=self._meet if group.place.world_size > 1 else None,
            check=group.check if group.place.world_size > 1 else None,
            progress=self._tell,
            deadline_s=self._deadline_s,
        ))  # fmt: skip

    def run(self) -> RunRecord:
        try:
            return self._run()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()

    def _run(self) -> RunRecord:
        recorded = RunRecord(self._engine.name)
        train, evaluation = self._workload.train, self._workload.evaluation
        before = used()
        begin = time.perf_counter()
        for epoch in range(1, train.epochs + 1):
            started = time.time()
            plan = self._plans["train"]
            with self._times.of("training"):
                recorded.blocks += self.block("train", epoch, plan.steps, train.computation_time)
            since = epoch - evaluation.eval_after_epoch
            if (
                "valid" in self._plans
                and since >= 0
                and not since % evaluation.epochs_between_evals
            ):
                steps = self._plans["valid"].steps
                with self._times.of("evaluation"):
                    recorded.blocks += self.block("valid", epoch, steps, evaluation.eval_time)
            if self._checkpointer is not None and self._checkpointer.due(epoch):
                self._save(epoch, plan.steps)
            recorded.epoch_times.append((started, time.time()))
        if self._checkpointer is not None:
            with self._times.of("checkpointing"):
                self._checkpointer.settle()
            recorded.checkpoints = self._checkpointer.saved
        recorded.wall_s = time.perf_counter() - begin
        recorded.phases_s = self._times.seconds()
        recorded.engine_figures = self._engine.figures()
        cpu_s, device_bytes = used()
        recorded.cpu_s, recorded.device_bytes = cpu_s - before[0], device_bytes - before[1]
        recorded.nbytes = self.loop.nbytes
        recorded.batch_waits_s = self.loop.batch_waits_s
        return recorded

    def block(self, split: str, epoch: int, steps: int, times: TimeDistribution) -> list[Block]:
        """Run one epoch's steps of training or evaluation on all accelerators.

        Checkpoints every so many steps part an epoch of training into blocks, as DLIO has them.
        """
        compute_s = np.zeros((self._count, steps))
        for number in range(self._count):
            seed = (self._workload.train.seed, epoch, self._first + number, split == "valid")
            compute_s[number] = times.draw(np.random.default_rng(seed), steps)
        every = steps
        if split == "train" and self._checkpointer is not None:
            every = self._checkpointer.steps_between or steps
        sources = [
            EpochSource(self._engine, split, epoch, self._first + number)
            for number in range(self._count)
        ]
        kind: Literal["train", "eval"] = "train" if split == "train" else "eval"
        blocks: list[Block] = []
        try:
            for number, first in enumerate(range(0, steps, every or 1), 1):
                part = compute_s[:, first : first + every]
                self._meet()
                blocks += self.loop.run([s.part for s in sources], part, epoch, kind, number)
                self._done += part.shape[1] * self._count
                if every < steps and part.shape[1] == every:
                    self._save(epoch, first + every, number)
        finally:
            for source in sources:
                source.end()
        return blocks

    def _save(self, epoch: int, step: int, number: int = 1) -> None:
        assert self._checkpointer is not None
        with self._times.of("checkpointing"):
            self._checkpointer.save(epoch, step, number)

    def _meet(self) -> None:
        self._group.barrier(self._deadline_s)

    def _tell(self, steps: int) -> None:
        if self._progress is not None:
            total = sum(plan.steps for plan in self._plans.values()) * self._count
            self._progress(self._done + steps, total * self._workload.train.epochs)


def used() -> tuple[float, int]:
    """CPU seconds, and bytes from devices, of this process and the children that ended."""
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        seconds += used.ru_utime + used.ru_stime
    return seconds, _device_bytes()


def _device_bytes() -> int:
    try:
        with open(f"/proc/{os.getpid()}/io", encoding="ascii") as file:
            for line in file:
                if line.startswith("read_bytes:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0
