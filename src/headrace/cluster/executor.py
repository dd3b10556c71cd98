"""Executor: where jobs run: Slurm, Ray, Kubernetes, or this machine's processes; the same calls everywhere."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.cluster.snapshot import ClusterSnapshot

T = TypeVar("T")


class SchedulerUnavailable(ClusterError):
    """The scheduler is away or too busy: the same may work a little later."""


class JobState(StrEnum):
    """Slurm's words for what became of a job; other executors use the same."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    REQUEUED = "REQUEUED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    UNKNOWN = "UNKNOWN"
    """The executor does not know the job, or not any more."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will come after it."""
        return self in _OVER


WAITING = frozenset({JobState.PENDING, JobState.REQUEUED})
ON_NODES = frozenset(
    {JobState.CONFIGURING, JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED}
)
_OVER = frozenset(JobState) - WAITING - ON_NODES - {JobState.UNKNOWN}
_ENDED_BY_ORDER = {JobState.CANCELLED, JobState.TIMEOUT, JobState.PREEMPTED}


@dataclass(frozen=True, slots=True)
class Submission:
    """What is submitted.

    Attributes:
        script: the whole text, as `sbatch` would read it, directives included; it begins with `#!`.
        options: of `sbatch`, long and with their values joined ("--nodes=2"); they win over directives.
        environment: to be set on top of the caller's.
        cluster: for which it was laid out; "" if for none.
        image: of the container that runs the script, where the executor starts it; "" where the script does.
    """

    script: bytes
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    directory: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    cluster: str = ""
    image: str = ""

    def document(self) -> dict[str, Any]:
        """As plain values, but for the script."""
        return {
            "options": self.options, "arguments": self.arguments, "environment": dict(self.environment),
            "directory": self.directory and str(self.directory), "cluster": self.cluster, "image": self.image,
        }  # fmt: skip

    @classmethod
    def of(cls, document: Mapping[str, Any], script: bytes) -> Submission:
        """What `document` gave; KeyError, TypeError or ValueError where it is something else."""
        options, arguments = (tuple(map(str, document[name])) for name in ("options", "arguments"))
        directory = document["directory"]
        return cls(
            script, options, arguments, Path(directory) if directory else None,
            dict(document["environment"]), document.get("cluster", ""), document.get("image", ""),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What is known of a job, or of one task of an array.

    Attributes:
        job_id: as the executor prints it ("17", "17_3" for a task of an array).
        reason: why it waits or ended, in the executor's words; "" if none is known.
        nodes: that it has or had.
        exit_code: of the script; None until it is known, and where a signal ended it.
        signal: that ended the script.
        submitted_s, started_s, ended_s: Unix seconds; a start in the future is an expected one.
        output: where its standard output goes, with all patterns filled in; None if unknown.
        folder: its working directory; None if unknown.
        cause, resumed: what `headrace launch` says of its end, and from where it went on; "" if nothing.
    """

    job_id: str
    name: str
    state: JobState
    reason: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    restarts: int = 0
    submitted_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    output: Path | None = None
    folder: Path | None = None
    cause: str = ""
    resumed: str = ""

    def with_run(self) -> JobStatus:
        """With what the launch in the job has written of itself, where that can be read here."""
        from headrace.cluster.manifest import told_by_run  # which stands on this module

        if self.folder is None or self.state in {JobState.PENDING, JobState.UNKNOWN}:
            return self
        words = told_by_run(
            self.folder, self.job_id, self.restarts, self.submitted_s or 0.0, self.ended_s
        )
        return replace(
            self, cause=words.cause or self.cause, resumed=words.resumed or self.resumed,
            nodes=words.nodes if words.nodes and {*words.nodes} <= {*self.nodes} else self.nodes,
        )  # fmt: skip

    @property
    def why(self) -> str:
        """Why it waits, or how it ended, in words; "" where its state says all."""
        from headrace.cluster.snapshot import reason_text  # which stands on this module

        if self.state in WAITING:
            return reason_text(self.reason)
        if not self.state.is_over:
            return self.reason
        if self.cause and self.state is not JobState.COMPLETED:
            return self.cause
        if self.state in _ENDED_BY_ORDER and signal.SIGTERM in {
            self.signal,
            (self.exit_code or 0) - 128,
        }:
            return ""  # as it was asked to
        if self.exit_code:
            number = self.exit_code - 128
            killed = f": {signal_text(number)}" if 0 < number < 65 else ""
            return f"exit code {self.exit_code}{killed}"
        return signal_text(self.signal) if self.signal else ""

    @property
    def went_wrong(self) -> bool:
        """Whether it is over, and neither done nor cancelled."""
        return self.state in _OVER - {JobState.COMPLETED, JobState.CANCELLED, JobState.UNKNOWN}


def signal_text(number: int) -> str:
    """What a signal that ended a program means."""
    text = f"killed by signal {number}"
    return f"{text}, often out of memory" if number == signal.SIGKILL else text


class Executor(ABC):
    """Submits jobs and looks after them.

    Every call ends within a stated time and raises `ClusterError` with what the executor said.
    """

    name: str
    poll_s: tuple[float, float, float]
    """The first and the longest pause between two looks at jobs, and how much longer each is than the last."""

    outage_s: float = 0.0
    """How long `wait` and `logs` bear that a scheduler does not answer."""

    seen: Mapping[str, JobStatus] = MappingProxyType({})
    """What is remembered of jobs, by their ids."""

    gone: str
    """Why a job is not known, or not any more."""

    not_known: tuple[str, str | None]
    """The error where somebody asks for such a job, and what to do next."""

    output_not_known: str = ""
    """The error where a job's output file is not known; "": it will be, once the job begins."""

    output_hint: str | None = None
    """Where else to look for output that cannot be read."""

    @abstractmethod
    def submit(self, submission: Submission) -> str:
        """Queue a job (or array, or one that depends on others: by its options); its id."""

    @abstractmethod
    def status(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        """By id asked for; an array has an entry for each task. A job that is not known has none."""

    @abstractmethod
    def cancel(self, job_ids: Sequence[str], signal: int | None = None) -> None:
        """End jobs, or only send their scripts a signal. Jobs that are over already are no error."""

    @abstractmethod
    def own(self) -> list[str]:
        """The jobs of this user that are known, oldest first; some of them are over."""

    @abstractmethod
    def submission(self, job_id: str) -> Submission:
        """What was submitted as this job, all of it; ClusterError where that is not known."""

    @abstractmethod
    def snapshot(self, *, jobs: bool = False) -> ClusterSnapshot:
        """The cluster as it is now; with `jobs`, who has what of it and who waits for what."""

    def resubmit(self, job_id: str) -> str:
        """Submit a job that is over once more, or one task of an array; the new job's id.

        Raises:
            ClusterRequestError: it is not over yet.
            ClusterError: what was submitted is not known any more, or cannot be submitted now.
        """
        task = self.task_of(job_id)
        unfinished = [s for s in self.status([job_id])[job_id] if not s.state.is_over]
        if unfinished:
            raise ClusterRequestError(
                f"job {unfinished[0].job_id} is {unfinished[0].state}: a second one would "
                "write the same files.",
                next_step=f"Cancel it first: headrace cluster cancel {job_id}.",
            )
        again = self.submission(job_id)
        tasks = () if task is None else (f"--array={task}",)
        return self.submit(replace(again, options=(*again.options, *tasks)))

    def task_of(self, job_id: str) -> str | None:
        """Which task of an array it is; None: all of a job. ClusterRequestError where it is no job's id."""
        return split_id(job_id)[1]

    def preview(self, submission: Submission) -> bytes:
        """What `submit` would hand over."""
        return submission.script

    def lost(self, job_id: str) -> JobStatus:
        """The status of a job that is not known, or not any more."""
        last = self.seen.get(job_id) or JobStatus(job_id, "", JobState.UNKNOWN)
        return replace(last, state=JobState.UNKNOWN, reason=self.gone)

    def known(self, job_ids: Sequence[str]) -> Sequence[str]:
        """The jobs, all of which are known; ClusterError names the first that is not."""
        for job_id, statuses in self.status(job_ids).items():
            if not statuses:
                raise ClusterError(self.not_known[0].format(job_id), next_step=self.not_known[1])
        return job_ids

    def wait(
        self,
        job_ids: Sequence[str],
        timeout_s: float | None = None,
        enough: Callable[[], bool] = bool,
    ) -> dict[str, list[JobStatus]]:
        """Return when all are over, or not known any more; or when it is `enough`.

        Raises:
            ClusterTimeout: some are not, after so long.
            ClusterError: the scheduler was away for longer than `outage_s`.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        patience = _Patience(self)
        while True:
            states = [f"{self.name.capitalize()} is away"]
            if (known := patience.look(lambda: self.status(job_ids))) is not None:
                statuses = {
                    job_id: of_job or [self.lost(job_id)] for job_id, of_job in known.items()
                }
                every = [status for of_job in statuses.values() for status in of_job]
                states = [
                    f"{s.job_id} is {s.state}" + (f" ({s.why})" if s.why else "")
                    for s in every if not s.state.is_over and s.state is not JobState.UNKNOWN
                ]  # fmt: skip
                if not states or enough():
                    return statuses
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                text = ", ".join(states[:5])
                raise ClusterTimeout(f"not all jobs are over after {timeout_s:g} s: {text}.")
            time.sleep(min(patience.left_s, left_s))

    def one(self, job_id: str) -> JobStatus:
        """The status of a job that is no array."""
        known = self.status(self.known([job_id]))[job_id]
        if len(known) > 1:
            raise ClusterRequestError(
                f"job {job_id} is an array of {len(known)} tasks; each has an output of its own.",
                next_step=f"Name one: {known[0].job_id}.",
            )
        return known[0]

    def logs(  # noqa: C901 - one loop
        self, job_id: str, *, follow: bool = False, lines: int | None = None
    ) -> Iterator[bytes]:
        """What the job printed, or its last lines, piece by piece; with `follow` until it is over.

        The file may come late. If it is shorter than what was read (a job that was requeued writes anew), it is
        read from its beginning.

        Raises:
            ClusterRequestError: it is an array; its tasks have logs.
            ClusterError: the job, or its output, is not known, or cannot be read here.
        """
        status, position, over = self.one(job_id), 0, False
        patience = _Patience(self)
        while True:
            if follow and not patience.left_s:
                known = patience.look(lambda: self.status([job_id])[job_id])
                over = known is not None and all(one.state.is_over for one in known)
            if status.output is None:
                if self.output_not_known:
                    raise ClusterError(self.output_not_known.format(job_id))
                status = self.one(job_id)
            try:
                if status.output is not None:
                    if lines:
                        position, lines = _begin_of_last(status.output, lines), None
                    elif status.output.stat().st_size < position:
                        position = 0
                    with status.output.open("rb") as f:
                        f.seek(position)
                        while piece := f.read(_PIECE_BYTES):
                            position += len(piece)
                            yield piece
            except OSError as e:
                is_late = isinstance(e, FileNotFoundError)
                if not is_late or (not follow and self.one(job_id).state.is_over):
                    why = "it is not there" if is_late else e.strerror
                    raise ClusterError(
                        f"{status.output}: the output of job {status.job_id} cannot be read here: "
                        f"{why}. {status.reason}".rstrip(),
                        path=str(status.output), next_step=self.output_hint,
                    ) from e  # fmt: skip
            if over or not follow:
                return
            time.sleep(_POLL_S)


_PIECE_BYTES = 1 << 16
_POLL_S = 0.1


def _begin_of_last(path: Path, lines: int) -> int:
    """Where the last so many lines of a file begin."""
    with path.open("rb") as f:
        end = position = f.seek(0, os.SEEK_END)
        # An end of line that ends the file begins none.
        lines += 1
        while position:
            begin = max(0, position - _PIECE_BYTES)
            f.seek(begin)
            piece = f.read(position - begin)
            if position == end and not piece.endswith(b"\n"):
                lines -= 1
            at = len(piece)
            while (at := piece.rfind(b"\n", 0, at)) >= 0:
                lines -= 1
                if lines == 0:
                    return begin + at + 1
            position = begin
    return 0


class _Patience:
    """Asks a scheduler more and more rarely, and bears that it is away for as long as its executor does."""

    def __init__(self, executor: Executor) -> None:
        self._pause_s, self._longest_s, self._growth = executor.poll_s
        self._outage_s = executor.outage_s
        self._answered_s = time.monotonic()
        self._next_s = 0.0

    @property
    def left_s(self) -> float:
        """Of the pause since the last look."""
        return max(0.0, self._next_s - time.monotonic())

    def look(self, ask: Callable[[], T]) -> T | None:
        """What is answered; None while nobody does."""
        answer = None
        try:
            answer = ask()
            self._answered_s = time.monotonic()
        except (SchedulerUnavailable, ClusterTimeout):
            if time.monotonic() - self._answered_s > self._outage_s:
                raise
        self._next_s = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * self._growth, self._longest_s)
        return answer


_ID = re.compile(r"(\d+)(?:_(\d+)|_\[([\d,:%-]+)\])?\Z")


def split_id(job_id: str) -> tuple[str, str | None]:
    """Of "17_3" the job's number, "17", and the task's, "3"."""
    if (match := _ID.match(job_id)) is None:
        raise ClusterRequestError(
            f"{job_id!r} is no job id, expected a number, or number_task for a task of an array."
        )
    return match[1], match[2] or match[3]


# -- the name of its output file -----------------------------------------------------------------------

_PLACE = re.compile(r"%(\d*)([%AaJjNnstux])")
_WIDTH_MAX = 10


def fill_pattern(
    pattern: str, job_id: str, name: str, user: str, node: str = "", *, number: str = ""
) -> str:
    """The name of a batch script's output file: its step, task and node are the first.

    A letter without a fact stays, numbers are padded to a width, a backslash turns all of it off. `number` is
    that of an array's task, where it has one of its own, as Slurm's have.
    """
    if "\\" in pattern:
        return pattern.replace("\\", "")
    array, _, task = job_id.partition("_")
    number = number or array
    facts = {
        "A": array, "j": number, "J": number, "N": node, "n": "0", "s": "batch", "t": "0",
        "u": user, "x": name, "%": "%", **({"a": task} if task else {}),
    }  # fmt: skip

    def fill(place: re.Match[str]) -> str:
        width, letter = place.groups()
        value = facts.get(letter, place[0])
        return value.zfill(min(int(width), _WIDTH_MAX)) if width and value.isdigit() else value

    return _PLACE.sub(fill, pattern)


# -- which one runs jobs here --------------------------------------------------------------------------

EXECUTOR_VARIABLE = "HEADRACE_EXECUTOR"


ExecutorName = Literal["slurm", "ray", "kubernetes", "local"]


def ray_address() -> str | None:
    """Of a Ray cluster's dashboard, by Ray's own variables."""
    return os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")


def executor_name(name: str | None = None) -> ExecutorName:
    """Which one `executor` gives. Kubernetes must be named: kubectl may be there for other work."""
    named = name or os.environ.get(EXECUTOR_VARIABLE)
    if not named:
        slurm = shutil.which("sbatch") is not None
        # A process of a Ray cluster has there its other address, HOST:PORT, and is no user of its jobs API.
        ray = (ray_address() or "").startswith(("http://", "https://"))
        if slurm and ray:
            raise ClusterRequestError(
                f"sbatch is installed, and {ray_address()} is a Ray cluster: which is meant?",
                next_step="Say --executor slurm or --executor ray, or set HEADRACE_EXECUTOR.",
            )
        return "slurm" if slurm else "ray" if ray else "local"
    if named not in get_args(ExecutorName):
        names = "slurm, ray, kubernetes or local"
        raise ClusterRequestError(f"there is no executor {named!r}, expected {names}.")
    return cast("ExecutorName", named)


def executor(name: str | None = None) -> Executor:
    """The executor of this name; by default HEADRACE_EXECUTOR's, else what `executor_name` chooses."""
    named = executor_name(name)
    module = import_module(f"headrace.cluster.{named}.executor")
    chosen: Executor = getattr(module, f"{named.capitalize()}Executor")()
    return chosen
