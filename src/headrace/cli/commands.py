"""Commands: which there are, by what they are for, and the module where each lives.

Apart from the modules, so that running one command loads and builds that one: dozens of others, with all
their options, take typer three times as long as the interpreter needs to start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    import typer

__all__ = ["NAMES", "SECTIONS", "add_commands"]

_ELSEWHERE: Final = {"unmount": "mount", "job": "stage"}
"""Commands that live with another one; the module of others has their name."""

SECTIONS: Final = {
    "First steps": ("doctor", "demo", "init"),
    "Data sets": (
        "pack", "index", "append", "info", "ls", "cat", "read", "verify", "repair", "cache",
    ),
    "Programs": ("run", "launch", "scaling", "mount", "unmount"),
    "Why training waits": (
        "report", "top", "record", "whatif", "ab", "verify-epoch", "compare-runs", "bench",
    ),
    "Other nodes' data": ("export", "image", "stage", "job"),
    "Nodes": ("node", "control", "policy", "agent"),
    "Clusters": ("cluster", "web", "starving", "usage", "job-report", "grafana"),
    "This installation": ("config", "version"),
}  # fmt: skip
"""All commands, as `headrace --help` shows them."""

_GROUPS: Final = frozenset(
    ("bench", "cache", "node", "control", "policy", "agent", "grafana", "cluster")
)
"""Commands that have commands of their own."""

_LAUNCHERS: Final = ("run", "record", "launch", "ab")
"""What follows the own options of these is another program's."""

NAMES: Final = tuple(name for names in SECTIONS.values() for name in names)
"""All first words."""


def add_commands(app: typer.Typer, names: Iterable[str]) -> None:
    """Add the commands of these names."""
    for name in names:
        if name in _GROUPS:
            app.add_typer(import_module(f"headrace.cli.{name}").app, name=name)
            continue
        function = name.replace("-", "_")
        module = import_module(f"headrace.cli.{_ELSEWHERE.get(name, function)}")
        settings = {"allow_interspersed_args": False} if name in _LAUNCHERS else None
        app.command(name, context_settings=settings)(getattr(module, function))
