"""`headrace report`, `job-report`, `starving`, `usage`, `compare-runs`, `verify-epoch`: what runs left."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Argument, Option

from headrace.base.text import duration_text, printable
from headrace.cli import exit_codes
from headrace.cli.options import JsonOutput, QuietOutput
from headrace.cli.printing import Output, plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.cluster.slurm.accounting import AccountedJob
    from headrace.insight.usage import Starving, UsageTable
    from headrace.telemetry.history import JobRecord

HistoryOption = Annotated[
    str | None,
    Option(
        "--history",
        metavar="DIR|URL",
        help="Agents' folder, or a Prometheus.",
        show_default="$HEADRACE_HISTORY, or of the user",
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
    """Print what a job asked for, used and waited for, and what to ask for next time.

    From the agents' history, Slurm's books where there are any, and the manifests of `headrace launch` in
    this folder: where it went on, and why it ended.
    """
    from headrace.cluster.manifest import interruptions, newest_life, told_by_run
    from headrace.errors import TelemetryError
    from headrace.insight.usage import report_of_books
    from headrace.telemetry.report import job_report as report_of

    jobs = _books(job_ids=[job]) or []
    booked = next((one for one in jobs if one.job_id == job), None)
    try:
        report = report_of(history_of(history, job), job)
    except TelemetryError:
        if booked is None:
            raise
        report = None
    if booked is not None:
        report = report_of_books(booked, report, time.time())
    assert report is not None
    record = report.record
    name = record.alias or job
    life = newest_life(Path(), name, record.restarts)
    cause, resumed, failed, _ = told_by_run(Path(), name, life, record.first_s, record.last_s)
    if booked is not None and booked.went_wrong:
        cause, failed = cause or booked.why, True
    report = replace(report, failed=failed)
    went_on = interruptions(Path(), name, life, record.first_s, record.last_s)
    rows = [
        ("went on", f"after {time.strftime('%X', time.localtime(s))}: {why}") for s, why in went_on
    ]
    rows += [("run", text) for text in (resumed, cause) if text]
    document = {**report.as_dict(), "resumed": resumed, "cause": cause, "interruptions": went_on}
    if failed:
        document["hint"] = f"see what it printed last: headrace cluster logs {name} --lines 50"
        rows.append(("hint", document["hint"]))
    lines = (f"  {label:<12} {text}" for label, text in rows)
    output.result(document, *report.text().splitlines(), *lines)


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
    output.write(html, lambda: report_page(figures))
    if output.as_json or html is None:
        output.result({**report_document(figures), "html": html}, *report_lines(figures))
    return exit_codes.OK


LastOption = Annotated[str, Option("--last", help="How far back: 30m, 24h, 7d.", metavar="TIME")]

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


def starving(
    *,
    last: LastOption = "24h",
    user: str = Option("", help="Only this user's jobs.", metavar="USER"),
    top: int = Option(10, help="So many rows of a table."),
    history: HistoryOption = None,
    output: JsonOutput,
) -> None:
    """Rank jobs by GPU-hours lost to waiting for data; then users, file systems and causes."""
    from headrace.insight.usage import starving_of
    from headrace.telemetry.history import open_history

    until_s = time.time()
    since_s = until_s - seconds_of(last)
    opened = open_history(history_of(history))
    records = [r for r in opened.records(since_s, until_s) if user in ("", r.user)]
    ranking = starving_of(records, since_s, until_s)
    if output.as_json:
        output.document({**ranking.as_dict(), "skipped": opened.skipped})
        return
    for name in opened.skipped:
        output.remark(f"left out: {name}")
    _print_starving(output, ranking, top)


def _print_starving(output: Output, ranking: Starving, top: int) -> None:
    from headrace.telemetry.report import hours_text

    console = output.console()
    console.print(printable(ranking.answer), markup=False)
    if not ranking.jobs:
        for note in ranking.notes:
            output.line(note)
        return
    has_gpus = ranking.gpu_hours > 0.0
    rows = [
        (
            f"{job.job_id} {job.name}".strip(), job.user,
            *((hours_text(job.lost_gpu_hours), hours_text(job.gpu_hours)) if has_gpus
              else (_waited(job.waited_s),)),
            f"{'' if job.quality == 'measured' else '~'}{job.stall:.0%}", job.cause,
            job.file_system or "-",
        )
        for job in ranking.jobs[:top]
    ]  # fmt: skip
    hours = ("LOST GPU-H>", "GPU-H>") if has_gpus else ("WAITED>",)
    names = ("JOB", "USER", *hours, "STALL>", "CAUSE", "ON")
    output.line("")
    console.print(plain_table(*names, rows=rows))
    if any(job.quality != "measured" for job in ranking.jobs[:top]):
        output.line("~ inferred from pressure and use: the job does not read through headrace")
    if len(ranking.jobs) > top:
        output.line(f"and {len(ranking.jobs) - top} more jobs (--top {len(ranking.jobs)})")
    for note in ranking.notes:
        output.line(note)
    for title, groups in (
        ("USER", ranking.users), ("FILE SYSTEM", ranking.file_systems), ("CAUSE", ranking.causes),
    ):  # fmt: skip
        table = plain_table(title, "JOBS>", *hours[:-1], "WAITED>")
        table.columns[0].min_width, table.columns[0].max_width = 20, 40
        for group in groups[:top]:
            lost = (hours_text(group.lost_gpu_hours),) if has_gpus else ()
            name, waited = printable(group.name) or "?", _waited(group.waited_s)
            table.add_row(name, str(group.jobs), *lost, waited)
        output.line("")
        console.print(table)


def _waited(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 36 else f"{duration_text(seconds)}"


def usage(
    *,
    last: LastOption = "7d",
    by: str = Option(
        "user", help="A row for each user, account, partition, job, day or hour.", metavar="COLUMN"
    ),
    user: str = Option("", help="Only this user's.", metavar="USER"),
    account: str = Option("", help="Only this account's.", metavar="NAME"),
    source: str = Option(
        "auto",
        "--from",
        help="Hours from slurm or from history; auto: Slurm where it is.",
        metavar="NAME",
    ),
    history: HistoryOption = None,
    output: JsonOutput,
) -> None:
    """Print what was had, how much of it was used, and what was wasted.

    SEEN is how much of the hours somebody looked at; where that is less than 90 %, no use is given.
    """
    from headrace.errors import TelemetryError
    from headrace.insight.usage import BY, usage_by
    from headrace.telemetry.history import open_history

    if by not in BY:
        raise ValueError(f"--by is {by!r}, expected {', '.join(BY)}")
    if source not in ("auto", "slurm", "history"):
        raise ValueError(f"--from is {source!r}, expected auto, slurm or history")
    until_s = time.time()
    since_s = until_s - seconds_of(last)
    books = None if source == "history" else _books(since_s, until_s, must=source == "slurm")

    def records_of(begin_s: float, end_s: float) -> list[JobRecord]:
        records = opened.records(begin_s, end_s)
        if books is not None:
            return records
        return [r for r in records if user in ("", r.user) and account in ("", r.account)]

    if books is not None:
        books = [j for j in books if user in ("", j.user) and account in ("", j.account)]
    try:
        opened = open_history(history_of(history))
        figures = usage_by(by, records_of, books, since_s, until_s)
        skipped = opened.skipped
    except TelemetryError as e:
        if books is None:
            raise
        figures = usage_by(by, lambda *_: [], books, since_s, until_s)
        skipped = [str(e)]
    if output.as_json:
        output.document({**figures.as_dict(), "skipped": skipped})
        return
    for name in skipped:
        output.remark(f"left out: {name}")
    _print_usage(output, figures)


def _books(
    since_s: float | None = None,
    until_s: float | None = None,
    *,
    must: bool = False,
    job_ids: Sequence[str] = (),
) -> list[AccountedJob] | None:
    """Slurm's jobs; None: there are no books, and they need not be there."""
    from headrace.cluster.slurm.accounting import read_accounting
    from headrace.cluster.slurm.commands import Commands
    from headrace.errors import ClusterError

    if not must and shutil.which("sacct") is None:
        return None
    try:
        return list(read_accounting(Commands(), since_s, until_s, job_ids=job_ids))
    except ClusterError:
        if must:
            raise
        return None


