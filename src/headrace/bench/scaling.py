"""Scaling: one training job on more and more ranks, speed never without accuracy.

A project's batch script is submitted once for each number of ranks, one after the other: two jobs would
take each other's disk and cores. At the end of each epoch the training script prints one JSON object on a line:

    {"epoch": 0, "samples": 2987, "seconds": 2.3, "accuracy": 0.76, "waited_s": 0.06, ...}

`epoch`, `samples`, `seconds` and `accuracy` are needed; any other program that prints them can be measured
too. A run that is faster because it learns less is no faster: a row whose accuracy falls behind the first
one's by more than the tolerance is flagged, however good its throughput looks.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.text import aligned, counted
from headrace.cluster.executor import Submission
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.cluster.executor import Executor


_LINE_BYTES_MAX = 64 << 10
"""Longer lines are not ours."""


@dataclass(frozen=True, slots=True)
class EpochLine:
    """One epoch, of all ranks together.

    Attributes:
        seconds: from its first request for a batch to the end of its last step.
        accuracy: the share of held-out samples that are right, 0 to 1.
        waited_s: of the seconds, those in which a rank waited for data; the mean of all ranks.
        saved_s: of the seconds, those in which training stood still for a checkpoint.
        evaluated_s: seconds after the last step, for the accuracy.
        reads: of samples, by all ranks; None if the script does not say.
        bytes: that they read; None likewise.
        at_s: when the line was printed, in Unix seconds; None likewise. What passed before the first epoch and
            after the last one is told from it.
    """

    epoch: int
    samples: int
    seconds: float
    accuracy: float
    waited_s: float = 0.0
    saved_s: float = 0.0
    evaluated_s: float = 0.0
    reads: int | None = None
    bytes: int | None = None
    at_s: float | None = None


_NEEDED = ("epoch", "samples", "seconds", "accuracy")
_COUNTS = ("epoch", "samples", "reads", "bytes")


def read_epochs(log: str) -> tuple[EpochLine, ...]:
    """The epochs that a log tells of, in order; one that was told twice, as it was told last.

    A launcher's prefix before the object ("0: {...}", "[rank0]: {...}") is allowed.
    """
    epochs: dict[int, EpochLine] = {}
    for line in log.splitlines():
        begin = line.find("{")
        if begin >= 0 and len(line) <= _LINE_BYTES_MAX and '"epoch"' in line:
            with contextlib.suppress(ValueError):
                if epoch := _epoch_of(json.loads(line[begin:])):
                    epochs[epoch.epoch] = epoch
    return tuple(epochs[number] for number in sorted(epochs))


def _epoch_of(document: Any) -> EpochLine | None:
    if not isinstance(document, dict) or any(document.get(name) is None for name in _NEEDED):
        return None
    values = {
        f.name: document[f.name] for f in fields(EpochLine) if document.get(f.name) is not None
    }
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and value >= 0):
            return None
        values[name] = int(value) if name in _COUNTS else value
    epoch = EpochLine(**values)
    return epoch if epoch.seconds > 0 and epoch.samples > 0 else None


HAL_IMAGES_PER_S = {2: 1582, 4: 3003, 8: 5807, 16: 11265, 32: 19459, 64: 33132}
"""By GPUs, what HAL published for ResNet-50 on ImageNet, 208 images a GPU, February 2020: its median epochs."""

TOLERANCE = 0.01
"""Accuracy may fall by a point: seeds alone move ResNet-50's by a few tenths."""


