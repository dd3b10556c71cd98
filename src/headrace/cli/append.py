"""`headrace append`: packs a source into a new segment of a store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.cli.output import Json, Output, Quiet, Verbose
from headrace.cli.writing import (
    Column,
    Extensions,
    Label,
    PrefixNames,
    Restart,
    SkipErrors,
    Sources,
    VolumeBytes,
    Workers,
    listing_of,
    print_report,
    source_of,
)


def append(
    source: Sources,
    store: Annotated[str, typer.Argument(help="The store's folder.")],
    *,
    restart: Restart = False,
    extensions: Extensions = None,
    skip_errors: SkipErrors = False,
    prefix_names: PrefixNames = False,
    column: Column = None,
    label: Label = None,
    volume_bytes: VolumeBytes = None,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Add the samples of a source to a store, as a new segment.

    Whoever has the store open keeps what they opened; who opens it later sees the new samples too.
    """
    from headrace.cli.progress import progress
    from headrace.store import append as append_to_store

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    sizes: dict[str, Any] = {} if volume_bytes is None else {"volume_bytes": volume_bytes}
    listing = listing_of(
        extensions=extensions,
        prefix_names=prefix_names,
        column=column,
        label=label,
        workers=workers,
    )
    with progress(output, "appending") as tell:
        report = append_to_store(
            source_of(source),
            store,
            resume=not restart,
            on_error="skip" if skip_errors else "raise",
            progress=tell,
            **listing,
            **sizes,
        )
    return print_report(output, report, "appended")
