"""Local jobs: what a script's directives ask of this machine, and the folder in which jobs are known.

All options of sbatch are taken; those that mean nothing here (partition, account, memory, ...) change nothing.

    FOLDER/           0700: HEADRACE_JOBS_DIR, or headrace/jobs/HOST in the user's state folder
      lock            held by whoever numbers, starts or changes jobs
      next            the next job's number; /var/tmp/headrace-jobs-UID has it for all folders of the user
      17/             a job: `script`, and `job.json`, what was asked: both never change
        state.json    how far each of its tasks is that does not merely wait; replaced as a whole
        over          all its tasks are over: nobody needs to look any more

A job's folder is removed a day after its end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.base.documents import DocumentKind
from headrace.base.files import explained, lock_path, own_folder, replace_file, state_folder
from headrace.cluster.executor import JobState, Submission
from headrace.cluster.notation import expand_indices, gpu_count, memory_mib, parse_gres, seconds
from headrace.cluster.script import SBATCH_OPTIONS, read_script, read_words
from headrace.cluster.snapshot import Allocation, ClusterJob
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace.cluster.executor import JobStatus


# -- what is asked -------------------------------------------------------------------------------------

TASKS_MAX = 10_000
"""The largest array."""

_NOT_HERE = frozenset({"begin", "hold", "wrap", "test-only", "help", "usage", "version", "wait"})
_KINDS = {"afterok", "afternotok", "afterany", "after", "aftercorr", "singleton"}
_SIGNALS = re.compile(r"(?:(R?B?R?):)?(?:SIG)?(\w+)(?:@(\d+))?\Z")


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What is asked.

    Attributes:
        tasks: numbers of an array's tasks; None: it is none.
        dependencies: sbatch's word ("afterok") and the id of a job that this one waits for ("": singleton).
        all_of: whether all dependencies must hold, or any.
        warn_signal, warn_s: a signal, so long before the end; `warn_script`: to the script alone.
        nodes: simulated: the script runs once, and is told these names.
        memory_mib, gpu_type, partition: of a node, as asked for; 0 and "" if not. They mean nothing here.
        words: all of sbatch's that were said.
        exclude: names of nodes, for executors that have several.
    """

    name: str = ""
    output: str = ""
    error: str = ""
    input: str = ""
    append: bool = False
    tasks: tuple[int, ...] | None = None
    tasks_at_once: int = 0
    dependencies: tuple[tuple[str, str], ...] = ()
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
    memory_mib: int = 0
    gpu_type: str = ""
    partition: str = ""
    words: frozenset[str] = frozenset()
    exclude: str = ""

    @property
    def output_pattern(self) -> str:
        """Of the output file's name, as `fill_pattern` takes it."""
        return self.output or ("slurm-%j.out" if self.tasks is None else "slurm-%A_%a.out")

    @property
    def cpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.tasks_per_node * self.cpus_per_task

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node


@functools.lru_cache(maxsize=64)
def read_request(script: bytes, options: tuple[str, ...]) -> LocalRequest:
    """What a script's directives and the options, which win, ask for."""
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
                f"--{word.name} is done by Slurm alone.",
                next_step="Leave it out, or use Slurm (HEADRACE_EXECUTOR=slurm).",
            )
        if word.name not in SBATCH_OPTIONS:
            text, next_step = f"sbatch has no option --{word.name}.", "See `man sbatch`."
            raise ClusterRequestError(text, next_step=next_step)
        options_by_name[word.name] = word.value
    try:
        return _request(options_by_name)
    except (ValueError, TypeError) as e:
        raise ClusterRequestError(f"{e}.") from e


