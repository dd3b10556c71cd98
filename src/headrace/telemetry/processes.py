"""Processes: the jobs of this node, as their processes and control groups show them, and what these use.

A process is looked at once, when it is new: its control group, its environment. After that only what it uses
is read, and only of processes that belong to jobs. What cannot be read (another user's environment, a process
that is gone in the middle) says nothing.

A process belongs to a job by its control group or, failing that, by its environment. Slurm makes a group for
each job, `.../job_17/step_0/...`: below `slurm/uid_1000/` with version 1, below
`system.slice/slurmstepd.scope/` (or `NODE_slurmstepd.scope`) with version 2. A group's word is the kernel's
and counts for more than an environment, which a process may write itself. A group's figures are one read for
a whole job, and count processes that came and went between two readings.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.base.job import JobIdentity, identity_of
from headrace.machine.host import fields_of, lines_of, number, number_in, pressure_of, read_text
from headrace.machine.sensors import grown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_JOB: Final = re.compile(r"(?:^|/)job_([0-9]{1,18})(?:/|$)")
_SLURM: Final = re.compile(r"(?:^|/)(?:slurm(?:_[^/]*)?|[^/]*slurmstepd\.scope)(?:/|$)")


def job_of_group(path: str) -> str:
    """The Slurm job of a control group's path; '' if it is of none."""
    # A user may name a group `job_1`, but not one below Slurm's own.
    slurm = _SLURM.search(path)
    if slurm is None:
        return ""
    job = _JOB.search(path, slurm.end() - 1)
    return job[1] if job else ""


def job_of_groups(text: str) -> str:
    """The Slurm job of a process, from its `/proc/PID/cgroup`: `4:memory:/slurm/uid_0/job_17/step_0`."""
    groups = (line.split(":", 2)[-1] for line in text.splitlines() if line.count(":") > 1)
    return next(filter(None, map(job_of_group, groups)), "")


def environment_of(block: str) -> Mapping[str, str]:
    """What `/proc/PID/environ` holds; entries without `=` are left out, of several the first counts."""
    environment: dict[str, str] = {}
    for entry in block.split("\0"):
        name, equals, value = entry.partition("=")
        if equals and name:
            environment.setdefault(name, value)
    return environment


JOBS_MAX: Final = 1024


@dataclass(slots=True)
class GroupUse:
    """What a job's group counted; None where it does not say."""

    cpu_s: float | None = None
    memory_bytes: float | None = None
    """Without page cache, which the kernel takes back before it kills."""
    io_pressure_s: float | None = None  # time in which at least one of its tasks waited for I/O


def job_groups(root: Path) -> dict[str, GroupUse]:
    """What the groups of all jobs say now, by job. {} without Slurm, or where it has no cgroup plugins."""
    uses: dict[str, GroupUse] = {}
    mount = root / "sys/fs/cgroup"
    second, first = "system.slice/*slurmstepd.scope/job_*", "slurm*/uid_*/job_*"
    patterns = [second, f"unified/{second}"]
    patterns += [f"{controller}/{first}" for controller in ("cpuacct", "cpu,cpuacct", "memory")]
    for folder in (folder for pattern in patterns for folder in mount.glob(pattern)):
        job = job_of_group(str(folder.relative_to(root)))
        if job and (job in uses or len(uses) < JOBS_MAX):
            _add_group(uses.setdefault(job, GroupUse()), folder)
    return uses


def _add_group(use: GroupUse, folder: Path) -> None:
    fields = fields_of(folder / "cpu.stat")
    if "usage_usec" in fields:
        use.cpu_s = fields["usage_usec"] / 1e6
    if (usage := number_in(folder / "cpuacct.usage")) is not None:
        use.cpu_s = usage / 1e9
    caches = {"memory.current": "inactive_file", "memory.usage_in_bytes": "total_inactive_file"}
    for name, cache in caches.items():
        if (memory := number_in(folder / name)) is not None:
            cached = fields_of(folder / "memory.stat").get(cache, 0.0)
            use.memory_bytes = max(0.0, memory - cached)
    if (pressure := pressure_of(folder / "io.pressure").get("some")) is not None:
        use.io_pressure_s = pressure


NODES_MAX: Final = 16
PROCESSES_MAX: Final = 4096  # Of jobs. More are counted by nobody
_ENVIRONMENT_BYTES_MAX: Final = 1 << 18
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Use:
    """What processes used since the last look, and hold now."""

    cpu_s: float = 0.0
    read_bytes: float = 0.0  # that came from storage, network file systems included
    written_bytes: float = 0.0
    memory_bytes: float = 0.0  # Resident now. What processes share is counted for each


@dataclass(slots=True)
class JobProcesses:
    """A job's processes on this node."""

    identity: JobIdentity
    uid: int
    began_s: float  # when the oldest of them began, in Unix seconds
    pids: set[int] = field(default_factory=set)
    use: Use = field(default_factory=Use)


