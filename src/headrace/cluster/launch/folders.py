"""What a launch holds on a node and on the shared file system, and how the next one removes what a kill left.

    BASE/                 0700: `headrace-launch-UID` in the local folder
      TOKEN-INDEX/        one node of one launch
        lock              held (flock) while its supervisor lives; its guard then removes the folder
        mark              "NAME=value", which every process of the launch has in its environment
        run/              runtime folder of the node daemon: its socket and lock
        local/            what `headrace stage` writes under a name
        *.log             of the helpers
      gpu-*.lock          held by the launch that has the GPU

    SHARED/               `.headrace-launch-TOKEN` in the current folder, unless it is named
      owner.json          who made it: host, process, job
      meet/               of `headrace stage`

A lock goes with its holders, however they end. So a node's folder that can be locked is a dead launch's: its
processes are those with its mark, and both can be removed. A shared folder is removed if its owner is dead for
certain: a process of this host that is gone, or this very job before it was requeued.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.documents import DocumentKind
from headrace.base.files import explained, lock_path, own_folder
from headrace.cluster.processes import end_marked
from headrace.errors import LaunchError
from headrace.machine.host import start_time
from headrace.runtime import SOCKET_PATH_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.launch.place import JobPlace


# -- on a node's local disk ----------------------------------------------------------------------------

_NEW_S = 86400.0
"""A folder so old, by a clock that may be hours ahead, is not about to be locked."""
_GRACE_S = 2.0


def _base_path(local: Path) -> Path:
    return local / f"headrace-launch-{os.geteuid()}"


def _base_folder(local: Path) -> Path:
    """The folder of all of this user's launches on this node."""
    next_step = "Remove it, or name another local folder: --local."
    return own_folder(_base_path(local), LaunchError, next_step)


def local_folder(given: str | None, environment: Mapping[str, str]) -> Path:
    """The folder on this node's local disk: as it was named, or Slurm's for the job, TMPDIR, /tmp."""
    given = given or environment.get("SLURM_TMPDIR") or environment.get("TMPDIR")
    return Path(given or "/tmp").absolute()  # noqa: S108 - a folder of ours is made in it


class NodeFolder:
    """The folder of this node's part of a launch."""

    def __init__(self, local: Path, name: str, mark: str) -> None:
        self.path = _base_path(local) / name
        self._mark = mark

    def make(self) -> None:
        """Makes and locks it."""
        what = "the launch's folder cannot be made"
        next_step = "Name a folder on this node's local disk that has room: --local."
        local, name = self.path.parent.parent, self.path.name
        with explained(LaunchError, local, what, next_step):
            new = _base_folder(local) / f".new-{name}"
            new.mkdir(mode=0o700)
            self._lock = lock_path(new / "lock", wait_s=None)
            (new / "mark").write_text(self._mark)
            for inner in ("run", "local"):
                (new / inner).mkdir(mode=0o700)
            new.rename(self.path)  # seen by others only when it is locked

    def log(self, name: str) -> Path:
        """Of a helper."""
        return self.path / f"{name}.log"

    @property
    def socket_fits(self) -> bool:
        """Whether the system takes the path of the daemon's socket."""
        return len(os.fsencode(self.path / "run/socket")) <= SOCKET_PATH_BYTES_MAX

    def remove(self) -> None:
        """Removes all of it; the base too if it was the last one."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


def daemon_folders(local: Path) -> list[Path]:
    """Of the node daemons of this user's launches on this node."""
    return sorted(socket.parent for socket in _base_path(local).glob("*/run/socket"))


def sweep(local: Path) -> list[dict[str, Any]]:
    """Ends and removes what dead launches of this user left on this node: folders, processes, bytes."""
    base = _base_path(local)
    removed = []
    with contextlib.suppress(OSError):
        for folder in sorted(base.iterdir()):
            if folder.name.endswith(".lock"):
                if (fd := lock_path(folder, make=False)) is not None:
                    folder.unlink()
                    os.close(fd)
                continue
            if not _is_own(folder):
                continue
            if folder.name.startswith(".new-") and time.time() - folder.stat().st_mtime < _NEW_S:
                continue  # about to be locked
            if (leftover := _sweep_one(folder)) is not None:
                removed.append(leftover)
    return removed


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user's, and no way to another."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    return is_folder and folder.stat().st_uid == os.geteuid()


