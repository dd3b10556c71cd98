"""Table: runs of one job on different numbers of ranks beside each other, speed never without accuracy.

A run that is faster because it learns less is no faster: a row whose accuracy falls behind the first one's by
more than the tolerance is flagged, however good its throughput looks.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.scaling.lines import EpochLine

__all__ = ["TOLERANCE", "Row", "ScalingRun", "Split", "Table", "scaling_table"]

TOLERANCE = 0.01
"""Accuracy may fall by a point: seeds alone move ResNet-50's by a few tenths."""


@dataclass(frozen=True, slots=True)
class ScalingRun:
    """What happened at one size.

    Attributes:
        ranks: processes that trained.
        nodes: that they ran on; 1 under the local executor.
        job_id: the executor's.
        state: how the job ended, in Slurm's words.
        wall_s: from the job's start to its end.
        epochs: that it told of.
        log: where it wrote.
    """

    ranks: int
    nodes: int
    job_id: str
    state: str
    wall_s: float
    epochs: tuple[EpochLine, ...]
    log: str = ""


@dataclass(frozen=True, slots=True)
class Split:
    """Where the wall time went, in seconds; the parts add up to it."""

    waiting_s: float
    """For data."""
    computing_s: float
    """Steps, with the ranks' talk among each other."""
    saving_s: float
    evaluating_s: float
    other_s: float
    """Starting processes, imports, meeting, ending."""


@dataclass(frozen=True, slots=True)
class Row:
    """One size of the table; None where the run does not say.

    Attributes:
        ranks: processes that trained.
        nodes: that they ran on.
        state: how the job ended.
        wall_s: its wall time.
        whole_per_s: samples a second over the whole wall time.
        training_per_s: samples a second in the median epoch.
        efficiency: training throughput for each rank, against the first row's.
        whole_efficiency: the same of the whole wall time.
        accuracy: after the last epoch, 0 to 1.
        accuracy_fell: it is behind the first row's by more than the tolerance.
        reads_per_s: while training.
        bytes_per_s: likewise.
        split: of the wall time.
        log: the job's.
    """

    ranks: int
    nodes: int
    state: str
    wall_s: float
    whole_per_s: float | None
    training_per_s: float | None
    efficiency: float | None
    whole_efficiency: float | None
    accuracy: float | None
    accuracy_fell: bool
    reads_per_s: float | None
    bytes_per_s: float | None
    split: Split | None
    log: str


@dataclass(frozen=True, slots=True)
class Table:
    """All sizes, and what must be said of them."""

    rows: tuple[Row, ...]
    tolerance: float
    epochs: int
    """Of the run with the most."""
    findings: tuple[str, ...]
    """Sizes that failed, and sizes that learned less."""


def scaling_table(runs: Sequence[ScalingRun], tolerance: float = TOLERANCE) -> Table:
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
    done = [run for run in runs if _is_whole(run, epochs)]
    first = done[0] if done else None
    rows = tuple(_row(run, first if run in done else None, tolerance) for run in runs)
    return Table(rows, tolerance, epochs, _findings(rows, runs, epochs))


def _is_whole(run: ScalingRun, epochs: int) -> bool:
    return run.state == "COMPLETED" and len(run.epochs) == epochs > 0


def _row(run: ScalingRun, first: ScalingRun | None, tolerance: float) -> Row:
    if first is None:
        nothing = (None, None, None, None, None, False, None, None, None)
        return Row(run.ranks, run.nodes, run.state, run.wall_s, *nothing, run.log)
    accuracy = run.epochs[-1].accuracy
    return Row(
        run.ranks,
        run.nodes,
        run.state,
        run.wall_s,
        _whole_per_s(run),
        _training_per_s(run),
        _training_per_s(run) / run.ranks / (_training_per_s(first) / first.ranks),
        _whole_per_s(run) / run.ranks / (_whole_per_s(first) / first.ranks),
        accuracy,
        # A hair's breadth of room: 0.75 - 0.74 is more than 0.01.
        first.epochs[-1].accuracy - accuracy > tolerance + 1e-9,
        _per_s(run, [epoch.reads for epoch in run.epochs]),
        _per_s(run, [epoch.bytes for epoch in run.epochs]),
        _split(run),
        run.log,
    )


def _whole_per_s(run: ScalingRun) -> float:
    return sum(epoch.samples for epoch in run.epochs) / max(run.wall_s, 1e-9)


def _training_per_s(run: ScalingRun) -> float:
    return statistics.median(epoch.samples / epoch.seconds for epoch in run.epochs)


def _per_s(run: ScalingRun, counts: Sequence[int | None]) -> float | None:
    told = [count for count in counts if count is not None]
    if len(told) < len(run.epochs):
        return None
    return sum(told) / sum(epoch.seconds for epoch in run.epochs)


def _split(run: ScalingRun) -> Split:
    """Parts that add up to the wall time, whatever a script says of itself."""
    seconds = sum(epoch.seconds for epoch in run.epochs)
    waiting = min(sum(epoch.waited_s for epoch in run.epochs), seconds)
    saving = min(sum(epoch.saved_s for epoch in run.epochs), seconds - waiting)
    evaluating = sum(epoch.evaluated_s for epoch in run.epochs)
    other = max(0.0, run.wall_s - seconds - evaluating)
    return Split(waiting, seconds - waiting - saving, saving, evaluating, other)


def _findings(rows: Sequence[Row], runs: Sequence[ScalingRun], epochs: int) -> tuple[str, ...]:
    first = next((row for row in rows if row.accuracy is not None), None)
    found = []
    for row, run in zip(rows, runs, strict=True):
        where = f"{row.ranks} rank{'s' if row.ranks > 1 else ''}"
        if row.accuracy is None:
            found.append(
                f"{where}: the job ended as {row.state} after {len(run.epochs)} of {epochs} epochs: "
                f"{row.log or 'no log'}"
            )
        elif row.accuracy_fell and first is not None and first.accuracy is not None:
            fall = 100 * (first.accuracy - row.accuracy)
            found.append(
                f"{where}: accuracy is {row.accuracy:.2%}, {fall:.2f} points below the "
                f"{first.accuracy:.2%} of {first.ranks}: its throughput is not of the same training"
            )
    return tuple(found)
