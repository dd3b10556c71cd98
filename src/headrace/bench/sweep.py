"""Sweep: how many accelerators a storage feeds: the greatest number at which a condition does not hold yet.

More accelerators ask for more, so that utilisation only falls: the number is doubled until the condition
holds, and bisected below. Nothing is run with many more accelerators than are fed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from headrace.base.job import which_rank
from headrace.bench.compare import MEASURES, value_of
from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.results import default_folder
from headrace.bench.run import SessionOptions, plans_of
from headrace.bench.session import run_session
from headrace.errors import BenchError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.bench.compare import Condition
    from headrace.bench.config import LoadedWorkload

_STEPS_LEAST: Final = 3
"""Steps of an epoch that count; with fewer, what was read ahead before the first is most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A run with one number of accelerators; `over`: the condition holds, so that many are not fed."""

    accelerators: int
    value: float
    over: bool
    bound: str
    bound_reason: str
    folder: str
    measures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep found.

    Attributes:
        most: the greatest number that is fed; None: not even the least.
        probes: all runs, by the number of accelerators.
        range: the least and the greatest number that were asked for.
    """

    most: int | None
    probes: tuple[Probe, ...]
    range: tuple[int, int]

    @property
    def limit(self) -> str:
        """What bounds the run with the least number that is not fed; `none` where all are."""
        over = [probe for probe in self.probes if probe.over]
        return over[0].bound if over else "none"

    @property
    def answer(self) -> str:
        """In a sentence."""
        over = [probe for probe in self.probes if probe.over]
        if not over:
            return f"this storage feeds at least {self.range[1]} accelerators"
        number = f"fewer than {self.range[0]}" if self.most is None else f"{self.most}"
        noun = "accelerator" if number == "1" else "accelerators"
        if self.limit == "harness":
            return (
                f"this host emulates {number} {noun}; with {over[0].accelerators} the harness was the "
                "limit, so this says nothing of the storage"
            )
        answer = f"this storage feeds {number} {noun}"
        if self.limit == "unknown":
            answer += ", if the harness was not the limit: no ceiling was measured"
        return answer


def most_before(over: Callable[[int], bool], least: int, greatest: int) -> int | None:
    """The greatest number in a range that is not over, if those that are come after those that are not.

    Returns:
        None if even the least is over.
    """
    good, bad = None, greatest + 1
    at = least
    while good is None or bad - good > 1:
        if over(at):
            bad = at
            if at == least:
                return None
        else:
            good = at
        assert good is not None
        # Doubled until the first that is over, halved from then on.
        at = (good + bad) // 2 if bad <= greatest else min(2 * good, greatest)
    return good


def sweep(
    words: Sequence[str],
    numbers: tuple[int, int],
    until: Condition,
    options: SessionOptions,
    progress: Callable[[Probe], None] | None = None,
) -> Sweep:
    """Run a workload with different numbers of accelerators.

    Raises:
        WorkloadError: the workload is wrong, or its data set too small for the greatest number.
        BenchError: there are several ranks, or a run has not what the condition is about.
    """
    least, greatest = numbers
    if which_rank().world_size > 1:
        raise BenchError(
            "a sweep is one process's: it changes the number of accelerators that ranks cannot change.",
            next_step="Run it outside of torchrun, srun and mpirun.",
        )
    line = parse_command_line(words)
    loaded = load_workload(line)
    if not loaded.workload.workflow.train:
        raise WorkloadError(f"workload={line.workload} does not train: there is nothing to sweep.")
    _check_steps(loaded, greatest)
    folder = default_folder(line, loaded)
    probes: list[Probe] = []

    def over(accelerators: int) -> bool:
        run_folder = os.path.join(folder, f"{accelerators:04d}-accelerators")
        more = [f"++hydra.run.dir={run_folder}", f"++workload.output.folder={run_folder}"]
        if probes:  # the first has generated it
            more.append("++workload.workflow.generate_data=False")
        report = run_session([*words, *more], replace(options, accelerators=accelerators))
        assert report.summary is not None
        probes.append(_probe(accelerators, report.summary, run_folder, until))
        if progress is not None:
            progress(probes[-1])
        return probes[-1].over

    most = most_before(over, least, greatest)
    return Sweep(most, tuple(sorted(probes, key=lambda probe: probe.accelerators)), numbers)


def _check_steps(loaded: LoadedWorkload, accelerators: int) -> None:
    """Refuse a data set that leaves too few steps to the greatest number: its AU would be chance, or 0."""
    steps = plans_of(loaded, accelerators)["train"].steps
    output = loaded.workload.output
    counted = steps - output.metric_exclude_start_steps - output.metric_exclude_end_steps
    if counted < _STEPS_LEAST:
        raise WorkloadError(
            f"{accelerators} accelerators have {steps} steps an epoch, of which {max(0, counted)} count: "
            f"expected at least {_STEPS_LEAST}.",
            next_step="Generate more files (dataset.num_files_train), or sweep to fewer accelerators.",
        )


def _probe(accelerators: int, summary: dict[str, Any], folder: str, until: Condition) -> Probe:
    measures = {each.name: value_of(summary, each) for each in MEASURES}
    value = measures[until.measure.name]
    if value is None:
        raise BenchError(
            f"{until.written!r} cannot be told: the run has no {until.measure.name}.", path=folder
        )
    own = summary["headrace"]
    return Probe(
        accelerators=accelerators,
        value=value,
        over=until.holds(value),
        bound=own["bound"],
        bound_reason=own["bound_reason"],
        folder=folder,
        measures={name: value for name, value in measures.items() if value is not None},
    )
