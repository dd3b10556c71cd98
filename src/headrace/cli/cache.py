"""`headrace cache`: the caches below a `cache_dir`: which there are, and removing them safely."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.base.text import bytes_text, count_text
from headrace.cli.output import Json, Output, printable

if TYPE_CHECKING:
    from headrace.plane.cache_directory import CacheEntry

__all__ = ["app", "ls", "rm"]

app = typer.Typer(
    help="List and remove caches on the local disk (`cache_dir=`).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder given as cache_dir.")]


@app.command()
def ls(directory: Folder, *, as_json: Json = False) -> None:
    """List caches: data set, samples, bytes, how complete, and whether a job uses them."""
    from headrace.plane.cache_directory import CacheDirectory

    output = Output(as_json=as_json)
    found = CacheDirectory(directory).caches()
    if as_json:
        output.document({"path": directory, "caches": [_document(info) for info in found]})
        return
    for info in found:
        state = "in use" if info.in_use else f"used {_ago(info.used_s)} ago"
        output.line(
            f"{info.fingerprint}  {_percent(info):>4}  {count_text(info.samples)} samples  "
            f"{bytes_text(info.bytes)}  {state}  {printable(info.source)}"
        )
    if not found:
        output.remark(f"There is no cache in {directory}.")


@app.command()
def rm(
    directory: Folder,
    fingerprint: Annotated[
        str | None, typer.Argument(help="The cache's fingerprint, or how it begins.")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All caches that no job uses.")] = False,
    as_json: Json = False,
) -> None:
    """Remove a cache, or all of them. What a job uses, or headrace did not make, stays."""
    from pathlib import Path

    from headrace.plane.cache_directory import CacheDirectory

    output = Output(as_json=as_json)
    if (fingerprint is None) == (not everything):
        raise ValueError("name a cache (by its fingerprint) or give --all")
    shelf = CacheDirectory(directory)
    chosen = shelf.caches()
    if fingerprint is None:
        chosen = [info for info in chosen if not info.in_use]
    else:
        chosen = [info for info in chosen if Path(info.path).name.startswith(fingerprint)]
        if len(chosen) != 1:
            raise ValueError(
                f"{fingerprint!r} fits {len(chosen)} caches in {directory}, expected one"
            )
    removed = [(info, shelf.remove(info.path)) for info in chosen]
    freed = sum(size for _, size in removed)
    if as_json:
        output.document({"removed": [_document(info) for info, _ in removed], "bytes": freed})
    else:
        output.line(f"removed {count_text(len(removed))} caches, {bytes_text(freed)}")


def _document(info: CacheEntry) -> dict[str, Any]:
    return {**asdict(info), "complete": info.complete}


def _percent(info: CacheEntry) -> str:
    # Rounded down: 100 % is said of a whole cache only.
    return f"{100 * info.samples // max(1, info.of_samples)}%"


def _ago(used_s: float) -> str:
    seconds = max(0.0, time.time() - used_s)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
