"""Daemons of this user: their folders, which of two may rule, and how they run in the background.

    FOLDER/          0700, ours, no symbolic link
      socket         the daemon listens here
      lock           held (flock) by the daemon that rules; its process id is inside
      node.log       of a daemon in the background; control.log, of a controller

The node daemon has one folder, the controller another beside it, and each telemetry agent one.

A kill leaves socket and lock file behind, but no lock: the next daemon takes both over. Whoever
connects checks the folder first, so that no other user can pose as the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.files import closing, lock_path, locked_by
from headrace.errors import ControlError, NodeError, TelemetryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.errors import HeadraceError

__all__ = [
    "SITE_SOCKET",
    "Claim",
    "RuntimeFolder",
    "agent_folder",
    "agent_sockets",
    "checked",
    "control_folder",
    "end",
    "end_signals",
    "launch",
    "runtime_folder",
    "tail",
    "wait_for_end",
]

FOLDER_VARIABLE = "HEADRACE_RUNTIME_DIR"
SOCKET_PATH_BYTES_MAX = 107
"""What the kernel takes as the path of a UNIX socket."""

_ATTEMPTS = 20


def runtime_folder(environment: Mapping[str, str] | None = None) -> RuntimeFolder:
    """The folder of this user's daemon: HEADRACE_RUNTIME_DIR, XDG_RUNTIME_DIR or /tmp/headrace-UID."""
    environment = os.environ if environment is None else environment
    given = environment.get(FOLDER_VARIABLE)
    if given:
        return RuntimeFolder(Path(given))
    session = environment.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        return RuntimeFolder(Path(session) / "headrace")
    return RuntimeFolder(Path(f"/tmp/headrace-{os.geteuid()}"))  # noqa: S108 - checked before use


def control_folder() -> RuntimeFolder:
    """The folder of this user's controller: that of the node daemon with `-control` at its end."""
    node = runtime_folder().path
    return RuntimeFolder(node.with_name(f"{node.name}-control"), "control")


_DAEMONS: Final[dict[str, tuple[str, type[HeadraceError]]]] = {
    "node": ("node daemon", NodeError),
    "control": ("controller", ControlError),
    "agent": ("telemetry agent", TelemetryError),
}


class RuntimeFolder:
    """The folder and the files in it.

    Args:
        path: made when a daemon claims it.
        command: what starts and stops the daemon: `headrace COMMAND start`.

    Attributes:
        title: what the daemon is called.
        error: what is raised about it.
    """

    def __init__(self, path: Path, command: str = "node") -> None:
        self.path = path.absolute()
        self.command = command
        self.title, self.error = _DAEMONS[command]

    @property
    def socket(self) -> Path:
        """Where the daemon listens."""
        return self.path / "socket"

    @property
    def lock(self) -> Path:
        """What the daemon that rules holds."""
        return self.path / "lock"

    @property
    def log(self) -> Path:
        """What a daemon in the background writes."""
        return self.path / f"{self.command}.log"

    def check(self) -> None:
        """See that nobody else can put anything here.

        Raises:
            FileNotFoundError: there is no such folder.
            HeadraceError: it belongs to somebody else, others may enter it, or it is no folder.
        """
        status = self.path.lstat()
        if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
            raise self._unsafe("a symbolic link or a file", "a folder")
        if status.st_uid != os.geteuid():
            raise self._unsafe(f"of user {status.st_uid}", f"of user {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise self._unsafe(
                f"of mode {stat.S_IMODE(status.st_mode):04o}",
                "mode 0700",
                closing(self.path, status),
            )
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES_MAX:
            raise self.error(
                f"{self.socket}: the path of the socket has {len(os.fsencode(self.socket))} bytes, "
                f"the system takes {SOCKET_PATH_BYTES_MAX}.",
                path=str(self.socket),
                next_step=f"Name a folder with a shorter path in {FOLDER_VARIABLE}.",
            )

    def _unsafe(self, actual: str, expected: str, mend: str | None = None) -> HeadraceError:
        return self.error(
            f"{self.path}: the runtime folder is {actual}, expected {expected}.",
            path=str(self.path),
            next_step=f"{mend or 'Remove it'}, or name another folder in {FOLDER_VARIABLE}.",
        )

    def claim(self) -> Claim:
        """Become the one daemon of this folder.

        Raises:
            HeadraceError: another daemon rules, or the folder is not safe.
            OSError: the folder cannot be made.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            try:
                self.check()
                return self._try_claim()
            except FileNotFoundError:  # a daemon that ends removes the folder
                continue
            except OSError:
                with contextlib.suppress(OSError):
                    self.path.rmdir()  # if nothing is in it
                raise
        raise self.error(f"{self.path}: the runtime folder cannot be claimed.", path=str(self.path))

    def holder(self) -> tuple[int, int] | None:
        """The daemon that rules, without asking it: process id and a descriptor of the process.

        None if there is none: the process that the lock file names must have that very file open.
        """
        try:
            pid = int(locked_by(self.lock))
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return None
        with contextlib.suppress(OSError):
            lock = self.lock.stat()
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(fd.stat(), lock):
                        return pid, pidfd
        os.close(pidfd)
        return None

    def _try_claim(self) -> Claim:
        try:
            fd = lock_path(self.lock, sign=True)
        except FileNotFoundError:
            raise
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                self.lock.unlink(missing_ok=True)
            raise
        if fd is None:
            raise self.taken(locked_by(self.lock))
        return Claim(self, fd)

    def taken(self, pid: int | str) -> HeadraceError:
        """The error that another daemon rules here."""
        return self.error(
            f"{self.path}: a {self.title} runs already, process {pid}.",
            path=str(self.path),
            next_step=f"Use it, or stop it first: headrace {self.command} stop.",
        )


class Claim:
    """The right to be the daemon of a folder, until `release` or the process's end."""

    def __init__(self, folder: RuntimeFolder, fd: int) -> None:
        self.folder = folder
        self._fd = fd
        # Nobody listens there: whoever did, does not hold the lock.
        self.stale_socket = folder.socket.exists()
        folder.socket.unlink(missing_ok=True)

    def release(self) -> None:
        """Remove socket, lock and, if nothing else lies in it, the folder."""
        if self._fd < 0:
            return
        for path in (self.folder.socket, self.folder.lock):
            path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(OSError):
            self.folder.path.rmdir()


