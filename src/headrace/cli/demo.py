"""`headrace demo`: the whole way on real images, from files to a trained and resumed model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import Json


def demo(
    *,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of images, a folder per class. [default: Debian's clip art]"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to train.")] = 3,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the packed store.")] = False,
    as_json: Json = False,
) -> int:
    """Pack real images, train on them, interrupt, resume, and compare with PyTorch's DataLoader."""
    from headrace.demo import DemoOptions, run

    return int(run(DemoOptions(data=data, epochs=epochs, as_json=as_json, keep=keep)))
