"""What `pack`, `index` and `append` have in common: their options, and how their report is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from headrace.base.text import bytes_text, count_text, duration_text
from headrace.cli import exit_codes

if TYPE_CHECKING:
    from headrace.cli.output import Output
    from headrace.store.packing import WriteReport

__all__ = [
    "Column",
    "Extensions",
    "Label",
    "Listing",
    "PrefixNames",
    "Restart",
    "SkipErrors",
    "Sources",
    "VolumeBytes",
    "Workers",
    "listing_of",
    "print_report",
    "source_of",
]

Sources = Annotated[
    list[str],
    typer.Argument(
        help="A folder or an MDS data set; or tar, TFRecord, npy, HDF5, Parquet, Arrow files.",
        metavar="SOURCE...",
    ),
]
Extensions = Annotated[
    str | None, typer.Option("--ext", help="Folders: only files that end so, as 'jpg,png'.")
]
SkipErrors = Annotated[
    bool,
    typer.Option("--skip-errors", help="Leave out what cannot be read, list it, exit with 1."),
]
PrefixNames = Annotated[
    bool,
    typer.Option("--prefix-names", help="Several files: put the file's name before its samples'."),
]
Column = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        help="HDF5, Parquet, Arrow, MDS: what holds the samples' bytes; repeat for parts.",
    ),
]
Label = Annotated[
    str | None, typer.Option("--label", help="The same: what holds integer labels; '' for none.")
]
VolumeBytes = Annotated[
    int | None, typer.Option(min=8192, help="Begin a new file before one grows beyond this.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Threads that read the source.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Drop what an interrupted run left, do not resume.")
]

_SKIPPED_SHOWN = 20


def source_of(sources: list[str]) -> str | list[str]:
    """One path as it is (it may be a folder or a pattern), several as a list of files."""
    return sources[0] if len(sources) == 1 else sources


class Listing(TypedDict):
    """How a source is listed, in the library's words."""

    workers: int | None
    extensions: tuple[str, ...] | None
    prefix_names: bool
    column: tuple[str, ...] | None
    label: str | None


def listing_of(
    *,
    extensions: str | None,
    prefix_names: bool,
    column: list[str] | None,
    label: str | None,
    workers: int | None,
) -> Listing:
    """What stood on the command line, as the library takes it."""
    return {
        "workers": workers,
        "extensions": _split(extensions),
        "prefix_names": prefix_names,
        "column": tuple(column) if column else None,
        "label": label,
    }


def _split(extensions: str | None) -> tuple[str, ...] | None:
    """'jpg,.png' -> ('.jpg', '.png')."""
    if extensions is None:
        return None
    return tuple("." + e.strip().lstrip(".") for e in extensions.split(",") if e.strip())


def print_report(output: Output, report: WriteReport, done: str) -> int:
    """Prints what was written and returns the exit code.

    Args:
        output: the command's output.
        report: what the library did.
        done: the verb: "packed".
    """
    if output.as_json:
        output.document({"action": done, "report": report})
    else:
        rate = report.bytes / max(report.seconds, 1e-9)
        text = f"{done} {count_text(report.samples)} samples, {bytes_text(report.bytes)}"
        text += f", in {duration_text(report.seconds)} ({bytes_text(rate)}/s): {report.path}"
        output.line(text)
        if report.resumed_samples:
            output.remark(f"{count_text(report.resumed_samples)} of them by an interrupted run")
        for problem in report.skipped[:_SKIPPED_SHOWN]:
            output.remark(f"left out: {problem}")
        if len(report.skipped) > _SKIPPED_SHOWN:
            rest = len(report.skipped) - _SKIPPED_SHOWN
            output.remark(f"and {count_text(rest)} more; --json lists all")
    return exit_codes.FINDING if report.skipped else exit_codes.OK