def _print_usage(output: Output, figures: UsageTable) -> None:
    from headrace.insight.usage import BY
    from headrace.telemetry.report import hours_text
    from headrace.telemetry.waste import WASTE

    if not figures.rows:
        output.line("no job is known in this time")
        return
    columns = [name.removesuffix("_id").upper() for name in BY[figures.by]]
    total = figures.total
    of_gpus = ("GPU-H>", "USED>", "SEEN>") if total.gpu_hours else ()
    table = plain_table(*columns, "JOBS>", *of_gpus, "CPU-H>", "USED>", "SEEN>", "MEM>", "STALL>")
    for column in table.columns[: len(columns)]:
        column.max_width = 12
    for row in (*figures.rows, *([total] if len(figures.rows) > 1 else ())):
        gpu, cpu, memory = row.use.gpu, row.use.cpu, row.use.memory
        shares = (gpu.share, gpu.coverage, cpu.share, cpu.coverage, memory.share, row.stall)
        used, seen, cpu_used, cpu_seen, taken, stall = (
            "-" if share is None else f"{share:.0%}" for share in shares
        )
        names = [printable(name) or "?" for name in row.names]
        names += ["-"] * (len(columns) - len(names))
        gpus = (hours_text(row.gpu_hours), used, seen)[: len(of_gpus)]
        table.add_row(
            *names,
            str(row.jobs),
            *gpus,
            hours_text(row.cpu_hours),
            cpu_used,
            cpu_seen,
            taken,
            stall,
        )
    notes = [f"hours had, from {'Slurm' if figures.source == 'slurm' else 'the history'}"]
    if figures.uncounted:
        notes[0] += ", which counts no GPUs (AccountingStorageTRES): those of jobs that agents saw"
    wasted = [
        f"{kind} {hours_text(seconds / 3600)}"
        for kind, seconds in zip(WASTE, total.use.waste, strict=True)
        if seconds
    ]
    notes += [f"wasted GPU-hours: {', '.join(wasted)}"] if wasted else []
    console = output.console()
    console.print(table)
    console.print("\n".join(notes), markup=False, highlight=False)


