"""`headrace compare-runs A B`: what differs between two runs, by their manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output

if TYPE_CHECKING:
    from headrace.cluster.manifest import Difference

__all__ = ["compare_runs"]


def compare_runs(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's manifest.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one's.")],
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what is only another time or place.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Tell what differs between two runs: versions, seeds, order, data, hardware, settings.

    Ends with 1 if anything differs that may change results.
    """
    from headrace.cluster.manifest import compare, read_manifest

    found = compare(read_manifest(a), read_manifest(b))
    counted = [d for d in found if not d.incidental]
    output = Output(as_json=as_json)
    if as_json:
        shown = found if everything else counted
        output.document({"same": not counted, "differences": shown})
    else:
        _print(output, found, everything=everything)
    return exit_codes.FINDING if counted else exit_codes.OK


def _print(output: Output, found: list[Difference], *, everything: bool) -> None:
    counted = [d for d in found if not d.incidental]
    for difference in found if everything else counted:
        output.line(f"{difference.key}: {_text(difference.a)} -> {_text(difference.b)}")
    if not counted:
        output.line("nothing differs that may change results")
    hidden = len(found) - len(counted)
    if hidden and not everything:
        output.remark(f"{hidden} more are only another time or place: --all shows them")


def _text(value: Any) -> str:
    return "(none)" if value is None else json.dumps(value)
