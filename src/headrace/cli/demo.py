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
    epochs: Annotated[int, typer.Option(min=2, help="Epochs to train.")] = 3,
    out: Annotated[
        Path, typer.Option(help="Where stores and checkpoints go; stores are used again.")
    ] = Path("build/demo"),
    as_json: Json = False,
) -> int:
    """Pack real images, train on them, interrupt, resume, and compare with PyTorch's DataLoader."""
    from headrace.demo import DemoOptions, main

    return main(DemoOptions(data=data, epochs=epochs, out=out), as_json=as_json)
