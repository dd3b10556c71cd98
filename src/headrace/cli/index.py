"""`headrace index`: makes a store of data where it lies, without a copy."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.output import Json, Output, Quiet, Verbose
from headrace.cli.storage import StorageOptions, storage_options
from headrace.cli.writing import (
    Column,
    Extensions,
    Label,
    PrefixNames,
    SkipErrors,
    Sources,
    Workers,
    listing_of,
    print_report,
    source_of,
)


def index(
    source: Sources,
    target: Annotated[
        str, typer.Argument(help="The store's folder or URL; holds the directory only.")
    ],
    *,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store at TARGET, atomically.")
    ] = False,
    checksum: Annotated[
        bool,
        typer.Option(help="Read every sample once and keep its checksum, to check later reads."),
    ] = True,
    extensions: Extensions = None,
    skip_errors: SkipErrors = False,
    prefix_names: PrefixNames = False,
    column: Column = None,
    label: Label = None,
    workers: Workers = None,
    storage: StorageOptions = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Index a folder, uncompressed tar, TFRecord, npy, HDF5, Parquet, Arrow or MDS in place: no copy.

    The data must stay where it is and as it is; headrace notices when it does not.
    """
    from headrace.cli.progress import progress
    from headrace.store import index as index_source

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    listing = listing_of(
        extensions=extensions,
        prefix_names=prefix_names,
        column=column,
        label=label,
        workers=workers,
    )
    with progress(output, "indexing") as tell:
        report = index_source(
            source_of(source),
            target,
            overwrite=overwrite,
            checksum=checksum,
            on_error="skip" if skip_errors else "raise",
            progress=tell,
            storage_options=storage_options(storage),
            **listing,
        )
    return print_report(output, report, "indexed")
