"""NodeFolder: what a launch has on a node's local disk, and how the next one removes what a kill left.

    BASE/                 0700: `headrace-launch-UID` in the local folder
      TOKEN-INDEX/        one node of one launch
        lock              held (flock) while its supervisor or guard lives
        mark              "NAME=value", which every process of the launch has in its environment
        run/              runtime folder of the node daemon: its socket and lock
        local/            what `headrace stage` writes under a name
        *.log             of the helpers

The lock goes with its holders, however they end. So a folder that can be locked is a dead launch's: its
processes are those with its mark, and both can be removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.files import lock_path
from headrace.cluster.launch.processes import end_marked
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Leftover", "NodeFolder", "base_folder", "remove_if_free", "sweep"]

_NEW_S = 3600.0
_GRACE_S = 2.0
_SOCKET_PATH_BYTES_MAX = 107


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a dead launch had left on this node.

    Attributes:
        folder: that was removed.
        processes: that were ended.
        nbytes: of the files.
    """

    folder: str
    processes: int
    nbytes: int


def base_folder(local: Path) -> Path:
    """The folder of all of this user's launches on this node; made if need be."""
    base = local / f"headrace-launch-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise LaunchError(
            f"{base}: expected a folder of mode 0700 of user {os.geteuid()}.",
            path=str(base),
            next_step="Remove it, or name another local folder: --local.",
        )
    return base


class NodeFolder:
    """The folder of this node's part of a launch; made and locked.

    Args:
        local: a folder on the local disk.
        name: of the launch and node.
        mark: as every process of the launch has it in its environment.

    Raises:
        LaunchError: the local folder is not there, not safe, or full.
    """

    def __init__(self, local: Path, name: str, mark: str) -> None:
        try:
            self.path = base_folder(local) / name
            new = self.path.with_name(f".new-{name}")
            new.mkdir(mode=0o700)
            self._lock = lock_path(new / "lock", wait_s=None)
            (new / "mark").write_text(mark)
            for inner in ("run", "local"):
                (new / inner).mkdir(mode=0o700)
            new.rename(self.path)  # seen by others only when it is locked
        except OSError as e:
            raise LaunchError(
                f"{local}: the launch's folder cannot be made: {e.strerror}.",
                path=str(local),
                next_step="Name a folder on this node's local disk that has room: --local.",
            ) from e

    @property
    def run(self) -> Path:
        """The runtime folder of the node's daemon: HEADRACE_RUNTIME_DIR."""
        return self.path / "run"

    @property
    def local(self) -> Path:
        """Where staging may write."""
        return self.path / "local"

    def log(self, name: str) -> Path:
        """Of a helper."""
        return self.path / f"{name}.log"

    @property
    def socket_fits(self) -> bool:
        """Whether the system takes the path of the daemon's socket."""
        return len(os.fsencode(self.run / "socket")) <= _SOCKET_PATH_BYTES_MAX

    def remove(self) -> None:
        """Removes all of it; the base too if it was the last one."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


def sweep(local: Path) -> list[Leftover]:
    """Ends and removes what dead launches of this user left on this node."""
    base = local / f"headrace-launch-{os.geteuid()}"
    removed = []
    with contextlib.suppress(OSError):
        for folder in sorted(base.iterdir()):
            if folder.name.endswith(".lock"):
                remove_if_free(folder)
                continue
            if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            if folder.name.startswith(".new-") and time.time() - folder.stat().st_mtime < _NEW_S:
                continue  # about to be locked
            if (found := _sweep_one(folder)) is not None:
                removed.append(found)
    return removed


def remove_if_free(path: Path) -> None:
    """Removes a lock file that nobody holds."""
    with contextlib.suppress(OSError):
        fd = lock_path(path, make=False)
        if fd is not None:
            path.unlink()
            os.close(fd)


def _sweep_one(folder: Path) -> Leftover | None:
    try:
        fd = lock_path(folder / "lock", make=False)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
        return Leftover(str(folder), 0, 0)
    if fd is None:
        return None
    try:
        mark = ""
        with contextlib.suppress(OSError):
            mark = (folder / "mark").read_text().strip()
        ended = end_marked(mark, _GRACE_S)[0] if mark.startswith("HEADRACE_LAUNCH=") else 0
        nbytes = sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file())
        shutil.rmtree(folder, ignore_errors=True)
        return Leftover(str(folder), ended, nbytes)
    finally:
        os.close(fd)
