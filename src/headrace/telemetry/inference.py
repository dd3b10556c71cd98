"""Inference: how long a job that does not use headrace probably waited for data. Pure.

Nobody measures its steps, so this is a judgement, and is called `inferred` wherever it is shown:

- A GPU that is idle while tasks of its job wait for I/O (PSI) is taken to wait for storage, for as long as
  both are so.
- A GPU that is idle while the job's CPUs are busy is taken to wait for decoding.
- Without a GPU to look at, a job waits for storage while tasks wait for I/O and its CPUs do little.

What is neither is not said to be I/O: a GPU may be idle for many reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.causes import Cause

__all__ = ["Observed", "infer"]

CPU_BUSY = 0.85
"""A job that uses more than this share of its CPUs is held up by them."""

CPU_LITTLE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job in an interval; what is not known is None."""

    seconds: float
    gpu_busy: float | None = None
    """Mean share of time in which its GPUs worked."""
    io_pressure: float | None = None
    """Share of time in which at least one task waited for I/O."""
    cpu_share: float | None = None
    """Of its CPUs, in use."""


def infer(seen: Observed) -> dict[Cause, float]:
    """Seconds that the job probably waited, by cause; at most the interval's."""
    pressure = _share(seen.io_pressure)
    cpu = seen.cpu_share if seen.cpu_share is not None else 0.0
    if seen.gpu_busy is None:
        free = max(0.0, 1.0 - cpu) if cpu < CPU_LITTLE else 0.0
        found = {Cause.STORAGE: min(pressure, free)}
    else:
        idle = 1.0 - _share(seen.gpu_busy)
        storage = min(idle, pressure)
        found = {Cause.STORAGE: storage, Cause.DECODE: idle - storage if cpu > CPU_BUSY else 0.0}
    return {cause: share * seen.seconds for cause, share in found.items() if share > 0.0}


def _share(value: float | None) -> float:
    return 0.0 if value is None else min(1.0, max(0.0, value))