@dataclass(frozen=True, slots=True)
class ScalingRun:
    """What happened at one size."""

    ranks: int
    nodes: int
    job_id: str
    state: str
    wall_s: float
    epochs: tuple[EpochLine, ...]
    log: str = ""
    started_s: float | None = None
    """In Unix seconds, if the scheduler says so."""


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the wall time went, in seconds; the parts add up to it."""

    waiting_s: float
    """For data."""
    computing_s: float
    """Steps, with the ranks' talk among each other."""
    saving_s: float
    evaluating_s: float
    starting_s: float
    """From the job's start to its first epoch: processes, imports, meeting, resuming. 0 if nobody says."""
    ending_s: float
    """From the last epoch's line to the job's end: the last checkpoint, ranks that leave. 0 likewise."""
    other_s: float
    """Between epochs; all that is not explained."""


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One size of the table; None where the run does not say.

    Attributes:
        whole_per_s: samples a second over the whole wall time.
        training_per_s: samples a second in the median epoch.
        efficiency: training throughput for each rank, against the first row's.
        hal_efficiency: what HAL published for as many GPUs, against as many as the first row has ranks.
        whole_efficiency: the same of the whole wall time.
        accuracy: after the last epoch, 0 to 1.
        accuracy_fell: it is behind the first row's by more than the tolerance.
        reads_per_s: while training.
        bytes_per_s: likewise.
    """

    ranks: int
    nodes: int
    state: str
    wall_s: float
    whole_per_s: float | None = None
    training_per_s: float | None = None
    efficiency: float | None = None
    hal_efficiency: float | None = None
    whole_efficiency: float | None = None
    accuracy: float | None = None
    accuracy_fell: bool = False
    reads_per_s: float | None = None
    bytes_per_s: float | None = None
    split: TimeSplit | None = None
    log: str = ""


@dataclass(frozen=True, slots=True)
class ScalingTable:
    """All sizes, and what must be said of them."""

    rows: tuple[ScalingRow, ...]
    tolerance: float
    epochs: int
    """Of the run with the most."""
    findings: tuple[str, ...]
    """Sizes that failed, and sizes that learned less."""


def scaling_table(runs: Sequence[ScalingRun], tolerance: float = TOLERANCE) -> ScalingTable:
    """Put runs beside each other; the one on the fewest ranks is what the others are held against.

    Args:
        runs: one for each number of ranks; those that failed, too.
        tolerance: how far accuracy may fall, as a share: 0.01 is a point.

    Raises:
        ValueError: there are no runs, or two of one size, or the tolerance is no share.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance is {tolerance}, expected a share from 0 to below 1")
    runs = sorted(runs, key=lambda run: run.ranks)
    sizes = [run.ranks for run in runs]
    if not runs or len(set(sizes)) < len(sizes):
        raise ValueError(f"runs are of {sizes} ranks, expected one run for each of some sizes")
    epochs = max(len(run.epochs) for run in runs)
    done = [r for r in runs if r.state == "COMPLETED" and len(r.epochs) == epochs > 0]
    rows, findings = list[ScalingRow](), list[str]()
    for run in runs:
        where = counted(run.ranks, "rank")
        row = ScalingRow(run.ranks, run.nodes, run.state, run.wall_s, log=run.log)
        if run in done:
            row, best = _measured(run, done[0], tolerance), done[0].epochs[-1].accuracy
            if row.accuracy_fell and row.accuracy is not None:
                findings.append(
                    f"{where}: accuracy is {row.accuracy:.2%}, {100 * (best - row.accuracy):.2f} points "
                    f"below the {best:.2%} of {done[0].ranks}: its throughput is not of the same training"
                )
        else:
            findings.append(
                f"{where}: the job ended as {run.state} after {len(run.epochs)} of {epochs} epochs: "
                f"{run.log or 'no log'}"
            )
        rows.append(row)
    return ScalingTable(tuple(rows), tolerance, epochs, tuple(findings))


