"""`headrace report`, `job-report`, `starving`, `usage`, `compare-runs`, `verify-epoch`: what runs left."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Argument, Option

from headrace.base.text import printable
from headrace.cli import exit_codes
from headrace.cli.options import JsonOutput, QuietOutput
from headrace.cli.printing import Output, plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cluster.manifest import ManifestDifference
    from headrace.cluster.slurm.accounting import AccountedJob
    from headrace.insight.usage import Starving, StarvingGroup, UsageRow, UsageTable
    from headrace.insight.verify import Proof, SameOrder
    from headrace.telemetry.history import JobRecord

HistoryOption = Annotated[
    str | None,
    typer.Option(
        "--history",
        metavar="DIR|URL",
        help="Agents' folder, or a Prometheus. Default: $HEADRACE_HISTORY, or of the user.",
    ),
]


def history_of(given: str | None, job: str = "") -> str:
    """The history that a command reads, when this node's agents have written what they know."""
    from headrace.telemetry.history import catch_up, history_place

    place = given or history_place()
    catch_up(place, job)
    return place


def job_report(
    job: str = Argument(..., help="The job's number, as 4711 or 4711_3."),
    *,
    history: HistoryOption = None,
    output: JsonOutput,
) -> None:
    """Print what a job had, used, and waited for, from the agents' history."""
    from headrace.telemetry.report import job_report as report_of

    report = report_of(history_of(history, job), job)
    output.result(report.as_dict(), *report.text().splitlines())


def report(
    run: str = Argument(
        ..., metavar="RUN", help="A run's folder, as trace= or HEADRACE_TRACE had it."
    ),
    *,
    html: str | None = Option(
        None, "--html", metavar="FILE", help="Write one HTML file that works offline."
    ),
    output: QuietOutput,
) -> int:
    """Show where a run's time went: what its steps waited for, on which rank, when, and what to do."""
    from headrace.insight.report.figures import run_figures
    from headrace.insight.report.page import report_document, report_lines, report_page

    figures = run_figures(run)
    if html is not None:
        Path(html).write_text(report_page(figures), encoding="utf-8")
        output.remark(f"wrote {html}")
    if output.as_json:
        output.document({**report_document(figures), "html": html})
    elif html is None:
        for line in report_lines(figures):
            output.line(line)
    return exit_codes.OK


LastOption = Annotated[
    str, typer.Option("--last", help="How far back: 30m, 24h, 7d.", metavar="TIME")
]

_SPAN: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "": 3600, "d": 86400, "w": 604800}
_SPAN_MAX_S: Final = 10 * 366 * 86400


def seconds_of(text: str) -> float:
    """`30m`, `24h`, `7d` in seconds; a number alone is hours.

    Raises:
        ValueError: the text is no stretch of time.
    """
    match = _SPAN.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _SPAN_MAX_S:
        raise ValueError(f"{text!r} is no stretch of time, expected as 30m, 24h, 7d")
    return seconds


def _records(
    history: str | None, since_s: float, until_s: float
) -> tuple[list[JobRecord], list[str]]:
    """What agents kept of jobs, and the files that could not be read."""
    from headrace.telemetry.history import open_history

    opened = open_history(history_of(history))
    return opened.records(since_s, until_s), opened.skipped


def starving(
    *,
    last: LastOption = "24h",
    user: str = Option("", help="Only this user's jobs."),
    top: int = Option(10, help="So many rows of a table."),
    history: HistoryOption = None,
    output: JsonOutput,
) -> None:
    """Rank jobs by GPU-hours lost to waiting for data; then users, file systems and causes."""
    from headrace.insight.usage import starving_of

    until_s = time.time()
    since_s = until_s - seconds_of(last)
    records, skipped = _records(history, since_s, until_s)
    ranking = starving_of([r for r in records if user in ("", r.user)], since_s, until_s)
    if output.as_json:
        output.document({**ranking.as_dict(), "skipped": skipped})
        return
    for name in skipped:
        output.remark(f"left out: {name}")
    _print_starving(output, ranking, top)


