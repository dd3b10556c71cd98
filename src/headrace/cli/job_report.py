"""`headrace job-report`: what a job had, used, and waited for."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.output import Json, Output

__all__ = ["HistoryOption", "history_of", "job_report"]

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
    from headrace.telemetry.catching_up import catch_up
    from headrace.telemetry.place import history_place

    place = given or history_place()
    catch_up(place, job)
    return place


def job_report(
    job: Annotated[str, typer.Argument(help="The job's number, as 4711 or 4711_3.")],
    *,
    history: HistoryOption = None,
    as_json: Json = False,
) -> None:
    """Print what a job had, used, and waited for, from the agents' history."""
    from headrace.telemetry.report import job_report as report_of

    report = report_of(history_of(history, job), job)
    output = Output(as_json=as_json)
    if as_json:
        output.document(report.as_dict())
    else:
        for line in report.text().splitlines():
            output.line(line)