def _request(options: dict[str, str | None]) -> LocalRequest:
    def text(name: str) -> str:
        return options.get(name) or ""

    def gpus(name: str) -> int:
        return gpu_count(f"gpu:{text(name)}") if text(name) else 0

    def count(name: str) -> int | None:
        value = options.get(name)
        if value is None:
            return None
        first = value.partition("-")[0]  # --nodes=2-4: the fewest
        if not first.isdigit() or (name != "nodes" and first != value) or not int(first):
            raise ValueError(f"--{name} is {value!r}, expected a number")
        return int(first)

    nodes = count("nodes") or 1
    tasks = count("ntasks")
    per_node = count("ntasks-per-node") or (-(-tasks // nodes) if tasks else 1)
    array, tasks_at_once = _array(options.get("array"))
    dependencies, all_of = _dependencies(text("dependency"))
    warn_script, warn_signal, warn_s = _warning(text("signal"))
    node_gpus = gpus("gpus-per-node") or gpu_count(text("gres")) or -(-gpus("gpus") // nodes)
    return LocalRequest(
        name=text("job-name"), output=text("output"), error=text("error"), input=text("input"),
        append=text("open-mode") in {"append", "a"}, tasks=array, tasks_at_once=tasks_at_once,
        dependencies=dependencies, all_of=all_of,
        kill_on_invalid_dependency=text("kill-on-invalid-dep") in {"yes", "y"},
        time_s=seconds(text("time")) or None, warn_signal=warn_signal, warn_s=warn_s,
        warn_script=warn_script, requeue="requeue" in options and "no-requeue" not in options,
        directory=text("chdir"), nodes=nodes,
        gpus_per_node=node_gpus or gpus("gpus-per-task") * per_node, tasks_per_node=per_node,
        cpus_per_task=count("cpus-per-task") or 1,
        memory_mib=memory_mib(text("mem")) if text("mem") else 0,
        gpu_type=next((gpu.type for gpu in parse_gres(text("gres"))), ""), partition=text("partition"),
        words=frozenset(options), exclude=text("exclude"),
    )  # fmt: skip


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


def _dependencies(text: str) -> tuple[tuple[tuple[str, str], ...], bool]:
    if not text:
        return (), True
    dependencies = []
    for part in re.split("[,?]", text):
        kind, *job_ids = part.split(":")
        bad = kind not in _KINDS or (kind == "singleton") == bool(job_ids)
        if bad or not all(re.fullmatch(r"\d+(_\d+)?(\+\d+)?", job_id) for job_id in job_ids):
            raise ValueError(f"--dependency is {text!r}, expected like afterok:17:18,afterany:19")
        dependencies += [(kind, job_id.partition("+")[0]) for job_id in job_ids or [""]]
    return tuple(dependencies), "?" not in text


def _warning(text: str) -> tuple[bool, int, float]:
    if not text:
        return False, 0, 60.0
    match = _SIGNALS.match(text)
    numbers = {name: int(s) for s in signal.Signals for name in (s.name, str(int(s)))}
    named = match and (match[2] if match[2].isdigit() else f"SIG{match[2].upper()}")
    if not match or named not in numbers:
        raise ValueError(f"--signal is {text!r}, expected like USR1@60 or B:TERM@120")
    return "B" in (match[1] or ""), numbers[named], float(match[3] or 60)


def job_directory(submission: Submission) -> Path:
    """Where the job's script runs; ClusterRequestError if there is no such folder."""
    request = read_request(submission.script, submission.options)
    directory = Path(submission.directory or Path.cwd(), request.directory).absolute()
    if not directory.is_dir():
        raise ClusterRequestError(
            f"{directory}: the job's working directory does not exist.", path=str(directory)
        )
    return directory


def queued_job(
    status: JobStatus, request: LocalRequest, user: str, partition: str, gpus: Sequence[int] | None
) -> ClusterJob:
    """A job in the queue, with its share of each of its nodes; `gpus`: their numbers, None if not known."""
    nodes = max(1, len(status.nodes))  # those that it was given: of lost ones nobody has the share
    status = status.with_run()
    has = tuple(
        Allocation(node, request.cpus // nodes, 0, request.gpus // nodes if gpus is None else len(gpus),
                   tuple(gpus or ()))
        for node in status.nodes
    )  # fmt: skip
    return ClusterJob(
        job_id=status.job_id, name=status.name, user=user, account="", partition=partition,
        state=status.state, reason=status.reason, nodes=status.nodes, allocations=has,
        node_count=request.nodes, cpu_count=request.cpus, gpu_count=request.gpus,
        submitted_s=status.submitted_s, started_s=status.started_s,
        limit_minutes=None if request.time_s is None else round(request.time_s / 60),
    )  # fmt: skip


# -- what is known -------------------------------------------------------------------------------------

FOLDER_VARIABLE = "HEADRACE_JOBS_DIR"
KEY_VARIABLE = "HEADRACE_JOB_KEY"
"""In the environment of all processes of a task, and of no other's."""
KEPT_S = 86400.0
_replace = functools.partial(replace_file, mode=0o600, sync=False)
_KIND = DocumentKind(
    name="the state of a local job",
    version=1,
    unchecked=0,
    error=ClusterError,
    next_step="Remove the job's folder if nothing of it is needed.",
)


@dataclass(slots=True)
class TaskState:
    """How far a task is; times in Unix seconds.

    Attributes:
        output: the file; "" until the keeper has begun.
        keeper, keeper_started: the process that keeps the task: its id, and when it began.
        script: the process of the script.
        is_cancelled: the keeper is asked to end it.
    """

    state: JobState = JobState.PENDING
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
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing will come after it."""
        return self.state.is_over

    @property
    def runs(self) -> bool:
        """Whether a keeper has it."""
        return self.state != JobState.PENDING and not self.is_over

    @property
    def shown(self) -> JobState:
        """The state as others see it: what is being ended is completing."""
        return JobState.COMPLETING if self.runs and self.is_cancelled else self.state


class SubmittedJob:
    """A job whose script says what it needs, as Slurm's do."""

    submission: Submission

    @functools.cached_property
    def request(self) -> LocalRequest:
        """What its directives and options ask for."""
        return read_request(self.submission.script, self.submission.options)

    @property
    def name(self) -> str:
        """As users know it."""
        return self.request.name or "sbatch"


_OWN = ("user", "submitted_s", "key", "variables")


@dataclass(slots=True)
class LocalJob(SubmittedJob):
    """One job.

    Attributes:
        submission: its folder and its environment are the job's, whole.
        key: in the environment of all its processes, and nobody else's.
        variables: of the script, by which another executor says what this one would say otherwise.
        tasks: how far each is, by its number in an array; None: it is none.
    """

    number: int
    folder: Path
    submission: Submission
    user: str
    submitted_s: float
    key: str
    variables: Mapping[str, str] = field(default_factory=dict)
    tasks: dict[int | None, TaskState] = field(default_factory=dict)

    def task_id(self, task: int | None) -> str:
        """As users know it."""
        return str(self.number) if task is None else f"{self.number}_{task}"

    def task_key(self, task: int | None) -> str:
        """The value of `KEY_VARIABLE` for its processes."""
        return f"{self.key}-{'_' if task is None else task}"

    def create(self) -> None:
        """Write what never changes."""
        self.folder.mkdir(mode=0o700)
        script = self.folder / "script"
        script.write_bytes(self.submission.script)
        script.chmod(0o700)
        own = {name: getattr(self, name) for name in _OWN}
        _replace(self.folder / "job.json", _KIND.encode({**self.submission.document(), **own}))

    def save(self) -> None:
        """Write how far its tasks are; `locked`."""
        begun = {task: state for task, state in self.tasks.items() if state != TaskState()}
        tasks = {"_" if task is None else str(task): asdict(state) for task, state in begun.items()}
        _replace(self.folder / "state.json", _KIND.encode({"tasks": tasks}))

    @classmethod
    def load(cls, folder: Path) -> LocalJob:
        """Read it; FileNotFoundError if there is none, ClusterError if it cannot be read."""
        path = folder / "job.json"
        try:
            fields = _KIND.decode(path.read_bytes(), str(path)).plain()
            submission = Submission.of(fields, (folder / "script").read_bytes())
            own = {name: fields[name] for name in _OWN if name != "variables" or name in fields}
            job = cls(number=int(folder.name), folder=folder, submission=submission, **own)
            path = folder / "state.json"
            with contextlib.suppress(FileNotFoundError):
                states = _KIND.decode(path.read_bytes(), str(path)).plain()["tasks"]
                for name, state in msgspec.convert(states, dict[str, TaskState]).items():
                    job.tasks[None if name == "_" else int(name)] = state
        except (FileNotFoundError, NotADirectoryError) as e:
            raise FileNotFoundError(str(folder)) from e
        except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as e:
            raise ClusterError(
                f"{path}: the local job cannot be read: {e!r}.",
                path=str(path),
                next_step=_KIND.next_step,
            ) from e
        numbers = (None,) if job.request.tasks is None else job.request.tasks
        job.tasks = {task: job.tasks.get(task) or TaskState() for task in numbers}
        return job


class JobsFolder:
    """All jobs of a user."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @classmethod
    def of_user(cls, environment: Mapping[str, str] = os.environ) -> JobsFolder:
        """This user's on this machine; home folders are often shared between machines, processes are not."""
        if given := environment.get(FOLDER_VARIABLE):
            return cls(Path(given))
        return cls(state_folder(environment) / "jobs" / socket.gethostname())

    def open(self) -> None:
        """Makes it, and sees that it is ours alone: jobs' environments lie in it."""
        next_step = f"Name another folder in {FOLDER_VARIABLE}."
        what = "the folder of local jobs cannot be made"
        with explained(ClusterError, self.path, what, next_step):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            own_folder(self.path, ClusterError, next_step)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else numbers, starts or changes jobs meanwhile."""
        fd = lock_path(self.path / "lock", wait_s=None)
        assert fd is not None
        try:
            yield
        finally:
            os.close(fd)

    def next_number(self) -> int:
        """A number that no job has had, in any folder of this user's on this machine; `locked`."""
        place = Path("/var/tmp")  # noqa: S108 - the file is seen to be ours
        place = place if os.access(place, os.W_OK) else self.path
        fd = lock_path(place / f"headrace-jobs-{os.geteuid()}", wait_s=None, owned=True)
        assert fd is not None
        with os.fdopen(fd, "r+b") as shared:
            own = self.path / "next"  # that one may be gone after a while
            texts = (shared.read(), own.read_bytes() if own.exists() else b"")
            numbers = [1 + number for number in self.numbers()]
            number = max([1, *numbers, *(int(text) for text in texts if text.strip().isdigit())])
            shared.seek(0)
            shared.write(b"%d\n" % (number + 1))
            _replace(own, b"%d\n" % (number + 1))
        return number

    def jobs(self, *, clear: bool = False) -> list[LocalJob]:
        """All that are not over, oldest first; with `clear`, `locked`, those over long ago are removed."""
        jobs = []
        for folder in (self.path / str(number) for number in self.numbers()):
            with contextlib.suppress(FileNotFoundError):
                if not (folder / "over").exists():
                    jobs.append(LocalJob.load(folder))
                elif clear and (folder / "over").stat().st_mtime < time.time() - KEPT_S:
                    shutil.rmtree(folder, ignore_errors=True)
        return jobs

    def numbers(self) -> list[int]:
        """Of all jobs, ascending."""
        entries = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(int(entry.name) for entry in entries if entry.name.isdigit())
