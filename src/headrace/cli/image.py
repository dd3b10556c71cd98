"""`headrace image`: writes a packed store as one file or block device."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from headrace.base.text import bytes_text
from headrace.cli.output import Json, Output, Quiet, Verbose


def image(
    store: Annotated[str, typer.Argument(help="The packed store's folder.")],
    out: Annotated[str, typer.Argument(help="A file or block device to write.")],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file or device that is not empty.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a packed store as one image, which any NVMe target can export as a namespace.

    Read it with headrace.open("nvme+tcp://host:port/nqn?ns=1").
    """
    from headrace.cli.progress import progress
    from headrace.fabric.image import write_image

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    with progress(output, "writing") as tell:
        report = write_image(
            store, out, force=force,
            progress=None if tell is None else lambda done, total: tell(0, None, done, total),
        )  # fmt: skip
    if as_json:
        output.document(dataclasses.asdict(report))
    else:
        output.line(f"wrote {report.files} files, {bytes_text(report.bytes)}: {report.path}")
