"""`headrace info`: what a store holds, without reading a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.base.text import binary_text, bytes_text, count_text
from headrace.cli.output import Json, Output, Quiet, Verbose, printable
from headrace.cli.storage import StorageOptions, TrustOptions, storage_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from headrace.store.summary import Summary

_CLASSES_SHOWN = 12
_VOLUMES_SHOWN = 8
_BAR_CELLS = 32


def info(
    store: Annotated[str, typer.Argument(help="A store, or a source that can be opened directly.")],
    *,
    storage: StorageOptions = None,
    trust: TrustOptions = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show samples, sizes, classes, segments, volumes, checksums and page-cache residency."""
    from headrace.api import open as open_store
    from headrace.store.summary import summarise

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    with open_store(store, storage_options=storage_options(storage), trust=trust) as opened:
        summary = summarise(opened)
    if as_json:
        output.document(_document(summary))
    else:
        _draw(output.console(), summary, verbose=verbose)


def _document(summary: Summary) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(summary) | {"resident_share": summary.resident_share}


def _draw(console: Console, summary: Summary, *, verbose: bool) -> None:
    from rich.text import Text

    facts = {
        "samples": count_text(summary.samples),
        "bytes": f"{count_text(summary.bytes)} ({bytes_text(summary.bytes)})",
        "sample size": f"{bytes_text(summary.size_min)} to {bytes_text(summary.size_max)}, "
        f"mean {bytes_text(summary.size_mean)}",
        "parts": ", ".join(summary.parts),
        "columns": ", ".join(f"{name} ({kind})" for name, kind in summary.columns.items()),
        "checksums": "yes" if summary.checksums else "no: reads cannot be verified",
        "page cache": _residency(summary.resident_share),
        "fingerprint": summary.fingerprint,
    }
    console.print(Text(printable(summary.path), style="bold"))
    for name, value in facts.items():
        if value:
            console.print(Text(f"  {name:<12} {printable(value)}"))
    _draw_sizes(console, summary)
    _draw_classes(console, summary, verbose=verbose)
    _draw_segments(console, summary, verbose=verbose)


def _residency(share: float | None) -> str:
    return "unknown here" if share is None else f"{share:.0%} resident"


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)


def _draw_sizes(console: Console, summary: Summary) -> None:
    if not summary.sizes:
        return
    table = _table("\nsizes")
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("below", justify="right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    most = max(b.samples for b in summary.sizes)
    for each in summary.sizes:
        table.add_row(
            binary_text(each.low_bytes), binary_text(each.high_bytes), count_text(each.samples),
            _bar(each.samples / most),
        )  # fmt: skip
    console.print(table)


def _bar(share: float) -> str:
    """A bar in eighths of a cell; what is not nothing shows."""
    eighths = max(round(share * _BAR_CELLS * 8), 1 if share else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _draw_classes(console: Console, summary: Summary, *, verbose: bool) -> None:
    from rich.text import Text

    if not summary.classes:
        return
    table = _table(f"\nclasses: {count_text(len(summary.classes))}")
    for heading in ("label", "class", "samples"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    shown = summary.classes if verbose else summary.classes[:_CLASSES_SHOWN]
    for each in shown:
        name = "none" if each.label < 0 else each.name or ""
        table.add_row(str(each.label), Text(printable(name)), count_text(each.samples))
    console.print(table)
    _more(console, len(summary.classes) - len(shown))


def _draw_segments(console: Console, summary: Summary, *, verbose: bool) -> None:
    from rich.text import Text

    table = _table("\nsegments")
    for heading in ("segment", "samples", "volume", "bytes", "resident", "path"):
        right = heading in ("samples", "bytes", "resident")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    hidden = 0
    for segment in summary.segments:
        shown = segment.volumes if verbose else segment.volumes[:_VOLUMES_SHOWN]
        hidden += len(segment.volumes) - len(shown)
        for number, volume in enumerate(shown):
            share = (
                f"{volume.resident_bytes / volume.bytes:.0%}"
                if volume.bytes and volume.resident_bytes is not None
                else "?"
            )
            table.add_row(
                segment.directory.removesuffix(".hrd") if number == 0 else "",
                count_text(segment.samples) if number == 0 else "",
                volume.kind, bytes_text(volume.bytes or 0), share, Text(printable(volume.path)),
            )  # fmt: skip
    console.print(table)
    _more(console, hidden)


def _more(console: Console, hidden: int) -> None:
    if hidden > 0:
        console.print(f"and {count_text(hidden)} more; -v or --json shows all", style="dim")
