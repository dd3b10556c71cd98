"""`headrace mount` and `headrace unmount`: a store as a read-only folder."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.base.text import count_text
from headrace.cli.output import Json, Output
from headrace.cli.storage import StorageOptions, storage_options

if TYPE_CHECKING:
    from headrace.posix.mount import State

__all__ = ["mount", "unmount"]


def mount(
    store: Annotated[str, typer.Argument(help="A store, or a source that can be opened directly.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="An empty folder.")],
    *,
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Stay here, and log to stderr.")
    ] = False,
    allow_other: Annotated[
        bool, typer.Option("--allow-other", help="Let other users look in.")
    ] = False,
    cache: Annotated[
        str, typer.Option(help="Memory for samples that were read last.", metavar="SIZE")
    ] = "64M",
    check_up_to: Annotated[
        str,
        typer.Option(
            "--check-up-to", help="Larger samples are delivered unchecked.", metavar="SIZE"
        ),
    ] = "1G",
    timeout: Annotated[
        int, typer.Option(help="Seconds after which the kernel ends a mount that hangs.", min=1)
    ] = 120,
    log: Annotated[str | None, typer.Option(help="File for the log.", metavar="FILE")] = None,
    storage: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Show a store as a read-only folder, until it is unmounted."""
    from pathlib import Path

    from headrace.base.text import bytes_of
    from headrace.posix.mount import MountOptions, serve
    from headrace.posix.mount import mount as mount_store

    options = MountOptions(
        allow_other=allow_other,
        kept_bytes=bytes_of(cache),
        check_bytes_max=bytes_of(check_up_to),
        timeout_s=timeout,
        log=None if log is None else str(Path(log).absolute()),
        storage_options=storage_options(storage),
    )
    output = Output(as_json=as_json)

    def told(state: State) -> None:
        if as_json:
            output.document({"mount": state})
        else:
            output.line(
                f"{state.folder} shows the {count_text(state.samples)} samples of {state.store} "
                f"(process {state.pid})"
            )
        sys.stdout.flush()

    if not foreground:
        told(mount_store(store, folder, options))
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("headrace.mount")
    logger.addHandler(handler)
    try:
        serve(store, folder, options, told)
    finally:
        logger.removeHandler(handler)


def unmount(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where a store is mounted.")],
    *,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Even though files in it are in use.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Take a mounted store away, also one whose process was killed."""
    from headrace.posix.mount import unmount as unmount_store

    path = unmount_store(folder, lazy=lazy)
    output = Output(as_json=as_json)
    if as_json:
        output.document({"folder": path, "mounted": False})
    else:
        output.line(f"{path} is unmounted")
