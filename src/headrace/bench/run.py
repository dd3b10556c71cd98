"""Run: from a workload to the recorded timelines of all its accelerators, and where its time went."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from headrace.bench.checkpoint_runs import CheckpointTimes, RunCheckpointer
from headrace.bench.engines import engine_name, make_engine
from headrace.bench.engines.base import EngineContext
from headrace.bench.loop import StepLoop
from headrace.bench.plan import plan_of
from headrace.io.simulation import simulation_of
from headrace.machine.host import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.bench.config import LoadedWorkload
    from headrace.bench.engines.base import BatchSource, Engine
    from headrace.bench.metrics import Block, Formula
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

    @contextlib.contextmanager
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


_CEILING_S: Final = 15.0
"""How long a ceiling is measured, about: it has one epoch of as many steps."""

_CEILING_STEPS_LEAST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a workload is run and judged: what DLIO has no words for.

    Attributes:
        accelerators: of each process.
        barrier: at every step, as DLIO has it, or at the end of every epoch only.
        simulate: a slow storage to simulate: a preset's name or a SlowVolume.
        deadline_s: how long a batch may take.
        cold: put the data set out of the page cache before every repeat, and see that it is.
        ceiling: run the same steps on a null store, too.
        repeats: of the whole run; more than one give a confidence interval.
        stage: a folder, of each host or of all, to copy the data set to; it is read there, and removed at the
            end.
        overwrite: another data set of ours that is in the way is removed before data is generated.
        generate_threads: that write data; not given: reader.write_threads, or as many as suit this host.
        formula: DLIO's throughput formula in summary.json.
        progress: called with (what, done, total).

    Raises:
        ValueError: there is no such barrier, formula or simulation.
    """

    accelerators: int = 1
    barrier: Literal["step", "epoch"] = "step"
    simulate: Any = None
    deadline_s: float = 300.0
    cold: bool = False
    ceiling: bool = False
    repeats: int = 1
    stage: str | None = None
    overwrite: bool = False
    generate_threads: int | None = None
    formula: Formula = "mlcommons"
    progress: Callable[[str, int, int | None], None] | None = None

    def __post_init__(self) -> None:
        if self.barrier not in ("step", "epoch"):
            raise ValueError(f"barrier is {self.barrier!r}, expected step or epoch")
        if self.formula not in ("mlcommons", "upstream"):
            raise ValueError(f"formula is {self.formula!r}, expected mlcommons or upstream")
        if isinstance(self.simulate, str):
            simulation_of(self.simulate)


@dataclass(slots=True)
class RunRecord:
    """What a run left, of this process's accelerators.

    Attributes:
        nbytes: that the engine delivered; 0 where it cannot tell.
        device_bytes: that this process and its workers read from devices.
        cpu_s: user and system time of this process and its workers.
        phases_s: what this process's time went to.
    """

    engine: str
    blocks: list[Block] = field(default_factory=list)
    batch_waits_s: list[NDArray[np.float64]] = field(default_factory=list)
    nbytes: int = 0
    device_bytes: int = 0
    cpu_s: float = 0.0
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
    options: SessionOptions,
    group: RankGroup,
    files: Mapping[str, Sequence[str]],
    progress: Callable[[int, int], None] | None = None,
) -> RunRecord:
    """Train, and evaluate when it is due, for all epochs.

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


def run_ceiling(loaded: LoadedWorkload, options: SessionOptions, group: RankGroup) -> RunRecord:
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
        options: SessionOptions,
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
        self.loop = StepLoop(
            first=self._first,
            barrier_every_step=options.barrier == "step",
            ahead=engine.ahead,
            meet=self._meet if group.place.world_size > 1 else None,
            check=group.check if group.place.world_size > 1 else None,
            progress=self._tell,
            deadline_s=self._deadline_s,
        )

    def run(self) -> RunRecord:
        recorded = RunRecord(self._engine.name)
        train, evaluation = self._workload.train, self._workload.evaluation
        before = used()
        with contextlib.ExitStack() as closing:
            if self._checkpointer is not None:
                closing.callback(self._checkpointer.close)
            for epoch in range(1, train.epochs + 1):
                steps = self._plans["train"].steps
                with self._times.of("training"):
                    recorded.blocks += self.block("train", epoch, steps, train.computation_time)
                since = epoch - evaluation.eval_after_epoch
                due = since >= 0 and not since % evaluation.epochs_between_evals
                if "valid" in self._plans and due:
                    evaluated = self._plans["valid"].steps
                    with self._times.of("evaluation"):
                        recorded.blocks += self.block(
                            "valid", epoch, evaluated, evaluation.eval_time
                        )
                if self._checkpointer is not None and self._checkpointer.due(epoch):
                    self._save(epoch, steps)
            if self._checkpointer is not None:
                with self._times.of("checkpointing"):
                    self._checkpointer.settle()
                recorded.checkpoints = self._checkpointer.saved
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
        opened: dict[int, BatchSource] = {}

        def source(number: int) -> BatchSource:
            """Opened with the first block; the others go on with it."""
            if number not in opened:
                opened[number] = self._engine.open(split, epoch, self._first + number)
            return opened[number]

        kind: Literal["train", "eval"] = "train" if split == "train" else "eval"
        sources = [functools.partial(source, number) for number in range(self._count)]
        blocks: list[Block] = []
        idle = True
        try:
            for number, first in enumerate(range(0, steps, every or 1), 1):
                part = compute_s[:, first : first + every]
                self._meet()
                idle = False
                keep = first + every < steps
                blocks += self.loop.run(sources, part, epoch, kind, number, keep=keep)
                idle = True
                self._done += part.shape[1] * self._count
                if every < steps and part.shape[1] == every:
                    self._save(epoch, first + every, number)
        except BaseException:
            # The loop closes the sources itself, but one that a read is stuck in.
            for opened_source in opened.values() if idle else ():
                opened_source.close()
            raise
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
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    nbytes = re.search(
        r"^read_bytes: (\d+)", read_text(Path(f"/proc/{os.getpid()}/io")), re.MULTILINE
    )
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return cpu_s, int(nbytes[1]) if nbytes else 0
