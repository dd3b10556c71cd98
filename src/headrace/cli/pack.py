"""`headrace pack`: copies a source into a store that reads fast."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.cli.output import Json, Output, Quiet, Verbose
from headrace.cli.storage import StorageOptions, storage_options
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


def pack(
    source: Sources,
    target: Annotated[
        str, typer.Argument(help="The store's folder or URL; appears when all is done.")
    ],
    *,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store at TARGET, atomically.")
    ] = False,
    restart: Restart = False,
    extensions: Extensions = None,
    skip_errors: SkipErrors = False,
    prefix_names: PrefixNames = False,
    column: Column = None,
    label: Label = None,
    volume_bytes: VolumeBytes = None,
    workers: Workers = None,
    storage: StorageOptions = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Copy a folder, tar, TFRecord, npy, HDF5, Parquet, Arrow, MDS or ArrayRecord into a new store.

    When it is interrupted, the same command goes on where it stopped.
    """
    from headrace.cli.progress import progress
    from headrace.store import pack as pack_store

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    sizes: dict[str, Any] = {} if volume_bytes is None else {"volume_bytes": volume_bytes}
    listing = listing_of(
        extensions=extensions,
        prefix_names=prefix_names,
        column=column,
        label=label,
        workers=workers,
    )
    with progress(output, "packing") as tell:
        report = pack_store(
            source_of(source),
            target,
            overwrite=overwrite,
            resume=not restart,
            on_error="skip" if skip_errors else "raise",
            progress=tell,
            storage_options=storage_options(storage),
            **listing,
            **sizes,
        )
    return print_report(output, report, "packed")
