"""Tree: the processes below one, and signals for them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "KEEPER_MARK",
    "adopt_orphans",
    "descendants",
    "die_with_parent",
    "send",
    "started_at",
    "with_key",
]

KEEPER_MARK = "headrace.cluster.local.keeper"
"""In the command line of each keeper: a job that submits another is not the parent of that one's processes."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Be the parent of whatever the processes below this one leave behind."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the process that started this one ends, however it does."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """All that run below a process, without other jobs' keepers and what is below those."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            if _is_keeper(child):
                continue
            if _state(child) not in {"Z", "X", ""}:
                found.append(child)
            waiting.append(child)
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def started_at(pid: int) -> int | None:
    """When a process started, in ticks since boot: with its number, its name for all time. None: it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def with_key(variable: str, value: str) -> Iterator[int]:
    """Processes of this user that were started with a variable."""
    wanted = f"{variable}={value}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def _is_keeper(pid: int) -> bool:
    try:
        return KEEPER_MARK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""
