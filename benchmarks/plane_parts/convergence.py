"""Convergence: headrace's tuner from a cold start, beside the best fixed setting of a sweep.

For each kind of simulated storage and two consumers' rates, in a process of its own:
the sweep finds the best steady throughput of any fixed setting and the least reads in flight and
buffer that come within 1.5 percent of it (the noise of a measurement); then the tuner begins at the
defaults, runs, meets a step of latency (x 10) and its end. PRISMA's published algorithm and the
settings that torch's defaults amount to (two workers, each with one read at a time and two batches
ahead: an emulation) run beside it on the same reader.

All figures are of simulated storage.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from benchmarks.plane_parts import Section
from benchmarks.plane_parts.prisma_tuner import WARM_UP_S, PrismaTuner
from benchmarks.plane_parts.rig import SAMPLE_BYTES, Rig, Timeline, ensure_store
from benchmarks.targets import Target
from headrace.io import PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.plane_parts import Options

RATES = {"lustre": (2000, 8000), "nfs": (2000, 8000), "s3": (300, 1500), "hdd": (30, 200)}
BATCHES = {"hdd": 4}
BATCH = 32
STEP = 10.0

READS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 17, 20, 24, 28, 34, 40, 48, 57, 68, 81, 96, 115, 137, 163,
         194, 230, 275, 327, 390, 460, 550, 660, 780, 930)  # fmt: skip
BUFFERS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24, 28, 34, 40, 48, 57, 68, 81, 96)

AMPLE_READS, AMPLE_BATCHES = 1024, 96
AS_GOOD = 0.985
REACHED = 0.95
RESOURCES_MAX = 1.25
WITHIN_S = 5.0
TORCH = {"reads_in_flight": 2, "batches": 4}


@dataclass(frozen=True, slots=True)
class Best:
    """The best steady rate of a sweep, and the least of each knob that comes near it."""

    rate: float
    reads: int
    batches: int


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a tuned run, against the best fixed setting for it."""

    best: Best
    reached_s: float | None
    share: float
    reads: float
    batches: float

    @property
    def reads_ratio(self) -> float:
        # One read more or less is no difference: fewer than four count as four.
        return max(4.0, self.reads) / max(4, self.best.reads)

    @property
    def batches_ratio(self) -> float:
        # Less than two batches cannot be told apart: one is read while one is taken.
        return max(2.0, self.batches) / max(2, self.best.batches)


