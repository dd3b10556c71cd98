"""`headrace launch`, `scaling`: a training script on all nodes of a job, and on more and more ranks."""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Argument, Option

from headrace.cli import exit_codes
from headrace.cli.options import Group, QuietOutput
from headrace.cli.printing import write_json
from headrace.cluster.launch.plan import LaunchOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.bench.scaling import ScalingRun
    from headrace.cluster.launch.plan import Launch


def _options(*, nodes: str | None, stage: list[str] | None, **values: Any) -> LaunchOptions:
    return LaunchOptions(nodes=_range(nodes), stage=tuple(stage or ()), **values)


def _annotation(name: str, kind: Any, metadata: Mapping[str, Any]) -> Any:
    """How typer reads a field of `LaunchOptions`."""
    read = {"nodes": str | None, "stage": list[str] | None, "framework": str}.get(name, kind)
    flags = (metadata["flag"],) if metadata["flag"] else ()
    return Annotated[read, Option(*flags, **{k: v for k, v in metadata.items() if k != "flag"})]


_KINDS = get_type_hints(LaunchOptions)
_OPTIONS = Group(
    _options,
    {f.name: f.default or None for f in fields(LaunchOptions)},
    **{f.name: _annotation(f.name, _KINDS[f.name], f.metadata) for f in fields(LaunchOptions)},
)


def launch(
    command: list[str] = Argument(
        ...,
        metavar="SCRIPT.py [ARGUMENT]...",
        help="A script, `-m MODULE` (after --), or a program.",
    ),
    *,
    options: Annotated[Any, _OPTIONS],
    dry_run: bool = Option(
        False, "--dry-run", help="Print what would run, and why; start nothing."
    ),
    report: str | None = Option(
        None, "--report", metavar="FILE", help="Write the report as JSON (-: stdout)."
    ),
    quiet: bool = Option(False, "--quiet", "-q", help="Errors only."),
) -> int:
    """Run a training script on all nodes of this job (Slurm's, or this machine), and leave nothing behind.

    Once, in the batch script: it starts a launcher on each node, stages, starts the ranks, hands signals on,
    has the job requeued in time, and ends exactly what it started.
    """
    from headrace.cluster.launch.place import JobPlace
    from headrace.cluster.launch.plan import Launch, preview
    from headrace.errors import LaunchError

    if command[0].endswith(".py") and not (dry_run or Path(command[0]).is_file()):
        raise LaunchError(
            f"{command[0]}: there is no such script in {Path.cwd()}.",
            next_step="Check the path: headrace launch SCRIPT.py ARGUMENTS.",
        )
    launched = Launch.of(JobPlace.here(), options, command)
    if not dry_run:
        return _run_job(launched, report, quiet=quiet)
    shown = preview(launched, os.environ)
    if report is not None:
        write_json(report, asdict(shown))
    else:
        sys.stdout.write(shown.text())
    return exit_codes.OK


def _run_job(launch: Launch, report: str | None, *, quiet: bool) -> int:
    from headrace.cluster.launch.conductor import Conductor
    from headrace.cluster.launch.plan import Launch
    from headrace.cluster.manifest import RunRecord
    from headrace.errors import HeadraceError

    def say(text: str) -> None:
        if not quiet:
            print(f"headrace launch: {text}", file=sys.stderr, flush=True)

    # What a job that was started again did before is its own; a first start has done nothing before.
    since_s = 0.0 if launch.place.restarts else time.time()
    for restarts in itertools.count():
        record = RunRecord(launch, os.environ)
        record.begin()
        conductor = Conductor(launch, say, restarts=restarts, resumed=record.begin)
        job_report = conductor.report
        try:
            conductor.run()
        except HeadraceError as e:
            job_report.why, job_report.next_step = e.message, e.next_step
            raise
        finally:
            nodes = conductor.nodes.all if hasattr(conductor, "nodes") else []
            record.finish(job_report, nodes)
            if report is not None:
                write_json(report, asdict(job_report))
            last = conductor.survivors is None
            failed = job_report.outcome == "failed"
            if (
                last
                and launch.options.agent
                and (text := _agents_report(conductor.job, since_s, failed=failed))
            ):
                say(f"the job's report\n{text}")
            for line in job_report.lines(raised=sys.exception() is not None):
                say(line)
        if conductor.survivors is None:
            break
        launch = Launch.of(conductor.survivors, launch.options, launch.words)
    conductor.requeue()
    return job_report.exit_code


