"""A daemon in the background: a process of its own, that writes a log, and is there when it answers."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.errors import HeadraceError
    from headrace.runtime.folder import RuntimeFolder

__all__ = ["launch", "tail", "wait_for_end"]

START_S = 20.0
_POLL_S = 0.02
_TAIL_BYTES = 64 << 10


def launch(
    folder: RuntimeFolder,
    arguments: Sequence[str],
    state: Callable[[], dict[str, Any] | None],
    error: type[HeadraceError],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start a daemon, and return its state when it serves.

    Args:
        folder: where it will rule.
        arguments: options of `headrace COMMAND start` for it.
        state: asks whoever serves there for its state, with its `pid`; None: nobody yet.
        error: is raised if the daemon does not come up; the message has the end of its log.
        environment: what it gets beside ours.
    """
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.path.mkdir(mode=0o700)
    folder.check()
    process = _spawn(folder, arguments, environment or {})
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = state()
        if found is not None and found["pid"] == process.pid:
            # So that it is no zombie when it ends, should this process live so long.
            threading.Thread(target=process.wait, daemon=True).start()
            return found
        if process.poll() is not None:
            break
        time.sleep(_POLL_S)
    else:
        process.kill()
        process.wait()
    raise error(
        f"the {folder.title} did not come up: {tail(folder, 5).strip() or 'it said nothing'}",
        path=str(folder.log),
        next_step=f"Run it in the foreground: headrace {folder.command} start --foreground.",
    )


def _spawn(
    folder: RuntimeFolder, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(folder.log, flags, 0o600)
    program = "from headrace.cli import main; main()"
    command = [sys.executable, "-c", program, folder.command, "start", "--foreground", *arguments]
    try:
        return subprocess.Popen(  # noqa: S603 - our own program
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            cwd="/", env={**os.environ, **environment},
        )  # fmt: skip
    finally:
        os.close(log)


def wait_for_end(pidfd: int, seconds: float) -> bool:
    """Whether a process ends in time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def tail(folder: RuntimeFolder, lines: int) -> str:
    """The end of the log of a daemon in the background; '' where there is none."""
    try:
        with folder.log.open("rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL_BYTES))
            text = f.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "".join(text.splitlines(keepends=True)[-lines:]) if lines > 0 else ""
