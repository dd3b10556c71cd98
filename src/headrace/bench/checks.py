"""Checks before a run: what the workload asks for can be done, and which of its keys have no effect.

Keys without effect are DLIO's, and right there: a run is not refused for them. But a key that did nothing,
silently, would make two runs look different that are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.bench.checkpoint_runs import checkpoint_problems
from headrace.bench.engines import engine_name
from headrace.bench.schema import KEYS
from headrace.bench.values import SchemaKey
from headrace.errors import WorkloadError

if TYPE_CHECKING:
    from headrace.bench.config import LoadedWorkload


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


_OF_DATA: Final = ("dataset.", "reader.", "train.", "evaluation.")
_TFRECORD_ONLY: Final = ("reader.shuffle_size", "reader.transfer_size")


def notes_of(loaded: LoadedWorkload) -> list[str]:
    """A line for each key that was given and has no effect."""
    does = loaded.workload.workflow
    unused = _of_checkpoints(loaded) if does.train else {}
    if loaded.listing_interval is None:
        unused["dataset.listing_validation_interval"] = " without dataset.skip_listing"
    if not does.generate_data:
        unused["reader.write_threads"] = ": nothing is generated"
    notes = []
    for name in loaded.origins:
        why = unused.get(name) or _why_unused(loaded, name)
        if why:
            notes.append(f"{loaded.at(name)} has no effect{why}")
    return notes


def _why_unused(loaded: LoadedWorkload, name: str) -> str:
    """Why a key has no effect in this run; nothing where it has one."""
    does = loaded.workload.workflow
    key = KEYS.get(name) or KEYS.get(name.rpartition(".")[0]) or SchemaKey()
    if key.unused and not key.engines:
        return f": {key.unused}"
    if not does.train:
        reads_nothing = not does.generate_data and name.startswith(_OF_DATA)
        return ": no data set is read" if reads_nothing and name != "train.seed" else ""
    engine = engine_name(loaded)
    if engine == "null" or not key.engines:
        return ""
    if engine not in key.engines:
        return f" with the engine {engine}: {key.unused}"
    if name in _TFRECORD_ONLY and loaded.workload.dataset.format != "tfrecord":
        return ": it is for tfrecord files alone"
    return ""


def _of_checkpoints(loaded: LoadedWorkload) -> dict[str, str]:
    """Keys of a run that trains, and why they have no effect."""
    if not loaded.workload.workflow.checkpoint:
        return {}
    unused = dict.fromkeys(
        ("checkpoint.time_between_checkpoints", "checkpoint.recovery_rank_shift"),
        ": it is for runs of checkpoints alone",
    )
    if loaded.workload.checkpoint.steps_between_checkpoints > 0:
        for name in ("checkpoint_after_epoch", "epochs_between_checkpoints"):
            unused[f"checkpoint.{name}"] = (
                ": checkpoint.steps_between_checkpoints says when they are written"
            )
    return unused