def _print_starving(output: Output, ranking: Starving, top: int) -> None:
    from headrace.telemetry.report import hours_text

    console = output.console()
    console.print(printable(ranking.answer), markup=False)
    if not ranking.jobs:
        return
    table = plain_table("JOB", "USER", "LOST GPU-H>", "GPU-H>", "STALL>", "CAUSE", "ON")
    for job in ranking.jobs[:top]:
        inferred = "" if job.quality == "measured" else "~"
        table.add_row(
            printable(f"{job.job_id} {job.name}".strip()),
            printable(job.user),
            hours_text(job.lost_gpu_hours),
            hours_text(job.gpu_hours),
            f"{inferred}{job.stall:.0%}",
            job.cause,
            printable(job.file_system) or "-",
        )
    output.line("")
    console.print(table)
    if any(job.quality != "measured" for job in ranking.jobs[:top]):
        output.line("~ inferred from pressure and use: the job does not read through headrace")
    if len(ranking.jobs) > top:
        output.line(f"and {len(ranking.jobs) - top} more jobs (--top {len(ranking.jobs)})")
    for title, groups in (
        ("USER", ranking.users),
        ("FILE SYSTEM", ranking.file_systems),
        ("CAUSE", ranking.causes),
    ):
        output.line("")
        console.print(_groups(title, groups[:top]))


