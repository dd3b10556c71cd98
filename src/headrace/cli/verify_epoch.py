"""`headrace verify-epoch RUN [RUN2]`: proof that every sample came once, and that two runs had one order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output

if TYPE_CHECKING:
    from headrace.insight.proof import Proof, Sameness

__all__ = ["verify_epoch"]


def verify_epoch(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's folder, as trace= or HEADRACE_TRACE had it."),
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="RUN2", help="Another one's: had both the same order?")
    ] = None,
    *,
    as_json: Json = False,
) -> int:
    """Prove from a run's traces that every sample came exactly once over all ranks, in each epoch.

    With a second run, also that both delivered in the same order; else the first step that differs.
    Ends with 1 if something is not proved.
    """
    from headrace.insight.proof import same_order, verify_epochs
    from headrace.trace import read_run

    runs = [read_run(path) for path in (run, other) if path is not None]
    proofs = [verify_epochs(each) for each in runs]
    same = same_order(*runs) if len(runs) > 1 else None
    output = Output(as_json=as_json)
    if as_json:
        output.document({
            "proved": _holds(proofs, same), "runs": [proof.document() for proof in proofs],
            "same": None if same is None else same.document(),
        })  # fmt: skip
    else:
        _print(output, proofs, same)
    return exit_codes.OK if _holds(proofs, same) else exit_codes.FINDING


def _holds(proofs: list[Proof], same: Sameness | None) -> bool:
    """With two runs whose order is not headrace's, that it is the same is all that can be proved."""
    if same is None:
        return all(proof.holds for proof in proofs)
    ours = [p for proof in proofs for p in proof.loaders if p.ours]
    return same.holds and all(loader.holds for loader in ours)


def _print(output: Output, proofs: list[Proof], same: Sameness | None) -> None:
    from headrace.insight.proof.text import proof_lines, same_lines

    for proof in proofs:
        if len(proofs) > 1:
            output.line(f"{proof.path}:")
        for line in proof_lines(proof):
            output.line(line)
    if same is not None:
        for line in same_lines(same):
            output.line(line)