START_S = 20.0
STOP_S = 30.0
"""For what a daemon holds, on a machine that has other things to do."""
_POLL_S = 0.02
_TAIL_BYTES = 64 << 10


def launch(
    folder: RuntimeFolder,
    arguments: Sequence[str],
    ask: Callable[[], dict[str, Any]],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start a daemon in the background, and return its state when it serves.

    Args:
        folder: where it will rule.
        arguments: options of `headrace COMMAND start` for it.
        ask: asks whoever serves there for its state, with its `pid`; an error: nobody does yet.
        environment: what it gets beside ours.

    Raises:
        HeadraceError: one runs already, or it did not come up; the message has the end of its log.
    """
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.path.mkdir(mode=0o700)
    folder.check()
    if (holder := folder.holder()) is not None:
        os.close(holder[1])
        raise folder.taken(holder[0])
    process = _spawn(folder, arguments, environment or {})
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, folder.error):
            if (state := ask())["pid"] == process.pid:
                # So that it is no zombie when it ends, should this process live so long.
                threading.Thread(target=process.wait, daemon=True).start()
                return state
        if process.poll() is not None:
            break
        time.sleep(_POLL_S)
    else:
        process.kill()
        process.wait()
    raise folder.error(
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


def end(folder: RuntimeFolder, kill: str, *, force: bool = False) -> int:
    """End the daemon that rules; returns its process id when it is gone.

    Args:
        folder: where it is.
        kill: what to do if it does not end, as the error says it.
        force: kill it if it does not end by itself.

    Raises:
        FileNotFoundError: none runs.
        HeadraceError: it does not end in time.
    """
    folder.check()
    holder = folder.holder()
    if holder is None:
        raise FileNotFoundError(errno.ENOENT, "nobody listens", str(folder.socket))
    pid, pidfd = holder
    try:
        # Daemons of a launch ignore SIGTERM, those that a script has started in the background SIGINT.
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.pidfd_send_signal(pidfd, number)
        if not wait_for_end(pidfd, 1.0 if force else STOP_S):
            if not force:
                raise folder.error(
                    f"{folder.path}: the {folder.title}, process {pid}, does not end within {STOP_S:g} s.",
                    path=str(folder.path),
                    next_step=kill,
                )
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            wait_for_end(pidfd, STOP_S)
    finally:
        os.close(pidfd)
    with contextlib.suppress(
        Exception
    ):  # it has tidied up, or somebody has started another one already
        folder.claim().release()
    return pid


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


SITE_SOCKET: Final = "/run/headrace-agent/socket"
"""Of an agent that root runs for all users."""


def agent_folder(job: str = "") -> RuntimeFolder:
    """The folder of this user's agent: that of the node daemon with `-agent` at its end.

    An agent of one `job` has a folder of its own.
    """
    node = runtime_folder().path
    of_job = "".join(c if c.isalnum() else "_" for c in job)[:64]
    name = f"{node.name}-agent-{of_job}" if of_job else f"{node.name}-agent"
    return RuntimeFolder(node.with_name(name), "agent")


def end_signals() -> list[int]:
    """What ends a process that serves others: SIGTERM and SIGINT.

    Not what it was started to ignore: a scheduler that cancels a job tells all of its processes, and those that
    serve the job's ranks go on until these have left.
    """
    both = (signal.SIGTERM, signal.SIGINT)
    return [each for each in both if signal.getsignal(each) is not signal.SIG_IGN]


def agent_sockets(job: str) -> tuple[str, ...]:
    """Where agents that want to hear of a job may listen."""
    given = os.environ.get("HEADRACE_AGENT_SOCKET")
    if given:
        return (given,)
    folders = agent_folder(), agent_folder(job)
    return (*(str(folder.socket) for folder in folders), SITE_SOCKET)


def checked(path: str) -> bool:
    """Whether what listens at `path` is ours or root's: nobody else is told how a job fares."""
    try:
        status = Path(path).parent.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        return False
    return not status.st_mode & 0o022
