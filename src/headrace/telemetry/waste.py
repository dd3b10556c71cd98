"""Use and waste: what a job had of each resource, how much of it was used, and of how much of it that is known.

Of CPUs and GPUs that is time, of memory the peak for as long as the job had it. Both can be added up over jobs.
A share of what was used is given only where it is known for nearly all of what the job had: otherwise an idle
GPU that nobody looked at would count as a busy one, or a busy one as idle.

Waste is in GPU-hours, by kind. `data`: the job's own GPUs waited for data, `idle`: they did nothing otherwise.
`cpus` and `memory`: GPUs of the node that others could not have, because the job held more than its GPUs' share
of the node's CPUs or memory, and did not use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.base.causes import Cause
from headrace.base.text import bytes_text, counted
from headrace.telemetry.history import LITTLE, JobRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

COVERED: Final = 0.9  # a share is given where so much of what a job had was looked at
HEADROOM: Final = 1.2  # more than was used is to be asked for next time

WASTEFUL: Final = 1.5
"""Who asked for less than this much more than that is not told to ask for less."""

_BY_CPUS: Final = (Cause.DECODE, Cause.PYTHON, Cause.COLLATE)
"""Who waits for these is told to give more workers: not to ask for fewer CPUs as well."""


@dataclass(frozen=True, slots=True)
class Used:
    """Of one resource: seconds of CPUs or GPUs, bytes times seconds of memory.

    `known` is what it had while somebody looked, `used` what it used of that.
    """

    had: float = 0.0
    known: float = 0.0
    used: float = 0.0

    @property
    def coverage(self) -> float | None:
        """Share of what it had that was looked at; None: it had nothing, or nobody says how much."""
        return min(1.0, self.known / self.had) if self.had > 0.0 else None

    @property
    def share(self) -> float | None:
        """Share of it that was used; None where that is not known for nearly all of it."""
        covered = self.coverage
        return self.used / self.known if covered is not None and covered >= COVERED else None

    def __add__(self, other: Used) -> Used:
        """Of two jobs together; what one used of nobody knows how much is no part of any share."""
        used = sum(each.used for each in (self, other) if each.known)
        return Used(self.had + other.had, self.known + other.known, used)


class Booked(NamedTuple):
    """What the scheduler's books say of a job within a stretch of time."""

    seconds: float  # that it had its resources, on each of its nodes
    nodes: int
    cpus: int
    gpus: int
    cpu_s: float | None = None
    """CPU time of its processes; None: not measured, or only part of the job lies in the stretch."""
    memory_asked_bytes: int = 0  # on a node; 0: the books do not say
    memory_bytes: int | None = None  # the most that it took on a node; None: not measured


class Waste(NamedTuple):
    """GPU-seconds, by kind; see the module."""

    data: float = 0.0
    idle: float = 0.0
    cpus: float = 0.0
    memory: float = 0.0


