"""`headrace report RUN`: what became of a run's time, as a page, as text or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output, Quiet

__all__ = ["report"]


def report(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's folder, as trace= or HEADRACE_TRACE had it."),
    ],
    *,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write one HTML file that works offline."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Show where a run's time went: what its steps waited for, on which rank, when, and what to do."""
    from headrace.insight.report import report_page, run_figures
    from headrace.insight.report.text import report_document, report_lines

    output = Output(as_json=as_json, quiet=quiet)
    figures = run_figures(run)
    if html is not None:
        Path(html).write_text(report_page(figures), encoding="utf-8")
        output.remark(f"wrote {html}")
    if as_json:
        output.document({**report_document(figures), "html": html})
    elif html is None:
        for line in report_lines(figures):
            output.line(line)
    return exit_codes.OK
