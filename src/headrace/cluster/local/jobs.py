"""Local jobs: what a script's directives ask of this machine, and the folder in which jobs are known.

All options of sbatch are taken; those that mean nothing here (partition, account, memory, ...) change nothing.
Two processes never write the same file:

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
import dataclasses
import os
import re
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
from headrace.cluster.hostlist import expand_indices
from headrace.cluster.script import SBATCH_OPTIONS, read_script, read_words
from headrace.cluster.slurm.text import gpu_count, seconds
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


# -- what is asked -------------------------------------------------------------------------------------

TASKS_MAX = 10_000
"""The largest array."""

_NOT_HERE = frozenset({"begin", "hold", "wrap", "test-only", "help", "usage", "version", "wait"})
_KINDS = {"afterok", "afternotok", "afterany", "after", "aftercorr", "singleton"}
_SIGNALS = re.compile(r"(?:(R?B?R?):)?(?:SIG)?(\w+)(?:@(\d+))?\Z")


@dataclass(frozen=True, slots=True)
class Dependency:
    """One job that another waits for: `kind` is one of sbatch's words; a singleton names none."""

    kind: str
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What is asked.

    Attributes:
        tasks: numbers of an array's tasks; None: it is none.
        together: of these, run at a time; 0: no limit of the array's own.
        all_of: whether all dependencies must hold, or any.
        time_s: until it is ended; None: no limit.
        warn_signal, warn_s: a signal, so long before the end; `warn_script`: to the script alone.
        nodes: simulated: the script runs once, and is told these names.
        gpus_per_node, tasks_per_node, cpus_per_task: as asked.
    """

    name: str = ""
    output: str = ""
    error: str = ""
    input: str = ""
    append: bool = False
    tasks: tuple[int, ...] | None = None
    together: int = 0
    dependencies: tuple[Dependency, ...] = ()
    all_of: bool = True
    kill_on_invalid_dependency: bool = False
    time_s: float | None = None
    warn_signal: int = 0
    warn_s: float = 60.0
    warn_script: bool = False
    requeue: bool = False
    directory: str = ""
    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    cpus_per_task: int = 1

    @property
    def cpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.tasks_per_node * self.cpus_per_task

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, fields: dict[str, Any]) -> LocalRequest:
        """Of what `as_plain` gave."""
        fields = dict(fields)
        fields["dependencies"] = tuple(Dependency(**d) for d in fields["dependencies"])
        fields["tasks"] = None if fields["tasks"] is None else tuple(fields["tasks"])
        return cls(**fields)


def read_request(script: bytes, options: Sequence[str]) -> LocalRequest:
    """What a script's directives and the options, which win, ask for.

    Raises:
        ClusterRequestError: sbatch would refuse it, or it cannot be done here.
    """
    if script.partition(b"\n")[0].endswith(b"\r"):
        raise ClusterRequestError(
            "The script's lines end as on Windows (CRLF): no interpreter would be found.",
            next_step="Convert it: sed -i 's/\\r$//' SCRIPT.",
        )
    directives = (d for d in read_script(script, "the script").directives if not d.ours)
    words = [*(word for d in directives for word in d.words), *read_words(options)]
    options_by_name: dict[str, str | None] = {}
    for word in words:
        if word.name in _NOT_HERE:
            raise ClusterRequestError(
                f"--{word.name} is not done by the local executor.",
                next_step="Leave it out, or use Slurm (HEADRACE_EXECUTOR=slurm).",
            )
        if word.name not in SBATCH_OPTIONS:
            raise ClusterRequestError(
                f"sbatch has no option --{word.name}.", next_step="See `man sbatch`."
            )
        options_by_name[word.name] = word.value
    try:
        return _request(options_by_name)
    except (ValueError, TypeError) as e:
        raise ClusterRequestError(f"{e}.") from e


def _request(options: dict[str, str | None]) -> LocalRequest:
    nodes = _count(options, "nodes") or 1
    per_node = _count(options, "ntasks-per-node")
    tasks = _count(options, "ntasks")
    per_node = per_node or (-(-tasks // nodes) if tasks else 1)
    gpus = gpu_count(f"gpu:{options['gpus-per-node']}") if options.get("gpus-per-node") else 0
    gpus = gpus or gpu_count(options.get("gres") or "")
    if not gpus and options.get("gpus"):
        gpus = -(-gpu_count(f"gpu:{options['gpus']}") // nodes)
    if not gpus and options.get("gpus-per-task"):
        gpus = gpu_count(f"gpu:{options['gpus-per-task']}") * per_node
    array, together = _array(options.get("array"))
    dependencies, all_of = _dependencies(options.get("dependency"))
    warn_script, warn_signal, warn_s = _warning(options.get("signal"))
    return LocalRequest(
        name=options.get("job-name") or "",
        output=options.get("output") or "",
        error=options.get("error") or "",
        input=options.get("input") or "",
        append=options.get("open-mode") in {"append", "a"},
        tasks=array,
        together=together,
        dependencies=dependencies,
        all_of=all_of,
        kill_on_invalid_dependency=options.get("kill-on-invalid-dep") in {"yes", "y"},
        time_s=seconds(options.get("time") or "") or None,
        warn_signal=warn_signal,
        warn_s=warn_s,
        warn_script=warn_script,
        requeue="requeue" in options and "no-requeue" not in options,
        directory=options.get("chdir") or "",
        nodes=nodes,
        gpus_per_node=gpus,
        tasks_per_node=per_node,
        cpus_per_task=_count(options, "cpus-per-task") or 1,
    )


def _count(options: dict[str, str | None], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    first = text.partition("-")[0]  # --nodes=2-4: the fewest
    if not first.isdigit() or (name != "nodes" and first != text) or not int(first):
        raise ValueError(f"--{name} is {text!r}, expected a number")
    return int(first)


def _array(text: str | None) -> tuple[tuple[int, ...] | None, int]:
    if text is None:
        return None, 0
    numbers, percent, together = text.partition("%")
    tasks = tuple(sorted(set(expand_indices(numbers.strip("[]")))))
    if not tasks or len(tasks) > TASKS_MAX or (percent and not together.isdigit()):
        raise ValueError(
            f"--array is {text!r}, expected like 0-9, 1,3,7 or 0-99%4, at most {TASKS_MAX} tasks"
        )
    return tasks, int(together or 0)


def _dependencies(text: str | None) -> tuple[tuple[Dependency, ...], bool]:
    if not text:
        return (), True
    dependencies = []
    for part in re.split("[,?]", text):
        kind, *job_ids = part.split(":")
        bad = kind not in _KINDS or (kind == "singleton") == bool(job_ids)
        if bad or not all(re.fullmatch(r"\d+(_\d+)?(\+\d+)?", job_id) for job_id in job_ids):
            raise ValueError(f"--dependency is {text!r}, expected like afterok:17:18,afterany:19")
        dependencies += [Dependency(kind, job_id.partition("+")[0]) for job_id in job_ids or [""]]
    return tuple(dependencies), "?" not in text


def _warning(text: str | None) -> tuple[bool, int, float]:
    if not text:
        return False, 0, 60.0
    import signal

    match = _SIGNALS.match(text)
    named = match and (match[2] if match[2].isdigit() else f"SIG{match[2].upper()}")
    numbers = {s.name: int(s) for s in signal.Signals} | {
        str(int(s)): int(s) for s in signal.Signals
    }
    if not match or named not in numbers:
        raise ValueError(f"--signal is {text!r}, expected like USR1@60 or B:TERM@120")
    return "B" in (match[1] or ""), numbers[named], float(match[3] or 60)


# -- what is known -------------------------------------------------------------------------------------

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
class LocalTask:
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
    request: LocalRequest
    name: str
    user: str
    directory: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    submitted_s: float
    key: str

    @property
    def tasks(self) -> list[LocalTask]:
        """One, or those of an array."""
        if self.request.tasks is None:
            return [LocalTask(self.folder / "_", None)]
        return [LocalTask(self.folder / str(number), number) for number in self.request.tasks]

    @property
    def script(self) -> Path:
        """Its text."""
        return self.folder / "script"

    @property
    def over(self) -> Path:
        """Is there when all its tasks are over."""
        return self.folder / "over"

    def task_key(self, task: LocalTask) -> str:
        """The value of `KEY_VARIABLE` for its processes."""
        return f"{self.key}-{task.folder.name}"

    def task_id(self, task: LocalTask) -> str:
        """As users know it."""
        return str(self.number) if task.number is None else f"{self.number}_{task.number}"

    def save(self) -> None:
        """Write it."""
        fields = {
            name: getattr(self, name)
            for name in ("name", "user", "directory", "arguments", "submitted_s", "key")
        }
        fields |= {"request": self.request.as_plain(), "environment": dict(self.environment)}
        _write(self.folder / "job.json", fields)

    @classmethod
    def load(cls, folder: Path) -> LocalJob:
        """Read it.

        Raises:
            OSError: it is gone.
            ValueError: it cannot be read.
        """
        path = folder / "job.json"
        fields = _KIND.decode(path.read_bytes(), str(path)).plain()
        fields["request"] = LocalRequest.from_plain(fields["request"])
        fields["arguments"] = tuple(fields["arguments"])
        return cls(number=int(folder.name), folder=folder, **fields)


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
            status = self.path.lstat()
        except OSError as e:
            raise self._error(f"cannot be made: {e.strerror}") from e
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise self._error(f"is not this user's ({os.geteuid()})")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise self._error(f"has mode {stat.S_IMODE(status.st_mode):04o}, expected 0700")

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
        jobs = []
        for number in sorted(self._numbers()):
            if (self.path / str(number) / "over").exists():
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                jobs.append(self.load(str(number)))
        return jobs

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


def _write(path: Path, fields: dict[str, Any]) -> None:
    _replace(path, _KIND.encode(fields).decode())


def _replace(path: Path, text: str) -> None:
    replace_file(path, text.encode(), mode=0o600, sync=False)
