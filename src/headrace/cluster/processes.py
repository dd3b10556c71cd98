"""Processes: ours and nobody else's. Found as descendants or by a mark; ended by descriptor.

A process that is a *child subreaper* stays the ancestor of all that was started below it, whoever dies in
between and however they detach. So its descendants are exactly what it started, and ending them ends nothing
else (never by name, never all of a user's).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.machine.host import process_stat, start_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
"""A process that a SIGKILL has not ended after this long is stuck in the kernel: nobody can end it."""

_POLL_S = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """From now on, descendants whose parents die become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """The kernel sends this signal to this process when its parent dies, exec or not."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def descendants(
    root: int | None = None, except_for: Iterable[int] | Callable[[int], bool] = ()
) -> dict[int, int]:
    """All living processes below `root` (this one by default) and their start times, nearest first.

    Args:
        root: a process id.
        except_for: processes to leave out, with all that is below them; or which these are.
    """
    below: dict[int, list[tuple[int, int]]] = {}
    for pid in _all():
        status = process_stat(pid)
        if status is not None and status[0] not in "ZX":
            below.setdefault(status[1], []).append((pid, status[2]))
    left_out = except_for if callable(except_for) else set(except_for).__contains__
    out: dict[int, int] = {}
    parents = [os.getpid() if root is None else root]
    while parents:
        next_ones = [(p, s) for parent in parents for p, s in below.get(parent, ())]
        next_ones = [(p, s) for p, s in next_ones if p not in out and not left_out(p)]
        out.update(next_ones)
        parents = [pid for pid, _ in next_ones]
    return out


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        if match := re.search(r"^SigCgt:\s*(\w+)", text, re.MULTILINE):
            return bool(int(match[1], 16) >> (number - 1) & 1)
    return False


def send(pid: int, started: int, number: int) -> bool:
    """Signals the one process that has this id and began then; whether it was there."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Held by the descriptor, its number cannot become another's while we look.
        if start_time(pid) != started:
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def reap() -> dict[int, int]:
    """Takes the status of all children that have ended: by process id, as `waitpid` gives it."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            ended[end[0]] = end[1]
    return ended


def end_descendants(
    grace_s: float,
    except_for: Iterable[int] | Callable[[int], bool] = (),
    each: Callable[[dict[int, int]], object] = len,
) -> tuple[int, int]:
    """Ends all that is below this process, and waits for it; new ones that appear meanwhile too.

    Args:
        grace_s: between SIGTERM and SIGKILL.
        except_for: processes to spare, as `descendants` takes them.
        each: called again and again meanwhile, with what `reap` has taken.

    Returns:
        How many were ended, and how many cannot be.
    """
    return _end(lambda: descendants(except_for=except_for), grace_s, each)


def marked(mark: str) -> dict[int, int]:
    """Living processes of this user that inherited `mark` ("NAME=value") in their environment."""
    processes = {}
    for pid in _all():
        with contextlib.suppress(OSError):
            process = Path(f"/proc/{pid}")
            if pid == os.getpid() or process.stat().st_uid != os.geteuid():
                continue
            inherited = (process / "environ").read_bytes().split(b"\0")
            if os.fsencode(mark) in inherited and (began := start_time(pid)) is not None:
                processes[pid] = began
    return processes


def end_marked(mark: str, grace_s: float) -> tuple[int, int]:
    """Ends the processes that a dead launch left: those with its mark, which only its own inherit."""
    return _end(lambda: marked(mark), grace_s)


def _end(
    look: Callable[[], dict[int, int]],
    grace_s: float,
    each: Callable[[dict[int, int]], object] = len,
) -> tuple[int, int]:
    asked: set[int] = set()
    until_s = time.monotonic() + grace_s
    while living := look():
        killing = time.monotonic() > until_s
        for pid, began in living.items():
            if killing:
                send(pid, began, signal.SIGKILL)
            elif pid not in asked:
                send(pid, began, signal.SIGTERM)
                send(pid, began, signal.SIGCONT)  # one that is stopped cannot end
        asked |= living.keys()
        if time.monotonic() > until_s + _KILL_S:
            return len(asked), len(living)
        each(reap())
        time.sleep(_POLL_S)
    each(reap())
    return len(asked), 0