@dataclass(slots=True)
class _Known:
    """A process that was looked at, and what it had used then (CPU s, bytes read and written)."""

    began_ticks: int
    job: str = ""
    identity: JobIdentity | None = None
    uid: int = 0
    used: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Processes:
    """Looks at all processes of this node; or only for the job `only`.

    Where one machine is several nodes, those of others than `node` are left out. `proc` lies in `root`.
    """

    def __init__(self, root: Path, only: str = "", node: str = "") -> None:
        self._proc = root / "proc"
        self._only = only
        self._node = node
        # Of others' processes neither environment nor use can be read: whose job it is, is for root to see.
        self._uid = os.geteuid()
        self._known: dict[int, _Known] = {}
        self.elsewhere: dict[str, None] = {}
        """Other nodes' names, by which processes of this machine that were left out call theirs."""
        lines = (line.partition(" ") for line in lines_of(self._proc / "stat"))
        boot_s = next((number(value) for name, _, value in lines if name == "btime"), None)
        self._boot_s = boot_s or time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def job_of(self, pid: int) -> str:
        """The job of a process that was seen at the last look; ''."""
        return self._known[pid].job if pid in self._known else ""

    def look(self) -> dict[str, JobProcesses]:
        """The jobs that have processes here now, by their ids."""
        try:
            pids = [int(name) for name in os.listdir(self._proc) if name.isdigit()]  # noqa: PTH208
        except OSError:
            pids = []
        self._known = {pid: self._known[pid] for pid in pids if pid in self._known}
        jobs: dict[str, JobProcesses] = {}
        counted = 0
        for pid in pids:
            known = self._known.get(pid) or self._meet(pid)
            self._known[pid] = known
            if known.job and counted < PROCESSES_MAX:
                counted += 1
                self._use(pid, known, jobs)
        return jobs

    def _meet(self, pid: int) -> _Known:
        stat = _stat(self._read(pid, "stat"))
        known = _Known(began_ticks=stat[2] if stat else 0)
        try:
            known.uid = (self._proc / str(pid)).stat().st_uid
        except OSError:
            return known
        if self._uid not in (0, known.uid):
            return known
        job = job_of_groups(self._read(pid, "cgroup"))
        environment = environment_of(self._read(pid, "environ", _ENVIRONMENT_BYTES_MAX))
        identity = identity_of(environment)
        if job and (identity is None or identity.job_id != job):
            # Steps of the scheduler itself, or somebody else's process: only its group says whose it is.
            identity = JobIdentity(job_id=job)
        if identity is None:
            return known
        if self._node and identity.node not in ("", self._node):
            if len(self.elsewhere) < NODES_MAX:
                self.elsewhere[identity.node] = None
        elif self._only in ("", identity.job_id, identity.alias):
            known.job, known.identity = identity.job_id, identity
        return known

    def _use(self, pid: int, known: _Known, jobs: dict[str, JobProcesses]) -> None:
        stat = _stat(self._read(pid, "stat"))
        if stat is None:
            return
        cpu_s, memory_bytes, began_ticks = stat
        if began_ticks != known.began_ticks:  # another process under the same number
            self._known.pop(pid)
            return
        assert known.identity is not None
        began_s = self._boot_s + began_ticks / _TICKS_PER_S
        if (job := jobs.get(known.job)) is None:
            job = jobs[known.job] = JobProcesses(known.identity, known.uid, began_s)
        job.identity = fuller(job.identity, known.identity)
        job.uid = max(job.uid, known.uid)  # a step's root process speaks for its user
        job.began_s = min(job.began_s, began_s)
        job.pids.add(pid)
        lines = (line.partition(":") for line in self._read(pid, "io").splitlines())
        counts = {name: number(value) or 0.0 for name, _, value in lines}
        # What others' processes read and write is not ours to know. A new process's whole use is new.
        used = (cpu_s, counts.get("read_bytes", 0.0), counts.get("write_bytes", 0.0))
        use, (cpu_new, read_new, written_new) = job.use, map(grown, known.used, used)
        use.cpu_s += cpu_new
        use.read_bytes += read_new
        use.written_bytes += written_new
        use.memory_bytes += memory_bytes
        known.used = used

    def _read(self, pid: int, name: str, most: int = 1 << 14) -> str:
        return read_text(self._proc / str(pid) / name, most)


def fuller(one: JobIdentity, other: JobIdentity) -> JobIdentity:
    """The identity that says more: a batch script may know less than a step, or more."""
    # A step may have fewer CPUs than its job.
    return max(
        one, other,
        key=lambda e: (bool(e.user), e.gpus, e.cpus, e.memory_bytes, bool(e.name)),
    )  # fmt: skip


def _stat(text: str) -> tuple[float, float, int] | None:
    """CPU seconds, resident bytes and start (in ticks since boot) of `/proc/PID/stat`."""
    # A program's name may hold spaces and parentheses: it ends at the last one.
    words = text.rpartition(")")[2].split()
    if len(words) < 22:
        return None
    try:
        cpu_s = (int(words[11]) + int(words[12])) / _TICKS_PER_S
        return cpu_s, max(0, int(words[21])) * float(_PAGE_BYTES), int(words[19])
    except ValueError:
        return None
