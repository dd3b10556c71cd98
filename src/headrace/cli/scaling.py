"""`headrace scaling`: a project on more and more ranks: how fast, how efficient, and does it still learn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output, Quiet, plain

if TYPE_CHECKING:
    from headrace.bench.scaling import ScalingRun, ScalingTable


def scaling(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT...]", help="Of the batch script, after `--`."),
    ] = None,
    *,
    project: Annotated[Path, typer.Option(help="The project's folder.")] = Path(),
    script: Annotated[str, typer.Option(help="Its batch script.")] = "job.sh",
    ranks: Annotated[str, typer.Option(help="Sizes, separated by commas.")] = "1,2,4,8",
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="At most, on one node. [default: 4; here, all of them]"),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="Ask for a GPU for each rank.")] = False,
    executor: Annotated[
        str | None, typer.Option(help="slurm or local. [default: slurm where sbatch is]")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--sbatch", help="More of sbatch's options: --sbatch=--partition=gpu."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Points that accuracy may fall.")
    ] = 1.0,
    timeout_s: Annotated[
        float | None, typer.Option(min=1.0, help="Wait for each job so long. [default: for ever]")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="A new folder: scaling.json, scaling.svg, logs.")
    ] = Path("scaling"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a project on 1, 2, 4, 8 ranks, one job after the other, and put them beside each other.

    Writes a table (text, JSON) and its figure. Ends with 1 if a size failed, or learned less than the first.
    """
    from headrace.bench.scaling import ScalingOptions, measure, scaling_table
    from headrace.cluster.executors import executor as executor_named

    output = Output(as_json=as_json, quiet=quiet)
    runs_on, sizes = executor_named(executor), _numbers(ranks)
    options = ScalingOptions(
        project=project,
        script=script,
        ranks=sizes,
        out=out,
        ranks_per_node=ranks_per_node or (max(sizes) if runs_on.name == "local" else 4),
        gpus=gpus,
        options=tuple(option or ()),
        arguments=tuple(arguments or ()),
        timeout_s=timeout_s,
    )

    def tell(run: ScalingRun) -> None:
        output.remark(f"ranks: {run.ranks}, nodes: {run.nodes}, job {run.job_id}, {run.log}")

    runs = list(measure(runs_on, options, tell))
    table = scaling_table(runs, tolerance / 100)
    _write(out, table, f"{project.absolute().name}: {table.epochs} epochs")
    _print(output, out, table)
    return exit_codes.FINDING if table.findings else exit_codes.OK


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"--ranks is {text!r}, expected numbers like 1,2,4,8")
    return tuple(int(word) for word in words)


def _document(table: ScalingTable) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(table)


def _write(out: Path, table: ScalingTable, title: str) -> None:
    from headrace.bench.scaling import table_text
    from headrace.bench.scaling_figure import figure_svg

    text = json.dumps(_document(table), indent=2, default=plain)
    (out / "scaling.json").write_text(text + "\n", "utf-8")
    (out / "scaling.svg").write_text(figure_svg(table, title), "utf-8")
    (out / "scaling.txt").write_text(table_text(table), "utf-8")


def _print(output: Output, out: Path, table: ScalingTable) -> None:
    from headrace.bench.scaling import table_text

    if output.as_json:
        output.document(_document(table) | {"figure": out / "scaling.svg"})
        return
    sys.stdout.write(table_text(table))
    output.remark(f"{out}/scaling.svg, scaling.json, scaling.txt")
