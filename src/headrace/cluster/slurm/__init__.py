"""Slurm: submits, watches and cancels jobs through its commands, and reads what a cluster looks like.

Versions 20.11 to 25.x. Nothing of it runs between two calls, and no library of Slurm's is linked. Names are
imported when they are first used: a command that submits should not wait for what reads a cluster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.cluster.slurm.accounting import AccountedJob, NoAccounting, read_accounting
    from headrace.cluster.slurm.commands import Commands
    from headrace.cluster.slurm.executor import SlurmExecutor
    from headrace.cluster.slurm.snapshot import ScontrolOutput, read_snapshot, record

__all__ = [
    "AccountedJob",
    "Commands",
    "NoAccounting",
    "ScontrolOutput",
    "SlurmExecutor",
    "read_accounting",
    "read_snapshot",
    "record",
]

_HOMES = {
    **dict.fromkeys(("AccountedJob", "NoAccounting", "read_accounting"), "accounting"),
    "Commands": "commands",
    "SlurmExecutor": "executor",
    **dict.fromkeys(("ScontrolOutput", "read_snapshot", "record"), "snapshot"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
