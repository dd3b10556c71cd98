"""Options of `headrace cluster run` and `batch`, made of the table of what can be asked."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cluster.request import ASKS, Ask, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["DryRun", "From", "SiteFile", "Where", "asking"]

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would be submitted, byte for byte; submit nothing."),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="A saved snapshot instead of the live cluster (`queue --save`).",
    ),
]
SiteFile = Annotated[
    Path | None,
    typer.Option("--site", help="The site's file, as `headrace cluster init` writes it."),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--executor", metavar="NAME", help="slurm or local. Default: slurm where it is installed."
    ),
]


def asking(command: Callable[..., int], without: Collection[str] = ()) -> Callable[..., int]:
    """The command, with an option for each row of the table.

    Args:
        command: takes what was given as `asked`, by field.
        without: fields that make no sense for it.
    """
    asks = [ask for ask in ASKS if ask.field not in without]

    @functools.wraps(command)
    def with_options(*words: Any, **given: Any) -> int:
        return command(*words, asked={ask.field: given.pop(ask.field) for ask in asks}, **given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    before = [p for p in own if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    after = [p for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name != "asked"]
    parameters = [*before, *(_parameter(ask) for ask in asks), *after]
    # typer reads both.
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    del with_options.__wrapped__
    return with_options


def _parameter(ask: Ask) -> inspect.Parameter:
    kind: Any = {Kind.FLAG: bool, Kind.TEXTS: list[str] | None}.get(ask.kind, str | None)
    metavar = None if ask.kind is Kind.FLAG else ask.metavar or ask.kind.value
    option = typer.Option(*ask.flags, help=ask.help, metavar=metavar, show_default=False)
    return inspect.Parameter(
        ask.field, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option],
        default=False if ask.kind is Kind.FLAG else None,
    )  # fmt: skip
