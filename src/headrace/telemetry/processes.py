"""Processes: the jobs of this node as their processes show them, and what these use.

A process is looked at once, when it is new: its control group, its environment. After that only what it
uses is read, and only of processes that belong to jobs. What cannot be read (another user's environment,
a process that is gone in the middle) says nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.base.job import JobIdentity, identity_of
from headrace.machine.sensors import grown
from headrace.telemetry.attribution import environment_of, job_of_groups

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["JobProcesses", "Processes", "Use"]

PROCESSES_MAX: Final = 4096
"""Of jobs. More are counted by nobody."""

_ENVIRONMENT_BYTES_MAX: Final = 1 << 18
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Use:
    """What processes used since the last look, and hold now."""

    cpu_s: float = 0.0
    read_bytes: float = 0.0
    """That came from storage, network file systems included."""
    written_bytes: float = 0.0
    memory_bytes: float = 0.0
    """Resident now. What processes share is counted for each."""


@dataclass(slots=True)
class JobProcesses:
    """A job's processes on this node."""

    identity: JobIdentity
    uid: int
    began_s: float
    """When the oldest of them began, in Unix seconds."""
    pids: set[int] = field(default_factory=set)
    use: Use = field(default_factory=Use)


@dataclass(slots=True)
class _Known:
    """A process that was looked at."""

    began_ticks: int
    job: str = ""
    identity: JobIdentity | None = None
    uid: int = 0
    cpu_s: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None


class Processes:
    """Looks at all processes of this node.

    Args:
        root: where `proc` is.
        only: the one job to look for; '': all.
        node: what the scheduler calls this node. Where one machine is several nodes, those of others
            are left out.
    """

    def __init__(self, root: Path, only: str = "", node: str = "") -> None:
        self._proc = root / "proc"
        self._only = only
        self._node = node
        # Of others' processes neither environment nor use can be read: whose job it is, is for root to see.
        self._uid = os.geteuid()
        self._known: dict[int, _Known] = {}
        self._boot_s = _boot_time(self._proc)
        self.unreadable = 0
        """Processes of jobs whose environment belongs to somebody else."""

    def job_of(self, pid: int) -> str:
        """The job of a process that was seen at the last look; ''."""
        known = self._known.get(pid)
        return known.job if known is not None else ""

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
            known = self._known.get(pid)
            if known is None:
                known = self._known[pid] = self._meet(pid)
            if known.job and counted < PROCESSES_MAX:
                counted += 1
                self._use(pid, known, jobs)
        return jobs

    def _meet(self, pid: int) -> _Known:
        """Look at a process that is new."""
        stat = _stat(self._read(pid, "stat"))
        known = _Known(began_ticks=stat[2] if stat else 0)
        try:
            known.uid = (self._proc / str(pid)).stat().st_uid
        except OSError:
            return known
        if self._uid not in (0, known.uid):
            return known
        job = job_of_groups(self._read(pid, "cgroup").decode(errors="replace"))
        environment = environment_of(self._read(pid, "environ", _ENVIRONMENT_BYTES_MAX))
        told = identity_of(environment)
        if job and (told is None or told.job_id != job):
            # Steps of the scheduler itself, or somebody else's process: only its group tells.
            told = JobIdentity(job_id=job)
            self.unreadable += not environment
        elsewhere = told is not None and told.node not in ("", self._node) and self._node
        if told is not None and not elsewhere and self._only in ("", told.job_id, told.alias):
            known.job, known.identity = told.job_id, told
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
        job = jobs.get(known.job)
        if job is None:
            job = jobs[known.job] = JobProcesses(known.identity, known.uid, began_s)
        job.identity = _fuller(job.identity, known.identity)
        job.uid = max(job.uid, known.uid)  # a step's root process speaks for its user
        job.began_s = min(job.began_s, began_s)
        job.pids.add(pid)
        read_bytes, written_bytes = _io(self._read(pid, "io"))
        use = job.use
        use.memory_bytes += memory_bytes
        use.cpu_s += _since(known.cpu_s, cpu_s)
        use.read_bytes += _since(known.read_bytes, read_bytes)
        use.written_bytes += _since(known.written_bytes, written_bytes)
        known.cpu_s, known.read_bytes, known.written_bytes = cpu_s, read_bytes, written_bytes

    def _read(self, pid: int, name: str, most: int = 1 << 14) -> bytes:
        try:
            fd = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(fd, most)
        except OSError:
            return b""
        finally:
            os.close(fd)


def _since(before: float | None, now: float | None) -> float:
    """What a process used; a new one's whole use is new."""
    if now is None:
        return 0.0
    return grown(before or 0.0, now)


def _fuller(one: JobIdentity, other: JobIdentity) -> JobIdentity:
    """The identity that says more: a batch script may know less than a step, or more."""
    return max(one, other, key=lambda each: (bool(each.user), each.gpus, bool(each.name)))


def _stat(block: bytes) -> tuple[float, float, int] | None:
    """CPU seconds, resident bytes and start (in ticks since boot) of `/proc/PID/stat`."""
    # A program's name may hold spaces and parentheses: it ends at the last one.
    words = block.rpartition(b")")[2].split()
    if len(words) < 22:
        return None
    try:
        cpu_s = (int(words[11]) + int(words[12])) / _TICKS_PER_S
        return cpu_s, max(0, int(words[21])) * float(_PAGE_BYTES), int(words[19])
    except ValueError:
        return None


def _io(block: bytes) -> tuple[float | None, float | None]:
    """Bytes read from and written to storage, of `/proc/PID/io`; None where that is not ours to know."""
    found: dict[bytes, float] = {}
    for line in block.splitlines():
        name, _, value = line.partition(b":")
        value = value.strip()
        if value.isdigit() and len(value) <= 20:
            found[name] = float(int(value))
    return found.get(b"read_bytes"), found.get(b"write_bytes")


def _boot_time(proc: Path) -> float:
    """When the node was started, in Unix seconds."""
    try:
        with (proc / "stat").open("rb") as file:
            for line in file:
                if line.startswith(b"btime "):
                    return float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
