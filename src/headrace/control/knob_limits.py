"""Limits: what the knobs of a process's planes must never pass, and who says so.

Read from what the kernel enforces on this job: memory limits of control groups (version 1 and 2)
and what is used of them, RLIMIT_AS, RLIMIT_DATA, RLIMIT_NOFILE, the CPUs that this process may use;
and from the operator's own word (`memory_bytes=` or HEADRACE_MEMORY_BYTES). All files are looked up below a
given root, so that tests can lay out a tree.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.control.history import Knobs
from headrace.machine.host import byte_fields, cpu_quota, memory_usages
from headrace.plane.stage import KNOBS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MEMORY_VARIABLE: Final = "HEADRACE_MEMORY_BYTES"

SHARE_OF_LIMIT: Final = 0.25
"""Of the memory that a job may use, at most so much is for buffers: the rest is the training's."""

SHARE_OF_FREE: Final = 0.5  # of the memory that is free now, at most so much: others grow too
BUFFER_BYTES_MIN: Final = 1 << 20
BUFFER_BYTES_MAX: Final = 2 << 30
"""Without another limit: 2 GiB hide half a second of latency at 4 GB/s."""

READS_MAX: Final = 1024

UNLIMITED: Final = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest and largest value of one knob."""

    low: int
    high: int

    def clamped(self, value: int) -> int:
        """The nearest value within the bounds; 0, no such knob, stays."""
        return max(self.low, min(self.high, value)) if value else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of every knob of one plane."""

    reads_in_flight: Bounds = Bounds(1, READS_MAX)
    buffer_bytes: Bounds = Bounds(BUFFER_BYTES_MIN, BUFFER_BYTES_MAX)
    decode_threads: Bounds = Bounds(1, 8)
    origins: Mapping[str, str] = field(default_factory=dict)
    """By knob: where its upper bound comes from, in words."""

    def clamped(self, knobs: Knobs) -> Knobs:
        """The nearest knobs within the limits."""
        return Knobs(*(getattr(self, name).clamped(getattr(knobs, name)) for name in KNOBS))

    def frozen(self, knobs: Knobs, names: Iterable[str]) -> Limits:
        """These limits with some knobs held where they stand: somebody set them on purpose."""
        held = {name: Bounds(getattr(knobs, name), getattr(knobs, name)) for name in names}
        origins = dict.fromkeys(held, "set explicitly")
        return replace(self, **held, origins={**self.origins, **origins})

    def shared(self, planes: int) -> Limits:
        """One plane's part when several share the process's memory."""
        if planes <= 1:
            return self
        high = max(self.buffer_bytes.low, self.buffer_bytes.high // planes)
        origin = f"{self.origins.get('buffer_bytes', '')}, shared by {planes} planes"
        return replace(
            self,
            buffer_bytes=Bounds(self.buffer_bytes.low, high),
            origins={**self.origins, "buffer_bytes": origin},
        )


def read_limits(
    root: str | os.PathLike[str] = "/",
    *,
    memory_bytes: int | None = None,
    held_bytes: int = 0,
    environment: Mapping[str, str] | None = None,
    rlimits: Mapping[int, int] | None = None,
    cpus: int | None = None,
) -> Limits:
    """Find the limits of this process as they are now.

    `memory_bytes` is the operator's word on how much all buffers may take together. What our buffers hold
    (`held_bytes`) is not free, and would be if they shrank. For tests: `root`, where `proc` and `sys` lie;
    the environment; soft rlimits by number, and CPUs, which the kernel is asked for by default.

    Raises ValueError if `memory_bytes` or HEADRACE_MEMORY_BYTES is not a positive number.
    """
    tree = Path(root)
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE)
    asked = {kind: resource.getrlimit(kind)[0] for kind in kinds} if rlimits is None else rlimits
    policy = memory_policy(memory_bytes, environment)
    memory, memory_origin = _memory(tree, policy, held_bytes, asked)
    reads, reads_origin = _reads(tree, asked)
    usable = cpus if cpus is not None else len(os.sched_getaffinity(0))
    threads, threads_origin = usable, f"{usable} CPUs usable"
    quota = cpu_quota(tree)
    if quota is not None and quota < usable:
        threads, threads_origin = round(quota), f"cgroup: {quota:g} CPUs"
    return Limits(
        reads_in_flight=Bounds(1, reads),
        buffer_bytes=Bounds(min(BUFFER_BYTES_MIN, memory), memory),
        decode_threads=Bounds(1, max(1, threads)),
        origins={
            "buffer_bytes": memory_origin,
            "reads_in_flight": reads_origin,
            "decode_threads": threads_origin,
        },
    )


def _memory(
    tree: Path, policy: tuple[int, str] | None, held: int, limits: Mapping[int, int]
) -> tuple[int, str]:
    """The budget of all buffers, and where it comes from: the least of all that is said."""
    bounds = [policy or (BUFFER_BYTES_MAX, "default")]
    for usage in memory_usages(tree):
        free = max(0, usage.limit - usage.used + held)
        bounds.append((int(SHARE_OF_FREE * free), f"{usage.name}: {free >> 20} MiB free"))
        if policy is None:
            bounds.append((int(SHARE_OF_LIMIT * usage.limit), f"{usage.name}: a quarter of it"))
    status = byte_fields(tree / "proc/self/status")
    for kind, name, used in (
        (resource.RLIMIT_AS, "RLIMIT_AS", "VmSize"),
        (resource.RLIMIT_DATA, "RLIMIT_DATA", "VmData"),
    ):
        limit = limits.get(kind, UNLIMITED)
        if limit != UNLIMITED:
            free = max(0, limit - status.get(used, 0) + held)
            bounds.append((int(SHARE_OF_FREE * free), f"{name}: {free >> 20} MiB free"))
    available = byte_fields(tree / "proc/meminfo").get("MemAvailable")
    if available is not None:
        free = available + held
        bounds.append((int(SHARE_OF_FREE * free), f"the machine: {free >> 20} MiB available"))
    least, origin = min(bounds)
    return max(1, least), origin


def memory_policy(
    given: int | None = None, environment: Mapping[str, str] | None = None
) -> tuple[int, str] | None:
    """The operator's word on memory, in bytes, and where it stands; None if nothing was said.

    Raises ValueError if it is not a positive number.
    """
    if given is not None:
        if given < 1:
            raise ValueError(f"memory_bytes is {given}, expected at least 1")
        return given, "memory_bytes="
    text = (os.environ if environment is None else environment).get(MEMORY_VARIABLE)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{MEMORY_VARIABLE} is {text!r}, expected a positive number of bytes")
    return int(text), MEMORY_VARIABLE


def _reads(tree: Path, limits: Mapping[int, int]) -> tuple[int, str]:
    """A read of a folder's file keeps a descriptor; half of what is left is the program's own."""
    descriptors = limits.get(resource.RLIMIT_NOFILE, UNLIMITED)
    if descriptors == UNLIMITED:
        return READS_MAX, "default"
    try:
        used = len(os.listdir(tree / "proc/self/fd"))  # noqa: PTH208 - names are not needed
    except OSError:
        used = 0
    reads = max(1, (descriptors - used) // 2)
    if reads >= READS_MAX:
        return READS_MAX, "default"
    return reads, f"RLIMIT_NOFILE: {descriptors - used} of {descriptors} descriptors left"
