"""The option `--simulate NAME`, for commands that read data."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from headrace.io import PRESETS, simulation_of


def _known(name: str | None) -> str | None:
    if name is not None:
        try:
            simulation_of(name)
        except ValueError as e:
            raise typer.BadParameter(str(e)) from e
    return name


SimulateOption = Annotated[
    str | None,
    Option(
        metavar="NAME",
        callback=_known,
        help=f"Read as if from a slow storage: {', '.join(sorted(PRESETS))}; NAME@SEED for another "
        "sequence. Figures are labelled.",
    ),
]
"""A preset's name, checked; hand it on as the loader's `simulate`."""
