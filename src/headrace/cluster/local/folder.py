"""Folder: what is known of this user's local jobs, as files; two processes never write the same one.

    FOLDER/           0700: HEADRACE_JOBS_DIR, or headrace/jobs/HOST in the user's state folder
      lock            held by whoever numbers or starts jobs
      next            the next job's number
      17/             a job: `job.json` what was asked, `script`
        _/            its one task; of an array: 0/, 1/, ...
          state.json  how far it is; absent while it waits. Written by its keeper while that lives
          lock        held by its keeper
          cancel, requeue         asked of it, by their presence
        keeper.log      what its keeper had to say, which is nothing
      17/over         all its tasks are over: nobody needs to look any more

A job's folder goes a day after its end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.documents import DocumentKind
from headrace.base.files import lock_path, replace_file
from headrace.cluster.executor import JobState
from headrace.cluster.local.request import Request
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["JobsFolder", "LocalJob", "Task", "TaskState", "jobs_folder"]

FOLDER_VARIABLE = "HEADRACE_JOBS_DIR"
KEY_VARIABLE = "HEADRACE_JOB_KEY"
"""In the environment of all processes of a task, and of no other's."""
KEPT_S = 86400.0
_KIND = DocumentKind(
    name="the state of a local job",
    version=1,
    unchecked=0,
    error=ClusterError,
    next_step="Remove the job's folder if nothing of it is needed.",
)


def jobs_folder(environment: Mapping[str, str] | None = None) -> JobsFolder:
    """This user's on this machine: HEADRACE_JOBS_DIR, else headrace/jobs/HOST in the user's state folder.

    That is XDG_STATE_HOME or ~/.local/state. Home folders are often shared between machines, processes are not.
    """
    environment = os.environ if environment is None else environment
    if given := environment.get(FOLDER_VARIABLE):
        return JobsFolder(Path(given))
    state = environment.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local/state"
    return JobsFolder(base / "headrace/jobs" / socket.gethostname())


