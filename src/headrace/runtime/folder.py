"""Runtime folder: where a daemon of this user is found, and which of two daemons may rule.

    FOLDER/          0700, ours, no symbolic link
      socket         the daemon listens here
      lock           held (flock) by the daemon that rules; its process id is inside
      node.log       of a daemon in the background; control.log, of a controller

The node daemon has one folder, the controller another beside it.

A kill leaves socket and lock file behind, but no lock: the next daemon takes both over. Whoever
connects checks the folder first, so that no other user can pose as the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.files import lock_path, locked_by
from headrace.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Claim", "RuntimeFolder", "control_folder", "runtime_folder"]

FOLDER_VARIABLE = "HEADRACE_RUNTIME_DIR"
SOCKET_PATH_BYTES_MAX = 107
"""What the kernel takes as the path of a UNIX socket."""

_ATTEMPTS = 20


def runtime_folder(environment: Mapping[str, str] | None = None) -> RuntimeFolder:
    """The folder of this user's daemon: HEADRACE_RUNTIME_DIR, XDG_RUNTIME_DIR or /tmp/headrace-UID.

    Args:
        environment: defaults to `os.environ`.
    """
    environment = os.environ if environment is None else environment
    given = environment.get(FOLDER_VARIABLE)
    if given:
        return RuntimeFolder(Path(given))
    session = environment.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        return RuntimeFolder(Path(session) / "headrace")
    return RuntimeFolder(Path(f"/tmp/headrace-{os.geteuid()}"))  # noqa: S108 - checked before use


def control_folder(environment: Mapping[str, str] | None = None) -> RuntimeFolder:
    """The folder of this user's controller: that of the node daemon with `-control` at its end.

    Args:
        environment: defaults to `os.environ`.
    """
    node = runtime_folder(environment).path
    return RuntimeFolder(node.with_name(f"{node.name}-control"), "control", "controller")


class RuntimeFolder:
    """The folder and the files in it.

    Args:
        path: made when a daemon claims it.
        command: what starts and stops the daemon: `headrace COMMAND start`.
        title: what the daemon is called.
    """

    def __init__(self, path: Path, command: str = "node", title: str = "node daemon") -> None:
        self.path = path.absolute()
        self.command = command
        self.title = title

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
            NodeError: it belongs to somebody else, others may enter it, or it is no folder.
        """
        found = self.path.lstat()
        if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
            raise self._unsafe("a symbolic link or a file", "a folder")
        if found.st_uid != os.geteuid():
            raise self._unsafe(f"of user {found.st_uid}", f"of user {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise self._unsafe(f"mode {stat.S_IMODE(found.st_mode):04o}", "mode 0700")
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES_MAX:
            raise NodeError(
                f"{self.socket}: the path of the socket has {len(os.fsencode(self.socket))} bytes, "
                f"the system takes {SOCKET_PATH_BYTES_MAX}.",
                path=str(self.socket),
                next_step=f"Name a folder with a shorter path in {FOLDER_VARIABLE}.",
            )

    def _unsafe(self, found: str, expected: str) -> NodeError:
        return NodeError(
            f"{self.path}: the runtime folder is {found}, expected {expected}.",
            path=str(self.path),
            next_step=f"Remove it, or name another folder in {FOLDER_VARIABLE}.",
        )

    def claim(self) -> Claim:
        """Become the one daemon of this folder.

        Raises:
            NodeError: another daemon rules, or the folder is not safe.
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
        raise NodeError(f"{self.path}: the runtime folder cannot be claimed.", path=str(self.path))

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
            raise NodeError(
                f"{self.path}: a {self.title} runs already, process {locked_by(self.lock)}.",
                path=str(self.path),
                next_step=f"Use it, or stop it first: headrace {self.command} stop.",
            )
        return Claim(self, fd)


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