@dataclass(frozen=True, slots=True)
class Cell:
    """One storage and one consumer."""

    preset: str
    rate: int
    cold: Phase
    step: Phase
    back: Phase
    prisma_share: float
    prisma_reached_s: float | None
    torch_share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How long everything takes."""

    settle_s: float
    measure_s: float
    tuned_s: float
    steady_s: float
    prisma_s: float

    @classmethod
    def of(cls, *, quick: bool) -> Plan:
        return cls(0.2, 0.5, 5.0, 2.0, 3.0) if quick else cls(0.25, 1.0, 11.0, 5.0, 8.0)


def _size(batches: float, batch: int) -> int:
    return int(batches * batch * SAMPLE_BYTES * 1.04) + (64 << 10)


class _Sweep:
    """Measures fixed settings one after the other on one rig."""

    def __init__(self, rig: Rig, plan: Plan, latency_s: float) -> None:
        self._rig = rig
        self._settle_s = plan.settle_s + min(3.0, 10.0 * latency_s)
        # Reads that take a second come in bursts: behind each slow one a buffer full.
        self._measure_s = max(plan.measure_s, min(6.0, 20.0 * latency_s))

    def rate(self, reads: int, batches: int) -> float:
        rig = self._rig
        rig.drain()
        rig.stage.turn({"reads_in_flight": reads, "buffer_bytes": _size(batches, rig.batch)})
        time.sleep(self._settle_s)
        start = time.perf_counter()
        # At least so many batches that one more or less is within the noise.
        time.sleep(max(self._measure_s, min(3.0, 60.0 * rig.batch / rig.rate)))
        return rig.timeline.rate(start, time.perf_counter())

    def least(self, values: tuple[int, ...], rate_at: Callable[[int], float], bound: float) -> int:
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            if rate_at(values[middle]) >= bound:
                high = middle
            else:
                low = middle + 1
        return values[low]

    def best(self) -> Best:
        top = max(self.rate(reads, AMPLE_BATCHES) for reads in (AMPLE_READS // 8, AMPLE_READS))
        bound = AS_GOOD * top
        reads = self.least(READS, lambda value: self.rate(value, AMPLE_BATCHES), bound)
        batches = self.least(BUFFERS, lambda value: self.rate(reads, value), bound)
        return Best(top, reads, batches)


def _phase(
    timeline: Timeline, best: Best, batch: int, times: tuple[float, float, float], over_s: float
) -> Phase:
    """What happened from `times[0]` to `times[2]`, steady from `times[1]` on."""
    start, steady, stop = times
    reads, size = timeline.mean_knobs(steady, stop)
    return Phase(
        best,
        timeline.reaches(REACHED * best.rate, start, stop, over_s),
        timeline.rate(steady, stop) / best.rate,
        reads,
        size / (batch * SAMPLE_BYTES * 1.04),
    )


def measure(store: Path, preset: str, rate: int, *, quick: bool) -> Cell:
    """One cell, in this process."""
    plan, batch = Plan.of(quick=quick), BATCHES.get(preset, BATCH)
    latency_s = PRESETS[preset].latency_s
    over_s = max(1.0, 12.0 * batch / rate)
    ample = {"reads_in_flight": 64, "buffer_bytes": _size(AMPLE_BATCHES, batch)}
    with Rig(store, preset, rate, batch, tune=False, knobs=ample) as rig:
        calm = _Sweep(rig, plan, latency_s).best()
    with Rig(store, preset, rate, batch, tune=False, knobs=ample) as rig:
        rig.storage.model.scale_latency(STEP)
        slow = _Sweep(rig, plan, STEP * latency_s).best()

    with Rig(store, preset, rate, batch, tune=True) as rig:
        marks = [time.perf_counter()]
        for factor in (STEP, 1.0, 1.0):  # of the latency at first
            time.sleep(plan.tuned_s)
            marks.append(time.perf_counter())
            rig.storage.model.scale_latency(factor)
        line = rig.timeline
    phases = [
        _phase(line, best, batch, (start, stop - plan.steady_s, stop), over_s)
        for best, start, stop in zip((calm, slow, calm), marks, marks[1:], strict=False)
    ]

    with Rig(store, preset, rate, batch, tune=False) as rig:
        tuner = PrismaTuner(rig.stage, SAMPLE_BYTES, warm_up_s=1.0 if quick else WARM_UP_S)
        start = time.perf_counter()
        tuner.start()
        time.sleep(plan.prisma_s + (1.0 if quick else WARM_UP_S))
        stop = time.perf_counter()
        tuner.ending.set()
        prisma = rig.timeline.rate(stop - plan.steady_s, stop) / calm.rate
        prisma_s = rig.timeline.reaches(REACHED * calm.rate, start, stop, over_s)

    knobs = {"reads_in_flight": TORCH["reads_in_flight"], "buffer_bytes": _size(4, batch)}
    with Rig(store, preset, rate, batch, tune=False, knobs=knobs) as rig:
        time.sleep(1.0)
        start = time.perf_counter()
        time.sleep(plan.steady_s)
        torch = rig.timeline.rate(start, time.perf_counter()) / calm.rate
    return Cell(preset, rate, *phases, prisma, prisma_s, torch)


def run(options: Options) -> Section:
    """Measure all cells, some at a time: they mostly sleep."""
    store = ensure_store(options.dir)
    cells = [
        (preset, rate)
        for preset, rates in RATES.items()
        for rate in (rates[:1] if options.quick else rates)
    ]
    if options.quick:
        cells = cells[:2]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        jobs = [pool.submit(measure, store, *cell, quick=options.quick) for cell in cells]
        found = [job.result() for job in jobs]
    return Section(
        "Convergence over simulated storage: tuned from a cold start, against the best fixed setting",
        [_HEADER, *(_row(cell) for cell in found)],
        _targets(found),
        notes=[_NOTE],
        raw=[asdict(cell) for cell in found],
    )


_NOTE = (
    "x: steady throughput over the best fixed setting's; in: seconds to 0.95 of it; reads, buffer: "
    "steady, over the least of the best setting's (fewer than four reads count as four, less than two "
    "batches as two). PRISMA: its published algorithm on the same reader, with its 15 s warm-up. "
    "torch: two reads in flight and four batches, as its defaults amount to (emulated)."
)

_HEADER = (
    "simulated storage, consumer",
    "best/s: reads, batches",
    "cold: x",
    "in s",
    "reads",
    "buffer",
    "latency x10, best/s: reads, batches",
    "x",
    "in s",
    "reads",
    "buffer",
    "back: x",
    "in s",
    "reads",
    "buffer",
    "PRISMA x",
    "in s",
    "torch x",
)


def _row(cell: Cell) -> list[str]:
    def best(phase: Phase) -> str:
        return f"{phase.best.rate:,.0f}: {phase.best.reads}, {phase.best.batches}"

    def cells(phase: Phase) -> list[str]:
        return [
            f"{phase.share:.2f}",
            _seconds(phase.reached_s),
            f"{phase.reads_ratio:.2f}",
            f"{phase.batches_ratio:.2f}",
        ]

    return [
        f"{cell.preset}, {cell.rate:,}/s",
        best(cell.cold),
        *cells(cell.cold),
        best(cell.step),
        *cells(cell.step),
        *cells(cell.back),
        f"{cell.prisma_share:.2f}",
        _seconds(cell.prisma_reached_s),
        f"{cell.torch_share:.2f}",
    ]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def _targets(cells: list[Cell]) -> list[Target]:
    found = []
    for name in ("cold", "step", "back"):
        phases = [getattr(cell, name) for cell in cells]
        title = {"cold": "from a cold start", "step": "latency x10", "back": "and back"}[name]
        found += [
            _all(f"{title}: steady throughput", phases, lambda p: p.share, REACHED, low=True),
            _all(f"{title}: seconds to 0.95", phases, lambda p: p.reached_s, WITHIN_S, low=False),
            _all(
                f"{title}: reads in flight",
                phases,
                lambda p: p.reads_ratio,
                RESOURCES_MAX,
                low=False,
            ),
            _all(f"{title}: buffer", phases, lambda p: p.batches_ratio, RESOURCES_MAX, low=False),
        ]
    return found


def _all(
    name: str,
    phases: list[Phase],
    value: Callable[[Phase], float | None],
    bound: float,
    *,
    low: bool,
) -> Target:
    values = [value(phase) for phase in phases]
    known = [99.0 if found is None else found for found in values]
    good = [found >= bound if low else found <= bound for found in known]
    worst = min(known) if low else max(known)
    required = f"{'>=' if low else '<='} {bound:g}, in all {len(known)}"
    measured = f"{sum(good)} of {len(good)}, worst {worst:.2f}"
    return Target(f"Tuner, {name}", required, measured, "met" if all(good) else "NOT MET")