@dataclass(slots=True)
class TaskState:
    """How far a task is; times in Unix seconds."""

    state: str = JobState.PENDING
    reason: str = ""
    restarts: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    output: str = ""
    gpus: tuple[int, ...] = ()
    keeper: int = 0
    keeper_started: int = 0
    script: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing will come after it."""
        return JobState(self.state).is_over


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its folder, and its number in an array."""

    folder: Path
    number: int | None

    def read(self) -> TaskState:
        """How far it is."""
        try:
            path = self.folder / "state.json"
            return TaskState(**_KIND.decode(path.read_bytes(), str(path)).plain())
        except (FileNotFoundError, NotADirectoryError):
            return TaskState()
        except (OSError, TypeError) as e:
            raise ClusterError(
                f"{self.folder}/state.json: the state of a local job cannot be read: {e}.",
                path=str(self.folder),
                next_step="Remove the job's folder if nothing of it is needed.",
            ) from e

    def write(self, state: TaskState) -> None:
        """Say how far it is; what was said stays whole until the new is."""
        _write(self.folder / "state.json", asdict(state))

    def asked(self, what: str) -> bool:
        """Whether somebody asked it to `cancel` or `requeue`."""
        return (self.folder / what).exists()

    def ask(self, what: str) -> None:
        """Ask it."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / what).touch()

    def forget(self, what: str) -> None:
        """It was done."""
        (self.folder / what).unlink(missing_ok=True)

    def take(self) -> int | None:
        """Its lock, to hold as its keeper; None: a keeper has it."""
        try:
            return lock_path(self.folder / "lock")
        except FileNotFoundError:
            return None


@dataclass(frozen=True, slots=True)
class LocalJob:
    """What was asked for.

    Attributes:
        key: in the environment of all its processes, and nobody else's.
    """

    number: int
    folder: Path
    request: Request
    name: str
    user: str
    directory: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    submitted_s: float
    key: str

    @property
    def tasks(self) -> list[Task]:
        """One, or those of an array."""
        if self.request.tasks is None:
            return [Task(self.folder / "_", None)]
        return [Task(self.folder / str(number), number) for number in self.request.tasks]

    @property
    def script(self) -> Path:
        """Its text."""
        return self.folder / "script"

    @property
    def over(self) -> Path:
        """Is there when all its tasks are over."""
        return self.folder / "over"

    def task_key(self, task: Task) -> str:
        """The value of `KEY_VARIABLE` for its processes."""
        return f"{self.key}-{task.folder.name}"

    def task_id(self, task: Task) -> str:
        """As users know it."""
        return str(self.number) if task.number is None else f"{self.number}_{task.number}"

    def save(self) -> None:
        """Write it."""
        said = {
            name: getattr(self, name)
            for name in ("name", "user", "directory", "arguments", "submitted_s", "key")
        }
        said |= {"request": self.request.as_plain(), "environment": dict(self.environment)}
        _write(self.folder / "job.json", said)

    @classmethod
    def load(cls, folder: Path) -> LocalJob:
        """Read it.

        Raises:
            OSError: it is gone.
            ValueError: it cannot be read.
        """
        path = folder / "job.json"
        said = _KIND.decode(path.read_bytes(), str(path)).plain()
        said["request"] = Request.from_plain(said["request"])
        said["arguments"] = tuple(said["arguments"])
        return cls(number=int(folder.name), folder=folder, **said)


class JobsFolder:
    """All jobs of a user."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def open(self) -> None:
        """Make it, and see that it is ours alone: jobs' environments lie in it.

        Raises:
            ClusterError: it cannot be made, or others may look into it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.lstat()
        except OSError as e:
            raise self._error(f"cannot be made: {e.strerror}") from e
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise self._error(f"is not this user's ({os.geteuid()})")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise self._error(f"has mode {stat.S_IMODE(found.st_mode):04o}, expected 0700")

    def _error(self, what: str) -> ClusterError:
        return ClusterError(
            f"{self.path}: the folder of local jobs {what}.",
            path=str(self.path),
            next_step=f"Name another folder in {FOLDER_VARIABLE}.",
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else numbers or starts jobs meanwhile."""
        fd = lock_path(self.path / "lock", wait_s=None)
        assert fd is not None
        try:
            yield
        finally:
            os.close(fd)

    def next_number(self) -> int:
        """A number that no job has had; `locked`."""
        path = self.path / "next"
        try:
            number = int(path.read_text())
        except (FileNotFoundError, ValueError):
            number = 1 + max((job for job in self._numbers()), default=0)
        _replace(path, f"{number + 1}\n")
        return number

    def jobs(self) -> list[LocalJob]:
        """All that are not over, oldest first."""
        found = []
        for number in sorted(self._numbers()):
            if (self.path / str(number) / "over").exists():
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.append(self.load(str(number)))
        return found

    def load(self, number: str) -> LocalJob:
        """One.

        Raises:
            FileNotFoundError: there is none.
            ClusterError: it cannot be read.
        """
        try:
            return LocalJob.load(self.path / number)
        except (ValueError, KeyError, TypeError) as e:
            raise ClusterError(
                f"{self.path / number}: the local job cannot be read: {e!r}.",
                path=str(self.path / number),
                next_step="Remove the folder if nothing of it is needed.",
            ) from e

    def clean(self) -> None:
        """Remove jobs that were over long ago; `locked`."""
        limit = time.time() - KEPT_S
        for number in self._numbers():
            folder = self.path / str(number)
            with contextlib.suppress(OSError):
                if (folder / "over").stat().st_mtime < limit:
                    shutil.rmtree(folder, ignore_errors=True)

    def _numbers(self) -> Iterator[int]:
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.path):
                if entry.name.isdigit():
                    yield int(entry.name)


def _write(path: Path, said: dict[str, Any]) -> None:
    _replace(path, _KIND.encode(said).decode())


def _replace(path: Path, text: str) -> None:
    replace_file(path, text.encode(), mode=0o600, sync=False)
