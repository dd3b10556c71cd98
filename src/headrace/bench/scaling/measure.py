"""Measure: submits a project's batch script once for each number of ranks, one after the other.

What runs is what the user runs: the script as it is, with its size given on the command line, a checkpoint
folder of its own and the user's arguments. One job at a time: two would take each other's disk and cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.scaling.lines import read_epochs
from headrace.bench.scaling.table import ScalingRun
from headrace.cluster.executor import Submission
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.cluster.executor import Executor, JobStatus

__all__ = ["ScalingOptions", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """What to run, and how large.

    Raises:
        ValueError: a number of ranks is impossible, or given twice.
    """

    project: Path
    """The folder in which the script runs."""

    ranks: tuple[int, ...] = (1, 2, 4, 8)

    script: str = "job.sh"
    """In the project; it must hand its arguments on to the training script."""

    out: Path = Path("scaling")
    """A new folder for logs, checkpoints and the table."""

    ranks_per_node: int = 4
    """At most; a size that is no multiple of it takes the next smaller divisor."""

    gpus: bool = False
    """Ask for a GPU for each rank."""

    options: tuple[str, ...] = ()
    """More of sbatch's, as "--partition=gpu"."""

    arguments: tuple[str, ...] = ()
    """Of the script."""

    timeout_s: float | None = None
    """How long to wait for one job, queueing included; None: for ever."""

    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) < len(self.ranks) or min(self.ranks) < 1:
            raise ValueError(f"ranks is {self.ranks}, expected some different numbers from 1 up")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}, expected 1 or more")

    def layout(self, ranks: int) -> tuple[int, int]:
        """Nodes, and ranks on each of them."""
        each = max(n for n in range(1, self.ranks_per_node + 1) if ranks % n == 0)
        return ranks // each, each


def measure(
    executor: Executor,
    options: ScalingOptions,
    tell: Callable[[ScalingRun], None] = lambda _run: None,
) -> Iterator[ScalingRun]:
    """Run each size, the smallest first, and yield what happened.

    Args:
        executor: that runs the jobs.
        options: what to run.
        tell: called when a job was submitted, with a run that has no epochs yet.

    Raises:
        BenchError: there is no such script, or the folder for results has something in it.
        ClusterError: a job cannot be submitted, or is lost.
    """
    script = _script_of(options)
    out = options.out.absolute()
    if out.exists() and any(out.iterdir()):
        raise BenchError(
            f"{out}: has something in it already, expected a new folder.",
            path=str(out),
            next_step="Name another one: --out.",
        )
    return _runs(executor, options, script, out, tell)


def _runs(
    executor: Executor,
    options: ScalingOptions,
    script: bytes,
    out: Path,
    tell: Callable[[ScalingRun], None],
) -> Iterator[ScalingRun]:
    for ranks in sorted(options.ranks):
        folder = out / f"ranks-{ranks}"
        folder.mkdir(parents=True)
        yield _run(executor, options, script, (ranks, folder), tell)


def _script_of(options: ScalingOptions) -> bytes:
    path = options.project / options.script
    try:
        return path.read_bytes()
    except OSError as e:
        raise BenchError(
            f"{path}: the batch script cannot be read: {e.strerror}.",
            path=str(path),
            next_step="Name the project's folder; `headrace init NAME` makes one.",
        ) from e


def _run(
    executor: Executor,
    options: ScalingOptions,
    script: bytes,
    size: tuple[int, Path],
    tell: Callable[[ScalingRun], None],
) -> ScalingRun:
    ranks, folder = size
    nodes, each = options.layout(ranks)
    log = folder / "job.log"
    submission = Submission(
        script,
        (
            f"--nodes={nodes}",
            f"--ntasks-per-node={each}",
            *((f"--gpus-per-node={each}",) if options.gpus else ()),
            f"--job-name=scaling-{ranks}",
            f"--output={log}",
            *options.options,
        ),
        ("--checkpoints", str(folder / "checkpoints"), *options.arguments),
        options.project.absolute(),
        options.environment,
    )
    began = time.monotonic()
    job_id = executor.submit(submission)
    tell(ScalingRun(ranks, nodes, job_id, "PENDING", 0.0, (), str(log)))
    try:
        ended = executor.wait([job_id], options.timeout_s)[job_id]
    except BaseException:
        executor.cancel([job_id])  # nobody would look at what it still does
        raise
    waited = time.monotonic() - began
    status = ended[0] if ended else None
    text = b"".join(executor.logs(job_id)).decode(errors="replace")
    state = "UNKNOWN" if status is None else str(status.state)
    epochs = read_epochs(text)
    return ScalingRun(ranks, nodes, job_id, state, _wall_s(status, waited), epochs, str(log))


def _wall_s(status: JobStatus | None, waited: float) -> float:
    """By the executor's clock; it counts whole seconds in places, so never below what was printed."""
    if status is None or status.started_s is None or status.ended_s is None:
        return waited
    return max(status.ended_s - status.started_s, 0.0)
