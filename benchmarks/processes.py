"""CPU time and memory of a process and everything it started, read from /proc.

Memory is the sum over the tree of the proportional set size, in two parts that mean different
things: `private` (anonymous and shared memory: what the job must pay for) and `mapped` (file pages
that happen to be mapped: page cache, reclaimable, there for any engine that maps its files).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_KB = 1024
_MB = 1e6

SAMPLE_INTERVAL_S = 0.05
SAMPLE_DUTY = 0.03
"""Most of one core that sampling may take: walking a hot 5 GB mapping takes tens of ms."""


def _stat_fields(pid: int) -> list[str]:
    # The command, in parentheses, may hold anything: count fields after the last one.
    text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return text[text.rindex(")") + 2 :].split()


def tree(root: int) -> list[int]:
    """`root` and all its living descendants."""
    parents: dict[int, int] = {}
    for entry in os.listdir(_PROC):  # noqa: PTH208 - names alone, ten times a second
        if entry.isdigit():
            try:
                parents[int(entry)] = int(_stat_fields(int(entry))[1])
            except OSError:
                continue
    found = [root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """Ends every process that was started within, daemons and orphans included; a decorator, too.

    SIGTERM and SIGHUP end the program as Ctrl-C does, so that its own `finally` come first. Whoever is left
    then gets SIGTERM, and SIGKILL after some seconds. Orphans count: they become children of this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def ended(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, ended)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _end_descendants()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_descendants() -> None:
    begun = time.monotonic()
    asked: set[int] = set()
    while left := set(tree(os.getpid())[1:]):
        late = time.monotonic() - begun > _END_S
        if time.monotonic() - begun > 4 * _END_S:
            print(f"these processes cannot be ended: {sorted(left)}", file=sys.stderr)
            return
        for pid in left if late else left - asked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= left
        time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def cpu_seconds_so_far() -> float:
    """CPU seconds of this process, its reaped children and its living descendants."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for pid in tree(os.getpid())[1:]:
        try:
            fields = _stat_fields(pid)
        except OSError:
            continue
        # utime, stime and, for grandchildren that are gone already, cutime and cstime
        total += sum(int(field) for field in fields[11:15]) / _TICKS
    return total


def cpu_seconds_of(pid: int) -> float:
    """CPU seconds of one living process."""
    return sum(map(int, _stat_fields(pid)[11:13])) / _TICKS


def machine_cpu_seconds() -> float:
    """CPU seconds that the whole machine was busy since it booted: shows a noisy neighbour."""
    with (_PROC / "stat").open() as stat:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = stat.readline().split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / _TICKS


@dataclass(frozen=True, slots=True)
class Memory:
    """A tree's memory at one moment, or the peak of each part."""

    private_mb: float = 0.0
    mapped_mb: float = 0.0

    def peak(self, other: Memory) -> Memory:
        """The larger of each part."""
        return Memory(max(self.private_mb, other.private_mb), max(self.mapped_mb, other.mapped_mb))


def memory_of(pids: list[int]) -> Memory:
    """The sum over `pids`; processes that are gone count nothing."""
    private = mapped = 0
    for pid in pids:
        try:
            text = (_PROC / str(pid) / "smaps_rollup").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            key, _, rest = line.partition(":")
            if key in ("Pss_Anon", "Pss_Shmem"):
                private += int(rest.split()[0])
            elif key == "Pss_File":
                mapped += int(rest.split()[0])
    return Memory(private * _KB / _MB, mapped * _KB / _MB)


class MemorySampler:
    """A thread that samples a process tree until `stop`, and keeps the peak."""

    def __init__(self, root: int) -> None:
        self.peak = Memory()
        self.taken = 0
        self._root = root
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def _take(self) -> float:
        started = time.monotonic()
        self.peak = self.peak.peak(memory_of(tree(self._root)))
        self.taken += 1
        return time.monotonic() - started

    def _run(self) -> None:
        pause_s = 0.0
        while not self._end.wait(pause_s):
            pause_s = max(SAMPLE_INTERVAL_S, self._take() / SAMPLE_DUTY)

    def stop(self) -> Memory:
        """Takes a last sample, so that the shortest run has one, and returns the peak."""
        self._end.set()
        self._thread.join()
        self._take()
        return self.peak