def _measured(run: ScalingRun, first: ScalingRun, tolerance: float) -> ScalingRow:
    """The row of a run that ended well, held against the first one."""

    def total(name: str) -> float:
        return float(sum(getattr(epoch, name) for epoch in run.epochs))

    def whole_per_s(run: ScalingRun) -> float:
        return sum(epoch.samples for epoch in run.epochs) / max(run.wall_s, 1e-9)

    def training_per_s(run: ScalingRun) -> float:
        return statistics.median(epoch.samples / epoch.seconds for epoch in run.epochs)

    def against(rate: Callable[[ScalingRun], float]) -> float:
        return rate(run) / run.ranks / (rate(first) / first.ranks)

    def per_s(name: str) -> float | None:
        known = all(getattr(epoch, name) is not None for epoch in run.epochs)
        return total(name) / total("seconds") if known else None

    accuracy, seconds = run.epochs[-1].accuracy, total("seconds")
    # Parts that add up to the wall time, whatever a script says of itself.
    waiting = min(total("waited_s"), seconds)
    saving = min(total("saved_s"), seconds - waiting)
    evaluating = total("evaluated_s")
    other = max(0.0, run.wall_s - seconds - evaluating)
    begun, last = run.epochs[0], run.epochs[-1].at_s
    starting = ending = 0.0
    if run.started_s is not None and begun.at_s is not None and last is not None:
        first_s = begun.at_s - begun.evaluated_s - begun.seconds
        # Slurm's clock has whole seconds.
        starting = min(other, max(0.0, first_s - run.started_s))
        ending = min(other - starting, max(0.0, run.started_s + run.wall_s - last))
    published = [HAL_IMAGES_PER_S.get(each.ranks) for each in (run, first)]
    return ScalingRow(
        ranks=run.ranks, nodes=run.nodes, state=run.state, wall_s=run.wall_s,
        whole_per_s=whole_per_s(run), training_per_s=training_per_s(run),
        efficiency=against(training_per_s), whole_efficiency=against(whole_per_s),
        accuracy=accuracy,
        # A hair's breadth of room: 0.75 - 0.74 is more than 0.01.
        accuracy_fell=first.epochs[-1].accuracy - accuracy > tolerance + 1e-9,
        reads_per_s=per_s("reads"), bytes_per_s=per_s("bytes"),
        split=TimeSplit(
            waiting, seconds - waiting - saving, saving, evaluating, starting, ending,
            other - starting - ending,
        ),
        hal_efficiency=published[0] / run.ranks / (published[1] / first.ranks)
        if published[0] and published[1] else None,
        log=run.log,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """What to run, and how large. Raises ValueError if a number of ranks is impossible, or given twice."""

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

    Raises:
        BenchError: there is no such script, or the folder for results has something in it.
        ClusterError: a job cannot be submitted, or is lost.
    """
    path, out = options.project / options.script, options.out.absolute()
    try:
        script = path.read_bytes()
    except OSError as e:
        raise BenchError(
            f"{path}: the batch script cannot be read: {e.strerror}.",
            path=str(path),
            next_step="Name the project's folder; `headrace init NAME` makes one.",
        ) from e
    if out.exists() and any(out.iterdir()):
        raise BenchError(
            f"{out}: has something in it already, expected a new folder.",
            path=str(out),
            next_step="Name another one: --out.",
        )
    return (
        _run(executor, options, script, ranks, out / f"ranks-{ranks}", tell)
        for ranks in sorted(options.ranks)
    )


def _run(  # noqa: PLR0917 - of `measure`, and which size
    executor: Executor, options: ScalingOptions, script: bytes, ranks: int, folder: Path,
    tell: Callable[[ScalingRun], None],
) -> ScalingRun:  # fmt: skip
    folder.mkdir(parents=True)
    nodes, each = options.layout(ranks)
    log = folder / "job.log"
    gpus = (f"--gpus-per-node={each}",) if options.gpus else ()
    size = (f"--nodes={nodes}", f"--ntasks-per-node={each}", *gpus)
    asked = (*size, f"--job-name=scaling-{ranks}", f"--output={log}", *options.options)
    arguments = ("--checkpoints", str(folder / "checkpoints"), *options.arguments)
    submission = Submission(script, asked, arguments, options.project.absolute())
    began = time.monotonic()
    job_id = executor.submit(submission)
    tell(ScalingRun(ranks, nodes, job_id, "PENDING", 0.0, (), str(log)))
    try:
        ended = executor.wait([job_id], options.timeout_s)[job_id]
    except BaseException:
        executor.cancel([job_id])  # nobody would look at what it still does
        raise
    wall_s = time.monotonic() - began
    status = ended[0] if ended else None
    if status is not None and status.started_s is not None and status.ended_s is not None:
        wall_s = max(status.ended_s - status.started_s, 0.0)
    text = b"".join(executor.logs(job_id)).decode(errors="replace")
    state = "UNKNOWN" if status is None else str(status.state)
    started_s = None if status is None else status.started_s
    return ScalingRun(ranks, nodes, job_id, state, wall_s, read_epochs(text), str(log), started_s)


_HEAD = (
    "ranks", "nodes", "wall s", "samples/s", "training/s", "efficiency", "HAL's", "accuracy",
    "reads/s", "MB/s", "data", "compute", "save", "test", "start", "end", "other",
)  # fmt: skip


def table_text(table: ScalingTable) -> str:
    """The table, what its columns are, and the findings; ends with a line break."""
    lines = aligned([_HEAD, *map(_cells, table.rows)])
    lines += [
        "",
        "",
        f"samples/s: over the whole wall time. training/s: median of {table.epochs} epochs.",
        "efficiency: training/s for each rank, against the first row.",
        "HAL's: efficiency that HAL published for ResNet-50 on ImageNet, on as many GPUs.",
        "data to other: where the wall time went. start: from the job's start to its first epoch, end:",
        "from its last epoch's line to its end; other: between epochs, and all if the lines have no at_s.",
    ]
    lines += [f"! {finding}" for finding in table.findings]
    return "\n".join(lines) + "\n"


def _cells(row: ScalingRow) -> tuple[str, ...]:
    begin = (str(row.ranks), str(row.nodes), f"{row.wall_s:.1f}")
    if row.split is None or row.accuracy is None:
        return (*begin, row.state, *["-"] * (len(_HEAD) - len(begin) - 1))
    parts = astuple(row.split)

    def text(value: float | None, form: str = ",.0f") -> str:
        return "-" if value is None else format(value, form)

    mb_per_s = None if row.bytes_per_s is None else row.bytes_per_s / 1e6
    return (
        *begin, text(row.whole_per_s), text(row.training_per_s), text(row.efficiency, ".1%"),
        text(row.hal_efficiency, ".1%"),
        f"{row.accuracy:.2%}" + (" !" if row.accuracy_fell else "  "),
        text(row.reads_per_s), text(mb_per_s, ".1f"),
        *(f"{part / max(sum(parts), 1e-9):.0%}" for part in parts),
    )  # fmt: skip
