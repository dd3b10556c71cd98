"""Executors: which one runs jobs here."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Literal

from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from headrace.cluster.executor import Executor

__all__ = ["EXECUTOR_VARIABLE", "executor", "executor_name"]

EXECUTOR_VARIABLE = "HEADRACE_EXECUTOR"


def executor_name(name: str | None = None) -> Literal["slurm", "local"]:
    """Which one `executor` gives.

    Raises:
        ClusterRequestError: there is none of this name.
    """
    named = name or os.environ.get(EXECUTOR_VARIABLE)
    if not named:
        return "slurm" if shutil.which("sbatch") else "local"
    if named == "slurm":
        return "slurm"
    if named == "local":
        return "local"
    raise ClusterRequestError(f"there is no executor {named!r}, expected slurm or local.")


def executor(name: str | None = None) -> Executor:
    """The executor of this name.

    Args:
        name: `slurm` or `local`; by default HEADRACE_EXECUTOR, else Slurm's where sbatch is, else this
            machine's.

    Raises:
        ClusterRequestError: there is none of this name.
    """
    if executor_name(name) == "slurm":
        from headrace.cluster.slurm.executor import SlurmExecutor

        return SlurmExecutor()
    from headrace.cluster.local.executor import LocalExecutor

    return LocalExecutor()
