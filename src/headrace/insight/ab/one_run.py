"""One run: starts a command once, measures it, and leaves nothing of it behind. A process of its own.

    python -m headrace.insight.ab.one_run TASK.json

It is the parent of all that the command starts, also of what outlives its own parent, so that CPU time, bytes
read and processes left behind are of this run and of nothing else. When whoever compares is gone, or says
SIGTERM, it ends them and itself; who is gone cannot remove the comparison's folder, so it does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.base.documents import DocumentKind
from headrace.cluster import processes
from headrace.errors import ProgramError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from headrace.posix.launch import RunReport

_LOOK_S: Final = 0.1
HANDED_OVER: Final = DocumentKind(
    name="what a comparison's processes hand over",
    version=1,
    error=ProgramError,
    next_step="Look whether the disk is full or damaged.",
)
_GRACE_S: Final = 2.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be run, and how."""

    command: list[str]
    served: bool  # by headrace, as `headrace run` does it; else as it is
    log_fd: int  # of the log of its opens, inherited
    roots: list[str]
    order: str | None  # a file that lists the order of the opens; None: headrace learns it
    simulate: str | None  # a slow storage that the roots lie on
    environment: dict[str, str]  # added to the program's
    result: str  # where the measurements go


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a run was like."""

    wall_s: float
    """From the start to the program's end; of a served one also what headrace does before and after."""
    ended_ns: int
    cpu_s: float  # of all its processes, headrace's among them
    peak_bytes: int  # memory of its processes that lies in no file, added up, at its most; sampled
    storage_bytes: int | None
    """Read from block devices and network file systems that count it; None: not told."""
    status: int  # the program's exit status; 128 and the signal where that ended it
    signal: int  # that signal; 0: none
    left: list[str] = field(default_factory=list)
    """Names of processes that it left behind; they were ended."""
    unseen: list[str] = field(default_factory=list)  # why something of it could not be seen
    notes: list[str] = field(default_factory=list)
    opens: dict[str, int] = field(default_factory=dict)  # what it served, by kind


def main(task_file: str) -> None:
    """Run the task of a file; writes its result."""
    task = Task(**HANDED_OVER.decode(Path(task_file).read_bytes(), task_file).plain())
    parent, folder = os.getppid(), Path(task_file).parent

    def clean_up() -> None:
        if os.getppid() != parent and folder.name.startswith("headrace-ab-"):
            shutil.rmtree(folder, ignore_errors=True)

    def give_up(number: int, _frame: FrameType | None) -> None:
        processes.end_descendants(_GRACE_S)
        clean_up()
        os._exit(128 + number)

    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, give_up)
    processes.die_with_parent(signal.SIGTERM)
    # Keys that are pressed are for whoever compares. A handler: what is ignored would be for the program too.
    signal.signal(signal.SIGINT, lambda *_: None)
    Path(task.result).write_bytes(HANDED_OVER.encode(asdict(_measure(task))))
    clean_up()  # a launched program gets SIGTERM itself


def _measure(task: Task) -> Ran:
    # A storage is simulated by the shim, on both sides.
    launched = task.served or task.simulate is not None
    if not launched:  # what this process imports is no part of the program's time
        import headrace.posix.launch
        import headrace.posix.opens  # noqa: F401
    read_before = _storage_bytes()
    began_ns = time.monotonic_ns()
    with _memory_peak() as peak:
        report = _launched(task) if launched else _plain(task)
        ended_ns = time.monotonic_ns()
    processes.reap()
    left = [_name_of(pid) for pid in processes.descendants()]
    processes.end_descendants(_GRACE_S)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    read_after = _storage_bytes()
    known = read_before is not None and read_after is not None
    return Ran(
        wall_s=(ended_ns - began_ns) / 1e9, ended_ns=ended_ns,
        cpu_s=used.ru_utime + used.ru_stime, peak_bytes=peak[0] or used.ru_maxrss << 10,
        storage_bytes=(read_after or 0) - (read_before or 0) if known else None,
        status=report.ended.status, signal=report.ended.signal, left=left, unseen=report.unseen,
        notes=report.notes, opens=dict(report.opens),
    )  # fmt: skip


def _plain(task: Task) -> RunReport:
    from headrace.posix.launch import ProgramEnd, RunReport
    from headrace.posix.opens import OpenLog

    environment = OpenLog.adopt(task.log_fd).environment(dict(os.environ) | task.environment)
    status = subprocess.run(task.command, env=environment, check=False).returncode  # noqa: S603 - the user's own
    ended = ProgramEnd(status) if status >= 0 else ProgramEnd(128 - status, -status)
    return RunReport(task.command, task.roots, ended)


def _launched(task: Task) -> RunReport:
    from headrace.posix.launch import ProgramOptions, launch
    from headrace.posix.opens import OpenLog

    os.environ.update(task.environment)
    options = ProgramOptions(
        roots=task.roots, order=task.order, simulate=task.simulate, plane=task.served,
        log=OpenLog.adopt(task.log_fd),
    )  # fmt: skip
    return launch(task.command, options)


# -- what it uses ------------------------------------------------------------------------------------


def _storage_bytes() -> int | None:
    """Read from storage by this process and all that it has waited for."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(counts["read_bytes"])


def _below(pid: int) -> Iterator[int]:
    """Processes that came of one: cheaper than to look at all that there are."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                yield child
                yield from _below(child)


def _private_bytes(pid: int) -> int:
    """Memory of a process that lies in no file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(words[1]) - int(words[2])) * _PAGE
    return 0


@contextlib.contextmanager
def _memory_peak() -> Iterator[list[int]]:
    """What the processes below have in memory together at most, ten times a second: one number."""
    peak, over = [0], threading.Event()

    def look() -> None:
        # Signals are the main thread's.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not over.wait(_LOOK_S):
            peak[0] = max(peak[0], sum(map(_private_bytes, _below(os.getpid()))))

    thread = threading.Thread(target=look, name="headrace-ab", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="backslashreplace").strip()
    return "?"


if __name__ == "__main__":
    main(sys.argv[1])
    sys.exit(0)
