"""`headrace bench storage`: what a mount can do, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.base.text import binary_text, bytes_of, bytes_text
from headrace.cli.output import Json, Output, Quiet

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["storage"]


def storage(
    path: Annotated[str, typer.Argument(help="A folder of the mount.", metavar="PATH")],
    *,
    size: Annotated[
        str, typer.Option(metavar="BYTES", help="Of the large file; twice as much must be free.")
    ] = "256M",
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Of each measurement of reading, at most about.")
    ] = 0.3,
    files: Annotated[int, typer.Option(min=1, help="Small files to make and read.")] = 500,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Measure a mount in seconds: bandwidth, metadata, small samples, latency; with advice.

    Everything is written into a folder of its own in PATH, which is removed at the end.
    """
    from headrace.bench.storage import StorageOptions, characterise

    output = Output(as_json=as_json, quiet=quiet)
    options = StorageOptions(size_bytes=bytes_of(size), seconds=seconds, files=files)
    document = characterise(path, options)
    if as_json:
        output.document(document)
        return 0
    for line in _lines(document):
        output.line(line)
    for note in document["notes"]:
        output.remark(f"note: {note}")
    return 0


def _lines(document: dict[str, Any]) -> Iterator[str]:
    mount = document["provenance"]["mount"]
    past = "past the page cache" if document["direct"] else "through the page cache"
    yield f"{document['path']}: {mount.get('type', '?')} on {mount.get('source', '?')}, {past}"
    for name, rates in document["sequential"].items():
        told = ", ".join(f"{bytes_text(rate)}/s by {n}" for n, rate in rates.items())
        yield f"{'sequential ' + name.split('_')[0]:<18} {told} at a time"
    by_block: dict[int, list[str]] = {}
    for cell in document["random"]:
        rate = f"{bytes_text(cell['bytes_per_s'])}/s x{cell['depth']}"
        by_block.setdefault(cell["block_bytes"], []).append(rate)
    for block, rates in by_block.items():
        yield f"{'random ' + binary_text(block):<18} {', '.join(rates)}"
    batches = document["batches"]
    for name in ("packed", "files"):
        found = batches[name]
        yield (
            f"{'samples, ' + name:<18} {found['per_s']:,.0f}/s of {binary_text(batches['sample_bytes'])}; "
            f"batches of {batches['batch']}: {_ms(found['batch_s'])}"
        )
    yield f"{'latency, 4 KiB':<18} {_ms(document['latency_s'])}"
    yield f"{'write and sync':<18} {_ms(document['sync_s'])}"
    rates = [f"{name} {rate:,.0f}/s" for name, rate in document["metadata_per_s"].items()]
    yield f"{'metadata':<18} {', '.join(rates)} (by one thread, as this client caches)"
    for advice in document["advice"]:
        yield f"{'advice: ' + advice['about']:<18} {advice['why']}"


def _ms(times: dict[str, float]) -> str:
    names = ("p50", "p99", "p99.9", "max")
    return ", ".join(f"{name} {times[name] * 1e3:.2f} ms" for name in names)
