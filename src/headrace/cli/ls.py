"""`headrace ls`: the samples of a store, streamed, so that a million cost seconds and no memory."""

from __future__ import annotations

import fnmatch
import json
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.output import Json, printable
from headrace.cli.storage import StorageOptions, TrustOptions, storage_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.store import Store

    Row = tuple[int, int, int | None, str]

_BATCH = 8192


def ls(
    store: Annotated[str, typer.Argument(help="A store, or a source that can be opened directly.")],
    pattern: Annotated[
        str | None,
        typer.Argument(
            help="Only names that match ('*.png', 'cats/*'), or that begin so ('cats/')."
        ),
    ] = None,
    *,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=0, help="At most so many.")
    ] = None,
    names_only: Annotated[bool, typer.Option("--names", "-1", help="Names only.")] = False,
    storage: StorageOptions = None,
    trust: TrustOptions = None,
    as_json: Json = False,
) -> None:
    """List samples: index, bytes, class and name."""
    from headrace.api import open as open_store

    with open_store(store, storage_options=storage_options(storage), trust=trust) as opened:
        classes = opened.classes or []
        rows = _select(opened, _matcher(pattern), limit)
        if as_json:
            _print_json(opened.path, rows, classes)
        elif names_only:
            _print_lines(printable(name) for _, _, _, name in rows)
        else:
            digits = len(str(max(len(opened) - 1, 0)))
            _print_lines(
                f"{i:>{digits}} {size:>12} {_class(label, classes):<16} {printable(name)}"
                for i, size, label, name in rows
            )


def _matcher(pattern: str | None) -> Callable[[str], Any] | None:
    if pattern is None:
        return None
    if any(c in pattern for c in "*?["):
        return re.compile(fnmatch.translate(pattern)).match
    return lambda name: name.startswith(pattern)


def _select(store: Store, matches: Callable[[str], Any] | None, limit: int | None) -> Iterator[Row]:
    """Index, size, label and name of the wanted samples, in the order of their indices."""
    from headrace.store.summary import sample_sizes

    left = len(store) if limit is None else limit
    labels = store.labels
    for begin in range(0, len(store), _BATCH):
        if left <= 0:
            return
        end = min(begin + _BATCH, len(store))
        names = store.names[begin:end]
        if matches is not None and not any(map(matches, names)):
            continue
        sizes = [int(s) for _, part in sample_sizes(store, begin, end) for s in part]
        batch_labels = [None] * len(names) if labels is None else labels[begin:end].tolist()
        for i, (size, label, name) in enumerate(
            zip(sizes, batch_labels, names, strict=True), begin
        ):
            if matches is None or matches(name):
                yield i, size, label, name
                left -= 1
                if left <= 0:
                    return


def _class(label: int | None, classes: list[str]) -> str:
    if label is None or label < 0:
        return "-"
    return printable(classes[label]) if label < len(classes) else str(label)


def _print_lines(lines: Iterator[str]) -> None:
    write = sys.stdout.write
    for line in lines:
        write(line + "\n")


def _print_json(path: str, rows: Iterator[Row], classes: list[str]) -> None:
    """One document, written as it comes."""
    write = sys.stdout.write
    write(f'{{"path": {json.dumps(path)}, "classes": {json.dumps(classes)}, "samples": [')
    separator = "\n"
    for i, size, label, name in rows:
        row = {"index": i, "bytes": size, "label": label, "name": name}
        write(separator + json.dumps(row))
        separator = ",\n"
    write("\n]}\n")
