"""Groups: what the control groups of Slurm's jobs say: CPU, memory, pressure, and which jobs there are.

One read for a whole job, and it counts processes that came and went between two looks. Where there are no
such groups (no Slurm, or one without the cgroup plugins) there is nothing here, and processes tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.machine.sensors import lines_of, number, pressure_of
from headrace.telemetry.attribution import job_of_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["GroupUse", "job_groups"]

JOBS_MAX: Final = 1024


@dataclass(slots=True)
class GroupUse:
    """A job's group; None where it does not tell."""

    cpu_s: float | None = None
    memory_bytes: float | None = None
    """Without page cache, which the kernel takes back before it kills."""
    io_pressure_s: float | None = None
    """Time in which at least one of its tasks waited for I/O."""


def job_groups(root: Path) -> dict[str, GroupUse]:
    """What the groups of all jobs say now, by job."""
    found: dict[str, GroupUse] = {}
    for folder in _folders(root):
        job = job_of_group(str(folder.relative_to(root)))
        if job and (job in found or len(found) < JOBS_MAX):
            _add(found.setdefault(job, GroupUse()), folder)
    return found


def _folders(root: Path) -> Iterator[Path]:
    """Folders of jobs, of both versions."""
    mount = root / "sys/fs/cgroup"
    for base in (mount, mount / "unified"):
        yield from base.glob("system.slice/*slurmstepd.scope/job_*")
    for controller in ("cpuacct", "cpu,cpuacct", "memory"):
        yield from (mount / controller).glob("slurm*/uid_*/job_*")


def _add(use: GroupUse, folder: Path) -> None:
    fields = _fields(folder / "cpu.stat")
    if "usage_usec" in fields:
        use.cpu_s = fields["usage_usec"] / 1e6
    usage = _value(folder / "cpuacct.usage")
    if usage is not None:
        use.cpu_s = usage / 1e9
    for name, cache in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        memory = _value(folder / name)
        if memory is not None:
            cached = _fields(folder / "memory.stat").get(cache, 0.0)
            use.memory_bytes = max(0.0, memory - cached)
    pressure = pressure_of(folder / "io.pressure").get("some")
    if pressure is not None:
        use.io_pressure_s = pressure


def _value(path: Path) -> float | None:
    return number(next(iter(lines_of(path)), ""))


def _fields(path: Path) -> dict[str, float]:
    pairs = (line.partition(" ") for line in lines_of(path))
    values = {name: number(value) for name, _, value in pairs}
    return {name: value for name, value in values.items() if value is not None}
