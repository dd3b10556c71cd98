"""`headrace cat`: the bytes of one sample, checked, on stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli.output import Json, Output, Verbose
from headrace.cli.storage import StorageOptions, TrustOptions, storage_options


def cat(
    store: Annotated[str, typer.Argument(help="A store, or a source that can be opened directly.")],
    sample: Annotated[str, typer.Argument(help="Its index, or its name.")],
    *,
    by_name: Annotated[
        bool, typer.Option("--name", help="SAMPLE is a name, even if it looks like an index.")
    ] = False,
    start: Annotated[int | None, typer.Option(min=0, help="First byte.")] = None,
    size: Annotated[int | None, typer.Option(min=0, help="Number of bytes.")] = None,
    part: Annotated[str | None, typer.Option(help="Which part, where there are several.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Binary to a terminal, too.")] = False,
    storage: StorageOptions = None,
    trust: TrustOptions = None,
    as_json: Json = False,
    verbose: Verbose = False,  # noqa: ARG001 - read where errors are printed
) -> None:
    """Write the bytes of a sample to stdout.

    With --json they come in base64, with what is known of the sample.
    """
    from headrace.api import open as open_store

    with open_store(store, storage_options=storage_options(storage), trust=trust) as opened:
        index = opened.index_of(sample if by_name or not _is_integer(sample) else int(sample))
        data = opened.read(index, start=start, size=size, part=part)
        if as_json:
            import base64

            Output(as_json=True).document(
                {
                    "index": index,
                    "name": opened.names[index],
                    "parts": opened.parts_of(index),
                    "part": part,
                    "start": start or 0,
                    "bytes": len(data),
                    "base64": base64.b64encode(data).decode("ascii"),
                }
            )
            return
        if sys.stdout.isatty() and not force and _is_binary(data):
            raise ValueError(
                f"sample {index} is binary and stdout is a terminal: redirect it, or give --force"
            )
        sys.stdout.buffer.write(data)


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()


def _is_binary(data: memoryview) -> bool:
    """Whether a terminal would suffer: control characters, or no UTF-8."""
    head = bytes(data[: 64 << 10])
    if any(byte < 0x20 and byte not in b"\t\n\r" for byte in head):
        return True
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as e:
        # A character may be cut at the end of what we looked at.
        return e.start < len(head) - 3
    return False