def _sweep_one(folder: Path) -> dict[str, Any] | None:
    try:
        fd = lock_path(folder / "lock", make=False)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
        return {"folder": str(folder), "processes": 0, "nbytes": 0}
    if fd is None:
        return None
    try:
        mark = ""
        with contextlib.suppress(OSError):
            mark = (folder / "mark").read_text().strip()
        ended = end_marked(mark, _GRACE_S)[0] if mark.startswith("HEADRACE_LAUNCH=") else 0
        nbytes = sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file())
        shutil.rmtree(folder, ignore_errors=True)
        return {"folder": str(folder), "processes": ended, "nbytes": nbytes}
    finally:
        os.close(fd)


# -- on the shared file system -------------------------------------------------------------------------

_PREFIX = ".headrace-launch-"
_OWNER = DocumentKind(
    name="the owner of a meeting folder",
    version=1,
    unchecked=0,
    error=LaunchError,
    next_step="Remove the folder if its job is gone.",
)


class MeetFolder:
    """The folder in which a job's nodes meet, made.

    Args:
        given: as the user named it; None: one in the current folder.

    Attributes:
        swept: folders of dead launches that were removed.
        meeting: HEADRACE_JOB_FOLDER.
    """

    def __init__(self, given: str | None, token: str, place: JobPlace) -> None:
        parent = Path(given).absolute() if given else Path.cwd()
        self.swept = _sweep_meetings(parent, place)
        self._parent = parent if given and not parent.exists() else None
        self.path = parent / f"{_PREFIX}{token[:16]}"
        self.meeting = self.path / "meet"
        what = "the folder in which the nodes meet cannot be made"
        next_step = "Name a folder that all nodes see and that has room: --meet."
        with explained(LaunchError, self.path, what, next_step):
            self.path.mkdir(mode=0o700, parents=True)
            owner = {
                "host": socket.gethostname(), "pid": os.getpid(), "began": start_time(os.getpid()),
                "job": place.job_id, "restarts": place.restarts,
            }  # fmt: skip
            (self.path / "owner.json").write_bytes(_OWNER.encode(owner))

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.rmdir()


def _sweep_meetings(parent: Path, place: JobPlace) -> list[str]:
    removed = []
    with contextlib.suppress(OSError):
        for folder in sorted(parent.glob(f"{_PREFIX}*")):
            if _is_own(folder) and _dead(folder, place):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(str(folder))
    return removed


def _dead(folder: Path, place: JobPlace) -> bool:
    try:
        path = folder / "owner.json"
        owner = _OWNER.decode(path.read_bytes(), str(path)).plain()
        job, host, pid, began = owner["job"], owner["host"], int(owner["pid"]), owner["began"]
        restarts = int(owner["restarts"])
    except (OSError, LaunchError, ValueError, KeyError, TypeError):
        return False  # about to be written, or not ours
    if job and job == place.job_id and restarts < place.restarts:
        return True  # this very job, before it was requeued
    return bool(host == socket.gethostname() and start_time(pid) != began)


# -- GPUs ----------------------------------------------------------------------------------------------


class GpuClaim:
    """So many of a node's GPUs, held by locks that the kernel lets go of with this process."""

    def __init__(self, base: Path, owner: str, wanted: int, there: Sequence[str]) -> None:
        """`base`: of all of this user's launches; `there`: what may be had."""
        self.gpus: list[str] = []
        self._held: list[tuple[Path, int]] = []
        for gpu in there:
            if len(self.gpus) == wanted:
                break
            name = "".join(c if c.isalnum() else "-" for c in f"gpu-{owner}-{gpu}")
            if (fd := lock_path(base / f"{name}.lock")) is not None:
                self.gpus.append(gpu)
                self._held.append((base / f"{name}.lock", fd))
        if len(self.gpus) < wanted:
            self.close()
            another = ": another `headrace launch` of this job has the others" if there else ""
            raise LaunchError(
                f"{len(self.gpus)} of this node's {len(there)} GPUs are free, expected {wanted}{another}.",
                next_step="Wait for it, or give each launch its share: --gpus.",
            )

    def close(self) -> None:
        """Lets go of them."""
        for path, fd in self._held:
            path.unlink(missing_ok=True)
            os.close(fd)
        self._held.clear()
