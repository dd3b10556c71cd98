"""MeetFolder: a launch's folder on the shared file system, where its nodes meet to stage; gone at the end.

    FOLDER/              `.headrace-launch-TOKEN` in the current folder, unless it is named
      owner.json         who made it: host, process, job
      meet/              of `headrace stage`

A launch that was killed with all its nodes leaves it (a few kB). The next launch in the same folder removes
those whose owner is dead for certain: a process of this host that is gone, or a job that Slurm has no more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.documents import DocumentKind
from headrace.closing import Closing
from headrace.cluster.launch.processes import start_time
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from headrace.cluster.place import JobPlace

__all__ = ["MeetFolder"]

_PREFIX = ".headrace-launch-"
_OWNER = DocumentKind(
    name="the owner of a meeting folder",
    version=1,
    unchecked=0,
    error=LaunchError,
    next_step="Remove the folder if its job is gone.",
)


class MeetFolder(Closing):
    """The folder, made.

    Args:
        given: as the user named it; None: one in the current folder.
        token: of the launch.
        place: of the job.

    Attributes:
        swept: folders of dead launches that were removed.

    Raises:
        LaunchError: it cannot be made.
    """

    def __init__(self, given: str | None, token: str, place: JobPlace) -> None:
        parent = Path(given).absolute() if given else Path.cwd()
        self.swept = _sweep(parent, place)
        self._parent = parent if given and not parent.exists() else None
        self.path = parent / f"{_PREFIX}{token[:16]}"
        try:
            self.path.mkdir(mode=0o700, parents=True)
            owner = {
                "host": socket.gethostname(), "pid": os.getpid(), "began": start_time(os.getpid()),
                "job": place.job_id, "restarts": place.restarts,
            }  # fmt: skip
            (self.path / "owner.json").write_bytes(_OWNER.encode(owner))
        except OSError as e:
            raise LaunchError(
                f"{self.path}: the folder in which the nodes meet cannot be made: {e.strerror}.",
                path=str(self.path),
                next_step="Name a folder that all nodes see and that has room: --meet.",
            ) from e

    @property
    def meeting(self) -> Path:
        """HEADRACE_JOB_FOLDER."""
        return self.path / "meet"

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.rmdir()


def _sweep(parent: Path, place: JobPlace) -> list[str]:
    removed = []
    with contextlib.suppress(OSError):
        for folder in sorted(parent.glob(f"{_PREFIX}*")):
            if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.geteuid():
                continue
            if _dead(folder, place):
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
