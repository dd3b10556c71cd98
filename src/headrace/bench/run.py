"""Run: from a workload to the recorded timelines of all its accelerators, and where its time went."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import resource
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from headrace.bench.checkpoints import RunCheckpointer
from headrace.bench.dataset import plan_of
from headrace.bench.engines import EngineContext, engine_name, make_engine
from headrace.bench.loop import StepLoop
from headrace.bench.summary import BenchRecord
from headrace.config import trace_folder
from headrace.io.simulation import simulation_of
from headrace.machine.host import cpu_times, read_text
from headrace.plane.batch_trace import STEP
from headrace.trace.format import TraceFile, bytes_max

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.bench.config import LoadedWorkload
    from headrace.bench.dataset import StepPlan
    from headrace.bench.engines import BatchSource, Engine
    from headrace.bench.metrics import Block, Formula
    from headrace.bench.ranks import RankGroup
    from headrace.bench.values import TimeDistribution


LOG = logging.getLogger("headrace.trace")

PHASES: Final = ("staging", "training", "evaluation", "checkpointing", "other")


class PhaseTimes:
    """A stopwatch that always counts for one phase; for `other` to begin with."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._since_s, self._phase = now, now(), "other"
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count for a phase, and then again for the one before."""
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def seconds(self) -> dict[str, float]:
        """So far, by phase."""
        self._switch(self._phase)
        return dict(self._seconds)

    def _switch(self, phase: str) -> str:
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
        simulate: a slow storage to simulate: a preset's name or a SlowVolume.
        deadline_s: how long a batch may take.
        cold: put the data set out of the page cache before every repeat, and see that it is.
        ceiling: run the same steps on a null store, too.
        repeats: of the whole run; more than one give a confidence interval.
        stage: a folder, of each host or of all, to copy the data set to; it is read there, and removed at the
            end.
        overwrite: another data set of ours that is in the way is removed before data is generated.
        formula: DLIO's throughput formula in summary.json.
        trace: write a trace of each accelerator's steps.
        progress: called with (phase, done, total): samples that are generated, steps that are run, checkpoints.

    Raises:
        ValueError: there is no such formula or simulation.
    """

    accelerators: int = 1
    simulate: Any = None
    deadline_s: float = 300.0
    cold: bool = False
    ceiling: bool = False
    repeats: int = 1
    stage: str | None = None
    overwrite: bool = False
    formula: Formula = "mlcommons"
    trace: bool = False
    progress: Callable[[str, int, int | None], None] | None = None

    def __post_init__(self) -> None:
        if self.formula not in ("mlcommons", "upstream"):
            raise ValueError(f"formula is {self.formula!r}, expected mlcommons or upstream")
        if isinstance(self.simulate, str):
            simulation_of(self.simulate)


def plans_of(loaded: LoadedWorkload, world_accelerators: int) -> dict[str, StepPlan]:
    """The plans of what the workload does, by split; errors as for `plan_of`."""
    does, seed = loaded.workload.workflow, loaded.workload.train.seed
    plans: dict[str, StepPlan] = {}
    if does.train:
        plans["train"] = plan_of(loaded, "train", world_accelerators, seed)
    if does.train and loaded.workload.evaluates:
        plans["valid"] = plan_of(loaded, "valid", world_accelerators, seed + 1)
    return plans


def run_epochs(
    loaded: LoadedWorkload,
    options: SessionOptions,
    group: RankGroup,
    files: Mapping[str, Sequence[str]],
    *,
    progress: Callable[[int, int], None] | None = None,
    done: list[Block] | None = None,
) -> BenchRecord:
    """Train, and evaluate when it is due, for all epochs; `done` has the blocks that are over at any time.

    Raises:
        WorkloadError: the workload cannot be run so.
        BenchError: a batch cannot be read, or a rank is gone.
    """
    plans = plans_of(loaded, options.accelerators * group.place.world_size)
    simulate = options.simulate
    if isinstance(simulate, str):  # delays of one sequence would come to all ranks together
        named = simulation_of(simulate)
        simulate = replace(named, seed=named.seed + group.place.rank)
    context = EngineContext(
        loaded.workload, plans, files, options.accelerators, simulate, options.deadline_s
    )
    times = PhaseTimes()
    engine = make_engine(engine_name(loaded), context)
    with contextlib.ExitStack() as closing:
        closing.callback(engine.close)
        epochs = _Epochs(loaded, options, group, engine, plans, times, progress)
        epochs.done = [] if done is None else done
        if loaded.workload.workflow.checkpoint:
            epochs.checkpointer = RunCheckpointer(loaded, group, options.accelerators)
            closing.callback(epochs.checkpointer.close)
        return epochs.run()


def run_ceiling(
    loaded: LoadedWorkload, options: SessionOptions, group: RankGroup
) -> Sequence[Block]:
    """The same steps on a null store, one epoch of about 15 seconds."""
    plan = plans_of(loaded, options.accelerators * group.place.world_size)["train"]
    times = loaded.workload.train.computation_time
    steps = int(_CEILING_S / times.mean_s) if times.mean_s > 0 else plan.steps
    steps = min(plan.steps, max(_CEILING_STEPS_LEAST, steps), 10_000)
    context = EngineContext(loaded.workload, {"train": plan}, {}, options.accelerators)
    engine = make_engine("null", context)
    epochs = _Epochs(loaded, options, group, engine, {"train": plan}, PhaseTimes())
    return epochs.block("train", 1, steps, times)


