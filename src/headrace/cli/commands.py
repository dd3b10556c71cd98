"""Commands: which there are, in the order in which a user meets them, and the module where each lives.

Apart from the modules, so that running one command loads and builds that one: dozens of others, with all
their options, take typer three times as long as the interpreter needs to start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    import typer

__all__ = ["NAMES", "add_commands"]

_ELSEWHERE: Final = {"unmount": "mount", "job": "stage"}
"""Commands that live with another one; the module of others has their name."""

_COMMANDS: Final = (
    "pack", "index", "append", "info", "ls", "cat", "read", "verify", "repair", "image", "mount", "unmount",
    "export", "stage", "job", "init", "scaling", "doctor", "whatif", "demo", "top", "starving", "usage",
    "config", "version", "compare-runs", "verify-epoch", "report", "run", "record", "launch", "ab",
    "job-report", "web",
)  # fmt: skip

_GROUPS: Final = ("bench", "cache", "node", "control", "policy", "agent", "grafana", "cluster")

_LAUNCHERS: Final = ("run", "record", "launch", "ab")
"""What follows the own options of these is another program's."""

NAMES: Final = frozenset((*_COMMANDS, *_GROUPS))
"""All first words."""


def add_commands(app: typer.Typer, names: Iterable[str]) -> None:
    """Add the commands of these names, in their usual order."""
    wanted = frozenset(names)
    for name in _COMMANDS:
        if name in wanted:
            function = name.replace("-", "_")
            module = import_module(f"headrace.cli.{_ELSEWHERE.get(name, function)}")
            settings = {"allow_interspersed_args": False} if name in _LAUNCHERS else None
            app.command(name, context_settings=settings)(getattr(module, function))
    for name in _GROUPS:
        if name in wanted:
            app.add_typer(import_module(f"headrace.cli.{name}").app, name=name)
