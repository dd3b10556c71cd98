"""`headrace repair`: fetches bad samples again from where they came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.base.text import count_text
from headrace.cli import exit_codes
from headrace.cli.output import Json, Output, Quiet, Verbose
from headrace.cli.storage import TrustOptions

if TYPE_CHECKING:
    from headrace.store.repair import RepairReport

_ROWS_SHOWN = 20


def repair(
    store: Annotated[str, typer.Argument(help="The store's folder.")],
    *,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that read.")] = None,
    trust: TrustOptions = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Verify, then mend what the source still has; exit with 1 if something is left.

    Foreign data is never written.
    """
    from headrace.store import repair as repair_store

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    report = repair_store(store, workers=workers, trust=trust)
    if as_json:
        output.document({"ok": report.ok, "report": report})
    else:
        _print(output, report)
    return exit_codes.OK if report.ok else exit_codes.FINDING


def _print(output: Output, report: RepairReport) -> None:
    for path in report.rewritten:
        output.line(f"written anew: {path}")
    shown = report.unrepairable if output.verbose else report.unrepairable[:_ROWS_SHOWN]
    for sample, reason in shown:
        output.line(f"left as it is: {sample}: {reason}" if sample else f"left as it is: {reason}")
    hidden = len(report.unrepairable) - len(shown)
    if hidden:
        output.remark(f"and {count_text(hidden)} more; --json lists all")
    if report.before.ok:
        output.line(f"nothing to repair: {report.path}")
        return
    output.line(
        f"repaired {count_text(len(report.repaired))} samples, "
        f"{count_text(len(report.unrepairable))} problems left: {report.path}"
    )
    if report.unrepairable:
        output.remark("  next: restore the files above, or pack the source again")
