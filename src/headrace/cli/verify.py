"""`headrace verify`: reads everything and names each sample that is not as it should be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.base.text import bytes_text, count_text, duration_text
from headrace.cli import exit_codes
from headrace.cli.output import Json, Output, Quiet, Verbose, printable
from headrace.cli.storage import StorageOptions, TrustOptions, storage_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.store.verify import BadSample, VerifyReport

__all__ = ["print_bad_samples", "verify"]

_ROWS_SHOWN = 20


def verify(
    store: Annotated[str, typer.Argument(help="The store's folder or URL.")],
    *,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that read.")] = None,
    storage: StorageOptions = None,
    trust: TrustOptions = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Read and check everything; exit with 1 if anything is bad.

    Lists the first bad samples, with -v all of them, with --json all of them with all details.
    """
    from headrace.cli.progress import progress
    from headrace.store import verify as verify_store

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    with progress(output, "verifying") as tell:
        report = verify_store(
            store,
            workers=workers,
            progress=tell,
            storage_options=storage_options(storage),
            trust=trust,
        )
    if as_json:
        output.document({"ok": report.ok, "report": report})
    else:
        _print(output, report)
    return exit_codes.OK if report.ok else exit_codes.FINDING


def _print(output: Output, report: VerifyReport) -> None:
    for problem in report.problems:
        output.line(f"bad: {problem}")
    for volume in report.volume_problems:
        output.line(f"bad volume: {volume.message}")
    for path, offset in report.bad_blocks[:_ROWS_SHOWN]:
        output.line(f"bad directory block: {path}, offset {offset:,}")
    _more(output, len(report.bad_blocks) - _ROWS_SHOWN)
    print_bad_samples(output, report.bad_samples)
    text = f"checked {count_text(report.checked_samples)} of {count_text(report.samples)} samples, "
    text += f"{bytes_text(report.checked_bytes)}, in {duration_text(report.seconds)}"
    rate = report.checked_bytes / max(report.seconds, 1e-9)
    output.line(f"{text} ({bytes_text(rate)}/s): {report.path}")
    if report.unchecked_samples:
        output.remark(f"{count_text(report.unchecked_samples)} samples have no usable checksum")
    if report.ok:
        output.line("all good")
        return
    bad = f"{count_text(len(report.bad_samples))} bad samples"
    others = len(report.volume_problems) + len(report.bad_blocks) + len(report.problems)
    output.line(f"{bad}, {count_text(others)} other problems")
    output.remark(f"  next: headrace repair {report.path}")


def print_bad_samples(output: Output, bad: Sequence[BadSample]) -> None:
    """A table of bad samples, the first ones unless verbose."""
    from rich.table import Table
    from rich.text import Text

    if not bad:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("sample", "name", "what", "found", "expected", "offset", "bytes", "file"):
        right = heading in ("sample", "offset", "bytes")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    shown = bad if output.verbose else bad[:_ROWS_SHOWN]
    for each in shown:
        table.add_row(
            str(each.index), Text(printable(each.name)), each.kind, each.found, each.expected,
            f"{each.offset_bytes:,}", f"{each.length:,}", Text(printable(each.path)),
        )  # fmt: skip
    output.console().print(table)
    _more(output, len(bad) - len(shown))


def _more(output: Output, hidden: int) -> None:
    if hidden > 0:
        output.remark(f"and {count_text(hidden)} more; --json lists all")
