"""`headrace grafana`: the dashboard over the metrics of node daemons."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli.output import Json, Output

__all__ = ["app", "export"]

app = typer.Typer(
    help="The Grafana dashboard that goes with `headrace node start --metrics`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    pass


@app.command()
def export(
    *,
    target: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the dashboard as JSON: import it in Grafana, and choose your Prometheus."""
    from pathlib import Path

    from headrace.insight.grafana import dashboard

    text = dashboard()
    if target is None:
        sys.stdout.write(text)
        return
    Path(target).write_text(text, encoding="utf-8")
    output = Output(as_json=as_json)
    if as_json:
        output.document({"path": target, "bytes": len(text.encode())})
    else:
        output.line(f"wrote {target}: in Grafana, Dashboards, New, Import")
