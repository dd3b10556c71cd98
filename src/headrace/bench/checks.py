"""Checks before a run: what the workload asks for can be done, and which of its keys have no effect.

Keys without effect are DLIO's, and right there: a run is not refused for them. But a key that did nothing,
silently, would make two runs look different that are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.bench.checkpoint_runs import checkpoint_problems
from headrace.bench.engines import engine_name
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


_ALWAYS: Final = {
    "dataset.generation_buffer_size": "files of any size are streamed from small buffers",
    "dataset.data_gen_method": "data is made by headrace's own generator; it cannot be compressed",
    "storage.storage_library": "mounted file systems are read, without a library",
    "storage.storage_options": "mounted file systems are read, without options",
    "profiling.profiler": "outside profilers are not started (workflow.profiling)",
    "profiling.iostat_devices": "outside profilers are not started (workflow.profiling)",
    "checkpoint.type": "which ranks write follows from model.parallelism, as in DLIO",
}

_BY_ENGINE: Final = {
    "reader.shuffle_size": (
        ("tensorflow",), "samples are shuffled over the whole data set, not in a window"
    ),
    "reader.computation_threads": (("tensorflow",), "nothing is computed upon samples"),
    "reader.transfer_size": (("tensorflow",), "each sample or file is read as a whole"),
    "reader.multiprocessing_context": (("torch",), "there are no worker processes"),
    "reader.pin_memory": (("torch",), "memory is not pinned"),
    "reader.transformed_record_dims": (("torch", "tensorflow"), "no tensor is made of samples"),
    "reader.transformed_record_element_type": (
        ("torch", "tensorflow"), "no tensor is made of samples"
    ),
    "dataset.record_length_bytes_resize": (
        ("torch", "tensorflow"), "no tensor is made of samples"
    ),
    "reader.preprocess_time": (("headrace", "torch", "tensorflow"), "it is left to the engine"),
    "reader.read_threads": (("headrace", "torch", "tensorflow"), "it is left to the engine"),
    "reader.prefetch_size": (("headrace", "torch", "tensorflow"), "it is left to the engine"),
}  # fmt: skip
"""Key: the engines that honour it, and why the others do not."""

_TFRECORD_ONLY: Final = ("reader.shuffle_size", "reader.transfer_size")


def notes_of(loaded: LoadedWorkload) -> list[str]:
    """A line for each key that was given and has no effect."""
    given = loaded.origins
    notes = [
        f"{loaded.at(key)} has no effect: {why}"
        for key in given
        for name, why in _ALWAYS.items()
        if key == name or key.startswith(name + ".")
    ]
    if "dataset.listing_validation_interval" in given and loaded.listing_interval is None:
        key = "dataset.listing_validation_interval"
        notes.append(f"{loaded.at(key)} has no effect without dataset.skip_listing")
    if "reader.write_threads" in given and not loaded.workload.workflow.generate_data:
        notes.append(f"{loaded.at('reader.write_threads')} has no effect: nothing is generated")
    if not loaded.workload.workflow.train:
        return notes if loaded.workload.workflow.generate_data else notes + _of_no_data(loaded)
    notes += _of_checkpoints(loaded)
    engine = engine_name(loaded)
    records = loaded.workload.dataset.format == "tfrecord"
    for key, (engines, why) in _BY_ENGINE.items():
        if key not in given or engine == "null":
            continue
        if engine not in engines:
            notes.append(f"{loaded.at(key)} has no effect with the engine {engine}: {why}")
        elif engine == "tensorflow" and key in _TFRECORD_ONLY and not records:
            notes.append(f"{loaded.at(key)} has no effect: it is for tfrecord files alone")
    return notes


def _of_checkpoints(loaded: LoadedWorkload) -> list[str]:
    """Of a run that trains."""
    why = dict.fromkeys(
        ("time_between_checkpoints", "recovery_rank_shift"), "it is for runs of checkpoints alone"
    )
    if loaded.workload.checkpoint.steps_between_checkpoints > 0:
        names = ("checkpoint_after_epoch", "epochs_between_checkpoints")
        why |= dict.fromkeys(
            names, "checkpoint.steps_between_checkpoints says when they are written"
        )
    if not loaded.workload.workflow.checkpoint:
        return []
    return [
        f"{loaded.at(f'checkpoint.{name}')} has no effect: {reason}"
        for name, reason in why.items()
        if f"checkpoint.{name}" in loaded.origins
    ]


def _of_no_data(loaded: LoadedWorkload) -> list[str]:
    """Of a run that only writes and reads checkpoints."""
    sections = ("dataset.", "reader.", "train.", "evaluation.")
    return [
        f"{loaded.at(key)} has no effect: no data set is read"
        for key in loaded.origins
        if key.startswith(sections) and key != "train.seed" and key not in _ALWAYS
    ]
