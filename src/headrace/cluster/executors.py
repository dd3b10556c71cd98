"""Executors: which one runs jobs here."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from headrace.cluster.executor import Executor

__all__ = ["EXECUTOR_VARIABLE", "executor", "executor_name"]

EXECUTOR_VARIABLE = "HEADRACE_EXECUTOR"


def executor_name(name: str | None = None) -> str:
    """Which one `executor` would give; it need not exist."""
    named = name or os.environ.get(EXECUTOR_VARIABLE)
    return named or ("slurm" if shutil.which("sbatch") else "local")


def executor(name: str | None = None) -> Executor:
    """The executor of this name.

    Args:
        name: `slurm` or `local`; by default HEADRACE_EXECUTOR, else Slurm's where sbatch is, else this
            machine's.

    Raises:
        ClusterRequestError: there is none of this name.
    """
    name = executor_name(name)
    if name == "slurm":
        from headrace.cluster.slurm.executor import SlurmExecutor

        return SlurmExecutor()
    if name == "local":
        from headrace.cluster.local.executor import LocalExecutor

        return LocalExecutor()
    raise ClusterRequestError(f"there is no executor {name!r}, expected slurm or local.")