_NO_WASTE: Final = Waste()
WASTE: Final = ("waiting for data", "idle otherwise", "kept from others by CPUs", "by memory")
"""What the kinds are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUse:
    """What a job, or several together, had and used."""

    cpu: Used = Used()
    memory: Used = Used()
    gpu: Used = Used()
    gpu_memory: Used = Used()
    waste: Waste = _NO_WASTE
    seconds: float = 0.0  # node-seconds
    advice: tuple[str, ...] = ()  # what to ask for next time, of one job

    def as_dict(self) -> dict[str, Any]:
        """As plain values; shares are of what somebody looked at, hours are of the whole job."""
        values: dict[str, Any] = {}
        for name in ("cpu", "memory", "gpu", "gpu_memory"):
            used: Used = getattr(self, name)
            share = used.used / used.known if used.known else None
            values |= {f"{name}_use": share, f"{name}_coverage": used.coverage}
        wasted = {kind: seconds / 3600 for kind, seconds in self.waste._asdict().items()}
        return {**values, "efficiency": self.gpu.share, "wasted_gpu_hours": wasted}


def together(uses: Iterable[JobUse]) -> JobUse:
    """Several jobs as one."""
    every = [JobUse(), *uses]
    return JobUse(
        cpu=sum((use.cpu for use in every), Used()), memory=sum((use.memory for use in every), Used()),
        gpu=sum((use.gpu for use in every), Used()),
        gpu_memory=sum((use.gpu_memory for use in every), Used()),
        waste=Waste(*map(sum, zip(*(use.waste for use in every), strict=True))),
        seconds=sum(use.seconds for use in every),
    )  # fmt: skip


def use_of(record: JobRecord | None, booked: Booked | None = None) -> JobUse:
    """What a job used, by the agents that saw it and by the scheduler's books; either may be missing.

    Where both know something, the books say what the job had and for how long, and a job's whole CPU time.
    """
    total = JobRecord(job_id="").total if record is None else record.total
    seen_s = total("seconds")
    seconds = seen_s if booked is None else booked.seconds * booked.nodes
    if seconds <= 0.0:
        return JobUse()
    seen = min(1.0, seen_s / seconds)
    nodes = (len(record.nodes) if record is not None else 0) if booked is None else booked.nodes
    cpu_had = total("cpus_s") if booked is None else booked.cpus * booked.seconds
    gpu_had = total("gpu_s") if booked is None or not booked.gpus else booked.gpus * booked.seconds
    # Agents count to the moment, books in whole seconds: shares are of what was looked at.
    cpu = Used(cpu_had, cpu_had * seen_s / seconds, total("cpu_s"))
    memory_asked, memory_peak = total("memory_asked_bytes"), total("memory_bytes")
    if booked is not None:
        memory_asked = booked.memory_asked_bytes or memory_asked
        if booked.cpu_s is not None:
            cpu = Used(cpu_had, cpu_had, booked.cpu_s)
        memory_peak = max(memory_peak, booked.memory_bytes or 0)
    memory_known = 1.0 if booked is not None and booked.memory_bytes is not None else seen
    memory_had = memory_asked * seconds
    gpu = Used(gpu_had, total("gpu_watched_s"), total("gpu_busy_s"))
    gpu_memory_had = total("gpu_memory_asked_bytes") * seconds
    use = JobUse(
        cpu=cpu, gpu=gpu, seconds=seconds,
        memory=Used(memory_had, memory_had * memory_known, memory_peak * seconds * memory_known),
        gpu_memory=Used(
            gpu_memory_had, gpu_memory_had * seen, total("gpu_memory_bytes") * seconds * seen
        ),
    )  # fmt: skip
    node = tuple(total(f"node_{name}") for name in ("cpus", "memory_bytes", "gpus"))
    lost = 0.0 if record is None else sum(record.lost.values())
    gpus_used = int(total("gpus_used")) if gpu.share is not None else None
    wants_cpus = (
        record is not None
        and (record.stall or 0.0) >= LITTLE
        and next(iter(record.waited)) in _BY_CPUS
    )
    return _judged(use, node, lost, max(1, nodes), gpus_used, wants_cpus=wants_cpus)


def _judged(
    use: JobUse, node: tuple[float, ...], lost_s: float, nodes: int, gpus_used: int | None,
    *, wants_cpus: bool,
) -> JobUse:  # fmt: skip
    """With its waste, and what to ask for next time."""
    cpus_of_node, memory_of_node, gpus_of_node = node
    cpu, memory, gpu, seconds = use.cpu, use.memory, use.gpu, use.seconds
    idle_s = max(0.0, gpu.known - gpu.used - lost_s) if gpu.known else 0.0
    kept = []
    for used, size in ((cpu, cpus_of_node), (memory, memory_of_node)):
        share_of_gpu = size / gpus_of_node if gpus_of_node else 0.0
        over = 0.0
        if used.share is not None and share_of_gpu > 0.0:
            had, needed = used.had / seconds, used.had * used.share / seconds
            over = (had - max(needed, gpu.had / seconds * share_of_gpu)) / share_of_gpu
        # A node has no more GPUs to keep from others than the job left.
        kept += [max(0.0, min(over, gpus_of_node - gpu.had / seconds)) * seconds]
    waste = Waste(min(lost_s, gpu.known or lost_s), idle_s, *kept)
    advice = []
    gpus = round(gpu.had / seconds * nodes)
    if gpus_used is not None and gpus_used < gpus:
        advice += [f"{counted(gpus_used, 'GPU')}: {gpus - gpus_used} of {gpus} never worked"]
    if cpu.share is not None:
        cpus, worked = cpu.had / seconds, cpu.used / cpu.known * cpu.had / seconds
        # Each GPU's process wants one.
        enough = max(1, math.ceil(gpu.had / seconds), math.ceil(worked * HEADROOM))
        if cpus >= enough * WASTEFUL and not wants_cpus:
            advice += [f"{counted(enough, 'CPU')} a node: {worked:.2g} of {cpus:.0f} worked"]
    if memory.share is not None:
        asked, taken = memory.had / seconds, memory.share * memory.had / seconds
        gib = math.ceil(taken * HEADROOM / (1 << 30))
        if asked >= (gib << 30) * WASTEFUL:
            advice += [f"--mem={gib}G: {bytes_text(taken)} of {bytes_text(asked)} taken"]
    return replace(use, waste=waste, advice=tuple(advice))
