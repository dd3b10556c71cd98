"""`headrace bench sweep`: how many accelerators does this storage feed?"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output, Quiet

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.bench.compare import Condition
    from headrace.bench.sweep import Probe, Sweep

__all__ = ["sweep"]


def sweep(
    context: typer.Context,
    workload: Annotated[str, typer.Argument(help="Its name, as in workload=NAME.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="Overrides, as of `run`.", metavar="WORDS")
    ] = None,
    *,
    accelerators: Annotated[
        str, typer.Option(metavar="LEAST..MOST", help="Emulated in this process.")
    ] = "1..64",
    until: Annotated[
        str, typer.Option(metavar="CONDITION", help="What holds when they are too many.")
    ] = "au<0.9",
    engine: Annotated[str | None, typer.Option(help="What reads, as of `run`.")] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Put the data out of the page cache before each run.")
    ] = False,
    ceiling: Annotated[
        bool, typer.Option(help="Run without storage, too, to tell storage from harness.")
    ] = True,
    barrier: Annotated[str, typer.Option(help="Where they meet: step, or epoch.")] = "step",
    repeats: Annotated[int, typer.Option(min=1, help="Of each run.")] = 1,
    simulate: Annotated[
        str | None, typer.Option(metavar="NAME", help="Simulate a slow storage: lustre, nfs, ...")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Find how many accelerators the storage feeds: double their number, then bisect."""
    from headrace.bench.compare import condition_of
    from headrace.bench.run import RunOptions
    from headrace.bench.session import SessionOptions
    from headrace.bench.sweep import sweep as sweep_runs
    from headrace.cli.progress import progress
    from headrace.io.simulation import simulation_of

    if barrier not in ("step", "epoch"):
        raise typer.BadParameter(f"--barrier is {barrier!r}, expected step or epoch")
    if simulate is not None:
        simulation_of(simulate)
    numbers, condition = _numbers(accelerators), condition_of(until, changes=False)
    output = Output(as_json=as_json, quiet=quiet)
    given = [workload if "=" in workload else f"workload={workload}", *(words or []), *context.args]
    if engine is not None:
        given.append(f"++workload.reader.engine={engine}")
    options = SessionOptions(
        run=RunOptions(barrier=barrier, simulate=simulate),  # type: ignore[arg-type]  # checked above
        cold=cold, ceiling=ceiling, repeats=repeats,
    )  # fmt: skip

    def told(probe: Probe) -> None:
        output.remark(_probe_line(probe, condition))

    with progress(output, "sweeping", "steps") as tell:
        if tell is not None:
            options = replace(options, progress=_Steps(tell).report)
        found = sweep_runs(given, numbers, condition, options, told)
    _print(output, found, condition, simulate)
    return exit_codes.FINDING if found.most is None else exit_codes.OK


class _Steps:
    """Steps of one run after the other, as the progress of one work: each run counts from 0."""

    def __init__(self, tell: Callable[[int, int | None, int, int | None], None]) -> None:
        self._tell = tell
        self._before = 0
        self._last = 0

    def report(self, _: str, done: int, total: int | None) -> None:
        if done < self._last:
            self._before += self._last
        self._last = done
        self._tell(self._before + done, None if total is None else self._before + total, 0, None)


def _numbers(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.|-)\s*(\d+)\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter(f"--accelerators is {text!r}, expected LEAST..MOST, as 1..64")
    return int(match[1]), int(match[2])


def _probe_line(probe: Probe, condition: Condition) -> str:
    from headrace.pages.text import measure_text

    name = condition.measure.name
    value = measure_text(probe.value, condition.measure.unit)
    fed = "too many" if probe.over else "fed"
    noun = "accelerator" if probe.accelerators == 1 else "accelerators"
    return f"{probe.accelerators} {noun}: {name} {value}: {fed}"


def _print(output: Output, found: Sweep, condition: Condition, simulate: str | None) -> None:
    from headrace.bench.report import NOT_MLPERF
    from headrace.pages.text import measure_text

    if output.as_json:
        output.document({
            "answer": found.answer, "most": found.most, "limit": found.limit,
            "until": condition.written, "least_asked": found.range[0],
            "greatest_asked": found.range[1], "simulated": simulate,
            "probes": list(found.probes), "not_mlperf": NOT_MLPERF,
        })  # fmt: skip
        return
    cells: list[tuple[Any, ...]] = [("accelerators", "AU", "samples/s", "MiB/s", "bound by", "")]
    for probe in found.probes:
        values = [
            measure_text(probe.measures[name], unit) if name in probe.measures else "-"
            for name, unit in (("au", "%"), ("throughput", ""), ("io", ""))
        ]
        cells.append((
            str(probe.accelerators), *values, probe.bound, "too many" if probe.over else "fed",
        ))  # fmt: skip
    widths = [max(len(line[at]) for line in cells) for at in range(6)]
    for line in cells:
        output.line("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    over = [probe for probe in found.probes if probe.over]
    if over:
        output.line(f"with {over[0].accelerators}: {over[0].bound_reason}")
    if simulate is not None:
        output.line(f"simulated {simulate}: the delays are not real")
    output.line(f"{found.answer} (until {condition.written})")
    output.line(NOT_MLPERF)