def compare_runs(
    a: Path = Argument(
        ..., metavar="A", help="A run's manifest: headrace-runs/17-0.json, of `headrace launch`."
    ),
    b: Path = Argument(..., metavar="B", help="Another run's."),
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
    shown = differences if everything else counted
    lines = [f"{d.key}: {_value_text(d.a)} -> {_value_text(d.b)}" for d in shown]
    if not counted:
        lines.append("nothing differs that may change results")
    output.result({"same": not counted, "differences": shown}, *lines)
    hidden = len(differences) - len(shown)
    if hidden and not output.as_json:
        output.remark(f"{hidden} more are only another time or place: --all shows them")
    return exit_codes.FINDING if counted else exit_codes.OK


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
    from headrace.insight.epoch_proof import proof_lines, same_lines, same_order, verify_epochs
    from headrace.trace import read_run

    runs = [read_run(path) for path in (run, other) if path is not None]
    proofs = [verify_epochs(each) for each in runs]
    same = same_order(*runs) if len(runs) > 1 else None
    # With two runs whose order is not headrace's, that it is the same is all that can be proved.
    loaders = [each for proof in proofs for each in proof.loaders if each.ours]
    if same is None:
        proved = all(proof.holds for proof in proofs)
    else:
        proved = same.holds and all(loader.holds for loader in loaders)
    lines: list[str] = []
    for proof in proofs:
        lines += [*([f"{proof.path}:"] if same is not None else ()), *proof_lines(proof)]
    lines += same_lines(same) if same is not None else ()
    document = {
        "proved": proved, "runs": [proof.document() for proof in proofs],
        "same": None if same is None else same.document(),
    }  # fmt: skip
    output.result(document, *lines)
    return exit_codes.OK if proved else exit_codes.FINDING
