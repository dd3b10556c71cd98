"""Checks before a run: what is asked for can be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.bench.emulate.checkpoint import checkpoint_problems
from headrace.errors import WorkloadError

if TYPE_CHECKING:
    from headrace.bench.config.load import LoadedWorkload

__all__ = ["check_supported"]


def check_supported(loaded: LoadedWorkload, world: int) -> None:
    """Refuse what `run` does not do on so many accelerators.

    Raises:
        WorkloadError: with everything that is not done, and where it was asked for.
    """
    workload = loaded.workload
    problems = []
    if workload.storage.storage_type not in ("local_fs", "parallel_fs"):
        problems.append((
            "storage.storage_type",
            f"{workload.storage.storage_type} is not read by the benchmark: mount it, give local_fs",
        ))  # fmt: skip
    if workload.workflow.checkpoint:
        problems += checkpoint_problems(loaded, world)
    does = workload.workflow
    if not (does.train or does.generate_data or does.checkpoint):
        problems.append(("workflow.train", "is false, so there is nothing to run"))
    if not workload.dataset.keep_files:
        problems.append(("dataset.keep_files", "false is not done: data sets are never deleted"))
    if problems:
        raise WorkloadError("\n".join(f"{loaded.at(key)}: {why}" for key, why in problems))