def _agents_report(job: str, since_s: float, *, failed: bool) -> str:
    """What the agents have kept of a job since then; what was seen earlier is another job's of that number."""
    from headrace.errors import HeadraceError
    from headrace.telemetry import job_report
    from headrace.telemetry.history import default_history

    try:
        report = job_report(default_history(os.environ), job, since_s)
        return replace(report, failed=failed).text()
    except HeadraceError:  # a job of a second or two: nobody has looked yet
        return ""


def _range(text: str | None) -> tuple[int, int] | None:
    """MIN-MAX, or N for N-N."""
    if text is None:
        return None
    least, _, most = text.partition("-")
    if not (least.isdigit() and (most or least).isdigit()):
        raise ValueError(f"nodes is {text!r}, expected MIN-MAX")
    return int(least), int(most or least)


def scaling(
    arguments: list[str] | None = Argument(
        None, metavar="[-- ARGUMENT...]", help="Of the batch script, after `--`."
    ),
    *,
    project: Path = Option(Path(), help="The project's folder.", metavar="DIR"),
    script: str = Option("job.sh", help="Its batch script.", metavar="FILE"),
    ranks: str = Option("1,2,4,8", help="Sizes, separated by commas.", metavar="N,N,..."),
    ranks_per_node: int | None = Option(
        None, min=1, help="At most, on one node.", show_default="4; here, all of them"
    ),
    gpus: bool = Option(False, "--gpus", help="Ask for a GPU for each rank."),
    executor: str | None = Option(
        None, help="slurm, ray or local.", show_default="slurm where sbatch is", metavar="NAME"
    ),
    option: list[str] | None = Option(
        None,
        "--sbatch",
        help="More of sbatch's options: --sbatch=--partition=gpu.",
        metavar="OPTION",
    ),
    tolerance: float = Option(1.0, min=0.0, max=100.0, help="Points that accuracy may fall."),
    timeout_s: float | None = Option(
        None, min=1.0, help="Wait for each job so long.", show_default="for ever", metavar="SECONDS"
    ),
    out: Path = Option(
        Path("scaling"), help="A new folder: scaling.json, scaling.txt, logs.", metavar="DIR"
    ),
    output: QuietOutput,
) -> int:
    """Run a project on 1, 2, 4, 8 ranks, one job after the other, and put them beside each other.

    Writes a table (text, JSON). Ends with 1 if a size failed, or learned less than the first.
    """
    from headrace.bench.scaling import ScalingOptions, measure, scaling_table, table_text
    from headrace.cluster.executor import executor as executor_named

    runs_on, sizes = executor_named(executor), _numbers(ranks)
    options = ScalingOptions(
        project=project, script=script, ranks=sizes, out=out, gpus=gpus, timeout_s=timeout_s,
        ranks_per_node=ranks_per_node or (max(sizes) if runs_on.name == "local" else 4),
        options=tuple(option or ()), arguments=tuple(arguments or ()),
    )  # fmt: skip

    def tell(run: ScalingRun) -> None:
        output.remark(f"ranks: {run.ranks}, nodes: {run.nodes}, job {run.job_id}, {run.log}")

    runs = list(measure(runs_on, options, tell))
    table = scaling_table(runs, tolerance / 100)
    document, text = asdict(table), table_text(table)
    write_json(out / "scaling.json", document)
    (out / "scaling.txt").write_text(text, "utf-8")
    output.result(document, text.rstrip("\n"))
    if not output.as_json:
        output.remark(f"{out}/scaling.json, scaling.txt")
    return exit_codes.FINDING if table.findings else exit_codes.OK


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"--ranks is {text!r}, expected numbers like 1,2,4,8")
    return tuple(int(word) for word in words)