class _Epochs:
    """One run's epochs, with one loop and one engine."""

    def __init__(  # noqa: PLR0917 - all that a run is made of
        self, loaded: LoadedWorkload, options: SessionOptions, group: RankGroup, engine: Engine,
        plans: dict[str, StepPlan], times: PhaseTimes,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        self._workload, self._engine = loaded.workload, engine
        self._plans, self._times = plans, times
        self._count, self._first = options.accelerators, options.accelerators * group.place.rank
        self._steps_done = 0
        self.done: list[Block] = []
        self.checkpointer: RunCheckpointer | None = None
        deadline_s, alone = options.deadline_s + 30, group.place.world_size == 1
        self._world = options.accelerators * group.place.world_size
        self._meet = functools.partial(group.barrier, deadline_s)
        meet = None if alone else functools.partial(group.meet, deadline_s=deadline_s)
        steps_each = sum(plan.steps for plan in plans.values())
        total = steps_each * self._count * self._workload.train.epochs

        def report(steps: int) -> None:
            if progress is not None:
                progress(self._steps_done + steps, total)

        self._loop = StepLoop(
            first=self._first, ahead=engine.ahead, meet=meet, check=None if alone else group.check,
            progress=report, deadline_s=deadline_s,
        )  # fmt: skip

    def run(self) -> BenchRecord:
        train, evaluation = self._workload.train, self._workload.evaluation
        blocks = self.done
        (cpu_s, device_bytes), begun = used(), cpu_times()
        for epoch in range(1, train.epochs + 1):
            steps = self._plans["train"].steps
            with self._times.of("training"):
                blocks += self.block("train", epoch, steps, train.computation_time)
            since = epoch - evaluation.eval_after_epoch
            due = since >= 0 and not since % evaluation.epochs_between_evals
            if due and (plan := self._plans.get("valid")) is not None:
                with self._times.of("evaluation"):
                    blocks += self.block("valid", epoch, plan.steps, evaluation.eval_time)
            if self.checkpointer is not None and self.checkpointer.due(epoch):
                with self._times.of("checkpointing"):
                    self.checkpointer.save(epoch, steps)
        saved = []
        if self.checkpointer is not None:
            with self._times.of("checkpointing"):
                self.checkpointer.settle()
            saved = self.checkpointer.saved
        if self._world == 1 and (folder := trace_folder()) is not None:
            try:
                write_trace(folder, blocks, self._plans["train"].batch)
            except OSError as e:
                LOG.warning("%s: no trace of the steps, the run goes on: %s", folder, e)
        phases_s, figures = self._times.seconds(), self._engine.figures()
        after = used()
        return BenchRecord(
            engine=self._engine.name, blocks=blocks, checkpoints=saved, phases_s=phases_s,
            engine_figures=figures, cpu_s=after[0] - cpu_s, device_bytes=after[1] - device_bytes,
            cpu_use=begun.until(cpu_times()), nbytes=self._loop.nbytes,
            batch_waits_s=np.concatenate(self._loop.batch_waits_s),
        )  # fmt: skip

    def block(self, split: str, epoch: int, steps: int, times: TimeDistribution) -> list[Block]:
        """Run one epoch's steps of training or evaluation on all accelerators.

        Checkpoints every so many steps part an epoch of training into blocks, as DLIO has them.
        """
        compute_s = np.zeros((self._count, steps))
        for number in range(self._count):
            seed = (self._workload.train.seed, epoch, self._first + number, split == "valid")
            compute_s[number] = times.draw(np.random.default_rng(seed), steps)
        order = self._plans[split].recorded
        if order is not None and len(order.compute_s):
            step = np.arange((epoch - 1) * steps, epoch * steps) * self._world
            ranks = np.arange(self._first, self._first + self._count)[:, None]
            compute_s = order.compute_s[(step + ranks) % len(order.compute_s)]
        every = steps
        if split == "train" and self.checkpointer is not None:
            every = max(0, self._workload.checkpoint.steps_between_checkpoints) or steps
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
                blocks += self._loop.run(sources, part, epoch, kind, number, keep=keep)
                idle = True
                self._steps_done += part.shape[1] * self._count
                if every < steps and part.shape[1] == every:
                    assert self.checkpointer is not None
                    with self._times.of("checkpointing"):
                        self.checkpointer.save(epoch, first + every, number)
        except BaseException:
            # The loop closes the sources itself, but one that a read is stuck in.
            for opened_source in opened.values() if idle else ():
                opened_source.close()
            raise
        return blocks


def write_trace(folder: str, blocks: Sequence[Block], batch: int) -> None:
    """Write one accelerator's steps of training as a loader writes its own: a recording needs not guess them.

    Raises:
        OSError: it cannot be written.
    """
    parts = []
    for block in blocks:
        if block.kind == "train":
            rows = np.zeros(block.steps, STEP)
            waited = block.load_s + block.harness_s
            ends = block.start_s + np.cumsum(waited + block.compute_s)
            rows["asked_s"] = np.concatenate([[block.start_s], ends])[: block.steps]
            rows["delivered_s"] = rows["asked_s"] + waited
            rows["epoch"], rows["step"] = block.epoch, np.arange(block.steps)
            rows["samples"] = batch
            parts.append(rows)
    if not parts:
        return
    now_s = time.perf_counter()  # the steady clock of all traces
    header = {
        "rank": 0, "world_size": 1, "host": socket.gethostname(), "pid": os.getpid(),
        "began_unix_s": time.time() - now_s + blocks[0].start_s, "began_s": blocks[0].start_s,
        "source": "headrace bench", "batch_size": batch,
    }  # fmt: skip
    trace = TraceFile(folder, 0, header, bytes_max())
    trace.steps(np.concatenate(parts))
    trace.close("closed")


def used() -> tuple[float, int]:
    """CPU seconds, and bytes from devices, of this process and the children that ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    io = read_text(Path(f"/proc/{os.getpid()}/io"))
    nbytes = re.search(r"^read_bytes: (\d+)", io, re.MULTILINE)
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return cpu_s, int(nbytes[1]) if nbytes else 0