def _groups(title: str, groups: tuple[StarvingGroup, ...]) -> Table:
    from headrace.telemetry.report import hours_text

    table = plain_table()
    table.add_column(title, no_wrap=True, overflow="ellipsis", min_width=20, max_width=40)
    for name in ("JOBS", "LOST GPU-H", "WAITED"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        table.add_row(
            printable(group.name) or "?", str(group.jobs), hours_text(group.lost_gpu_hours),
            _hours(group.waited_s),
        )  # fmt: skip
    return table


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 36 else f"{seconds:,.1f} s"


def usage(
    *,
    last: LastOption = "7d",
    user: str = Option("", help="Only this user's."),
    account: str = Option("", help="Only this account's."),
    source: str = Option(
        "auto", "--from", help="Hours from slurm or from history; auto: Slurm where it is."
    ),
    history: HistoryOption = None,
    output: JsonOutput,
) -> None:
    """Print hours and efficiency by user and account."""
    from headrace.errors import TelemetryError
    from headrace.insight.usage import usage_of

    if source not in ("auto", "slurm", "history"):
        raise ValueError(f"--from is {source!r}, expected auto, slurm or history")
    until_s = time.time()
    since_s = until_s - seconds_of(last)
    books = None if source == "history" else _books(since_s, until_s, must=source == "slurm")
    records: list[JobRecord] = []
    skipped: list[str] = []
    try:
        records, skipped = _records(history, since_s, until_s)
    except TelemetryError as e:
        if books is None:
            raise
        skipped = [str(e)]
    if books is not None:
        books = [j for j in books if user in ("", j.user) and account in ("", j.account)]
    else:
        records = [r for r in records if user in ("", r.user) and account in ("", r.account)]
    figures = usage_of(records, books, since_s, until_s)
    if output.as_json:
        output.document({**figures.as_dict(), "skipped": skipped})
        return
    for name in skipped:
        output.remark(f"left out: {name}")
    _print_usage(output, figures)


def _books(since_s: float, until_s: float, *, must: bool) -> list[AccountedJob] | None:
    """Slurm's jobs; None: there are no books, and they need not be there."""
    from headrace.cluster.slurm.accounting import read_accounting
    from headrace.cluster.slurm.commands import Commands
    from headrace.errors import ClusterError

    if not must and shutil.which("sacct") is None:
        return None
    try:
        return list(read_accounting(Commands(), since_s, until_s))
    except ClusterError:
        if must:
            raise
        return None


def _print_usage(output: Output, figures: UsageTable) -> None:

    if not figures.rows:
        output.line("no job is known in this time")
        return
    table = plain_table()
    for name in ("USER", "ACCOUNT"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=16)
    for name in ("JOBS", "GPU-H", "CPU-H", "GPU USE", "LOST GPU-H", "STALL", "EFF"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in figures.rows:
        table.add_row(*_cells(row))
    if len(figures.rows) > 1:
        table.add_row(*_cells(figures.total, "all"))
    output.console().print(table)
    total = figures.total
    if figures.source == "slurm" and total.gpu_hours:
        covered = total.seen_gpu_hours / total.gpu_hours
        output.line(f"hours from Slurm; agents saw {covered:.0%} of the GPU-hours")


def _cells(row: UsageRow, user: str = "") -> tuple[str, ...]:
    from headrace.telemetry.report import hours_text

    return (
        user or printable(row.user) or "?", printable(row.account) or "-", str(row.jobs),
        hours_text(row.gpu_hours), hours_text(row.cpu_hours), _share(row.gpu_use),
        hours_text(row.lost_gpu_hours), _share(row.stall), _share(row.efficiency),
    )  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def compare_runs(
    a: Path = Argument(..., metavar="A", help="A run's manifest."),
    b: Path = Argument(..., metavar="B", help="Another one's."),
    *,
    everything: bool = Option(False, "--all", help="Also what is only another time or place."),
    output: JsonOutput,
) -> int:
    """Tell what differs between two runs: versions, seeds, order, data, hardware, settings.

    Ends with 1 if anything differs that may change results.
    """
    from headrace.cluster.manifest import compare, read_manifest

    differences = compare(read_manifest(a), read_manifest(b))
    counted = [d for d in differences if not d.incidental]
    if output.as_json:
        shown = differences if everything else counted
        output.document({"same": not counted, "differences": shown})
    else:
        _print_differences(output, differences, everything=everything)
    return exit_codes.FINDING if counted else exit_codes.OK


def _print_differences(
    output: Output, differences: list[ManifestDifference], *, everything: bool
) -> None:
    counted = [d for d in differences if not d.incidental]
    for difference in differences if everything else counted:
        output.line(f"{difference.key}: {_value_text(difference.a)} -> {_value_text(difference.b)}")
    if not counted:
        output.line("nothing differs that may change results")
    hidden = len(differences) - len(counted)
    if hidden and not everything:
        output.remark(f"{hidden} more are only another time or place: --all shows them")


def _value_text(value: Any) -> str:
    return "(none)" if value is None else json.dumps(value)


def verify_epoch(
    run: str = Argument(
        ..., metavar="RUN", help="A run's folder, as trace= or HEADRACE_TRACE had it."
    ),
    other: str | None = Argument(
        None, metavar="RUN2", help="Another one's: had both the same order?"
    ),
    *,
    output: JsonOutput,
) -> int:
    """Prove from a run's traces that every sample came exactly once over all ranks, in each epoch.

    With a second run, also that both delivered in the same order; else the first step that differs.
    Ends with 1 if something is not proved.
    """
    from headrace.insight.verify import same_order, verify_epochs
    from headrace.trace import read_run

    runs = [read_run(path) for path in (run, other) if path is not None]
    proofs = [verify_epochs(each) for each in runs]
    same = same_order(*runs) if len(runs) > 1 else None
    if output.as_json:
        output.document({
            "proved": _holds(proofs, same), "runs": [proof.document() for proof in proofs],
            "same": None if same is None else same.document(),
        })  # fmt: skip
    else:
        _print_proofs(output, proofs, same)
    return exit_codes.OK if _holds(proofs, same) else exit_codes.FINDING


def _holds(proofs: list[Proof], same: SameOrder | None) -> bool:
    """With two runs whose order is not headrace's, that it is the same is all that can be proved."""
    if same is None:
        return all(proof.holds for proof in proofs)
    ours = [p for proof in proofs for p in proof.loaders if p.ours]
    return same.holds and all(loader.holds for loader in ours)


def _print_proofs(output: Output, proofs: list[Proof], same: SameOrder | None) -> None:
    from headrace.insight.verify import proof_lines, same_lines

    for proof in proofs:
        if len(proofs) > 1:
            output.line(f"{proof.path}:")
        for line in proof_lines(proof):
            output.line(line)
    if same is not None:
        for line in same_lines(same):
            output.line(line)
