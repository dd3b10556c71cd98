"""Keys: every key of DLIO's schema, upstream's and MLCommons', and what becomes of it.

A key is honoured (it has a converter), honoured for some values only (`only`, with the reason), or refused
with a reason. Nothing is ignored: a key that did nothing would make two runs look different that are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from headrace.bench.config import values as v
from headrace.bench.config.times import time_distribution

__all__ = ["ALIASES", "KEYS", "SECTION_ALIASES", "Key"]


@dataclass(frozen=True, slots=True)
class Key:
    """What may stand under a key.

    Attributes:
        convert: from YAML's value to ours; says what is expected.
        only: the values that are possible here, after conversion; None: all.
        reason: why others are not possible; alone: why the key is not possible at all.
    """

    convert: v.Converter | None = None
    only: tuple[Any, ...] | None = None
    reason: str = ""


_DATATYPE: Final = v.choice("int8", "uint8", "fp16", "bf16", "fp32", "fp64")
_STEPS: Final = v.integer(-1)
_PYTHON_CLASS: Final = "DLIO's plugin classes are made for its own base classes; "
_NO_EFFECT: Final = "DLIO reads this key and does nothing with it"
_PROFILER: Final = "outside profilers are not started: the report has device bytes and latencies"
_OBJECTS: Final = "object stores are not read by the benchmark"

_FORMAT: Final = v.choice(
    "tfrecord", "hdf5", "csv", "npz", "npy", "jpeg", "png", "indexed_binary", "mmap_indexed_binary",
    "parquet", "synthetic",
)  # fmt: skip


def _format(value: Any) -> str:
    if value == "hdf5_opt":
        raise ValueError("hdf5: DLIO has a name hdf5_opt, and neither writes nor reads it")
    name: str = _FORMAT(value)
    return name


KEYS: Final[dict[str, Key]] = {
    "framework": Key(v.choice("tensorflow", "pytorch")),
    "debug": Key(v.boolean, (False,), _NO_EFFECT),
    "model.name": Key(v.text),
    "model.type": Key(v.optional(v.text)),
    "model.model_size_bytes": Key(v.integer(0)),
    "model.model_datatype": Key(_DATATYPE),
    "model.optimizer_datatype": Key(_DATATYPE),
    "model.optimization_groups": Key(v.integers(0)),
    "model.num_layers": Key(v.integer(-1)),
    "model.layer_parameters": Key(v.integers(0)),
    "model.parallelism.tensor": Key(v.integer(1)),
    "model.parallelism.pipeline": Key(v.integer(1)),
    "model.parallelism.data": Key(v.integer(-1)),
    "model.parallelism.zero_stage": Key(v.integer(0)),
    "model.transformer.vocab_size": Key(v.integer(1)),
    "model.transformer.hidden_size": Key(v.integer(1)),
    "model.transformer.ffn_hidden_size": Key(v.integer(1)),
    "model.transformer.num_attention_heads": Key(v.integer(1)),
    "model.transformer.num_kv_heads": Key(v.integer(1)),
    "workflow.generate_data": Key(v.boolean),
    "workflow.train": Key(v.boolean),
    "workflow.evaluation": Key(v.boolean),
    "workflow.checkpoint": Key(v.boolean),
    "workflow.profiling": Key(v.boolean, (False,), _PROFILER),
    "workflow.debug": Key(v.boolean, (False,), _NO_EFFECT),
    "workflow.query": Key(reason="`dlio_benchmark_query` alone has it"),
    "storage.storage_type": Key(v.choice("local_fs", "parallel_fs", "s3", "aistore", "direct_fs")),
    "storage.storage_root": Key(v.text),
    "storage.storage_library": Key(v.optional(v.text)),
    "storage.storage_options": Key(v.mapping),
    "storage.post_generation_settle_seconds": Key(v.number(0)),
    "dataset.data_folder": Key(v.text),
    "dataset.format": Key(_format),
    "dataset.num_files_train": Key(v.integer(0)),
    "dataset.num_files_eval": Key(v.integer(0)),
    "dataset.num_samples_per_file": Key(v.integer(1)),
    "dataset.record_length_bytes": Key(v.number(1)),
    "dataset.record_length_bytes_stdev": Key(v.number(0)),
    "dataset.record_length_bytes_resize": Key(v.number(0)),
    "dataset.record_dims": Key(v.integers(1)),
    "dataset.record_element_type": Key(v.text),
    "dataset.record_element_bytes": Key(
        reason="DLIO overwrites it with the size of dataset.record_element_type; set that one"
    ),
    "dataset.num_subfolders_train": Key(v.integer(0)),
    "dataset.num_subfolders_eval": Key(v.integer(0)),
    "dataset.file_prefix": Key(v.text),
    "dataset.compression": Key(v.choice(
        "none", "gzip", "zip", "bz2", "xz", "lzf", "snappy", "lz4", "zstd"
    )),
    "dataset.compression_level": Key(v.integer(0)),
    "dataset.enable_chunking": Key(v.boolean, (False,), f"{_NO_EFFECT}; set hdf5.chunk_dims"),
    "dataset.chunk_size": Key(v.integer(0), (0,), f"{_NO_EFFECT}; set hdf5.chunk_dims"),
    "dataset.keep_files": Key(v.boolean),
    "dataset.generation_buffer_size": Key(v.integer(1)),
    "dataset.hdf5.chunk_dims": Key(v.integers(1)),
    "dataset.hdf5.num_dset_per_record": Key(v.integer(1)),
    "dataset.hdf5.max_shape": Key(v.integers(1)),
    "dataset.parquet.columns": Key(list),
    "dataset.parquet.row_group_size": Key(v.integer(1)),
    "dataset.parquet.partition_by": Key(v.optional(v.text), (None,), "files would be named anew"),
    "dataset.parquet.generation_batch_size": Key(v.integer(0)),
    "dataset.parquet.read_mode": Key(
        v.choice("row_group"), ("row_group",), "row groups are what is read"
    ),
    "dataset.parquet.use_s3dlio_gen": Key(v.boolean, (False,), "s3dlio is not used"),
    "dataset.data_gen_method": Key(v.choice("dgen", "numpy")),
    "dataset.skip_listing": Key(v.boolean),
    "dataset.listing_validation_interval": Key(v.integer(1)),
    "dataset.requests": Key(v.optional(v.text)),
    "dataset.num_files_generated": Key(reason="set num_files_train to the files that are there"),
    "reader.engine": Key(v.word),
    "reader.data_loader": Key(v.choice(
        "pytorch", "tensorflow", "dali", "native_dali", "synthetic", "custom", "none"
    )),
    "reader.data_loader_classname": Key(
        reason=_PYTHON_CLASS + "give reader.engine=custom:MODULE:CLASS"
    ),
    "reader.data_loader_sampler": Key(v.choice("iterative", "index"), ("index",),
        "samples are always read by their index, truly shuffled"),
    "reader.reader_classname": Key(reason=_PYTHON_CLASS + "give reader.engine=custom:MODULE:CLASS"),
    "reader.multiprocessing_context": Key(v.optional(v.choice("fork", "spawn", "forkserver"))),
    "reader.batch_size": Key(v.integer(1)),
    "reader.batch_size_eval": Key(v.integer(1)),
    "reader.read_threads": Key(v.integer(0)),
    "reader.write_threads": Key(v.integer(1)),
    "reader.computation_threads": Key(v.integer(1)),
    "reader.prefetch_size": Key(v.integer(0)),
    "reader.file_shuffle": Key(v.shuffle),
    "reader.sample_shuffle": Key(v.shuffle),
    "reader.shuffle_size": Key(v.integer(1)),
    "reader.read_type": Key(v.choice("on_demand", "memory"), ("on_demand",),
        "data that is read once and then served from memory says nothing about storage"),
    "reader.file_access": Key(v.choice("multi", "shared", "collective", "mpio", "posix"),
        ("multi", "posix"), _NO_EFFECT),
    "reader.transfer_size": Key(v.optional(v.integer(1))),
    "reader.preprocess_time": Key(time_distribution),
    "reader.preprocess_time_stdev": Key(v.number(0)),
    "reader.pin_memory": Key(v.boolean),
    "reader.odirect": Key(v.boolean),
    "reader.dont_use_mmap": Key(v.boolean, (False,), _NO_EFFECT),
    "reader.transformed_record_dims": Key(v.integers(1)),
    "reader.transformed_record_element_type": Key(v.text),
    "train.epochs": Key(v.integer(1)),
    "train.computation_time": Key(time_distribution),
    "train.computation_time_stdev": Key(v.number(0)),
    "train.total_training_steps": Key(_STEPS),
    "train.seed": Key(v.integer(0)),
    "train.seed_change_epoch": Key(v.boolean),
    "evaluation.eval_time": Key(time_distribution),
    "evaluation.eval_time_stdev": Key(v.number(0)),
    "evaluation.eval_after_epoch": Key(v.integer(0)),
    "evaluation.epochs_between_evals": Key(v.integer(1)),
    "checkpoint.checkpoint_folder": Key(v.text),
    "checkpoint.checkpoint_after_epoch": Key(v.integer(0)),
    "checkpoint.epochs_between_checkpoints": Key(v.integer(1)),
    "checkpoint.steps_between_checkpoints": Key(_STEPS),
    "checkpoint.type": Key(v.choice("rank_zero", "all_ranks")),
    "checkpoint.mode": Key(v.choice("default", "subset")),
    "checkpoint.checkpoint_mechanism_classname": Key(reason=_PYTHON_CLASS + "leave it out"),
    "checkpoint.fsync": Key(v.boolean),
    "checkpoint.writer": Key(v.optional(v.choice("plain", "fsync", "direct", "headrace"))),
    "checkpoint.local_folder": Key(v.optional(v.text)),
    "checkpoint.time_between_checkpoints": Key(v.number(-1)),
    "checkpoint.num_checkpoints_write": Key(v.integer(-1)),
    "checkpoint.num_checkpoints_read": Key(v.integer(-1)),
    "checkpoint.recovery_rank_shift": Key(v.boolean),
    "checkpoint.rank_sync": Key(v.boolean),
    "checkpoint.randomize_tensor": Key(v.boolean),
    "checkpoint.ksm": Key(
        reason="checkpoints are streamed from small buffers: there is no memory to merge"
    ),
    "output.folder": Key(v.optional(v.text)),
    "output.log_file": Key(v.text),
    "output.metric.exclude_start_steps": Key(v.integer(0)),
    "output.metric.exclude_end_steps": Key(v.integer(0)),
    "profiling.profiler": Key(v.choice("none", "iostat", "darshan", "tensorboard")),
    "profiling.iostat_devices": Key(v.texts),
    "metric.au": Key(v.number(0, 1)),
}  # fmt: skip
"""By their full names. `profiling.profiler` counts only with `workflow.profiling`."""

SECTION_ALIASES: Final = {"data_reader": "reader"}
"""DLIO's own other name."""

ALIASES: Final = {
    "model.model_size": ("model.model_size_bytes", "DLIO ignores it: its checkpoint has 10 kB"),
    "dataset.record_length": (
        "dataset.record_length_bytes",
        "DLIO ignores it: its records have 64 KiB",
    ),
    "dataset.record_length_stdev": ("dataset.record_length_bytes_stdev", "DLIO ignores it"),
    "dataset.record_length_resize": ("dataset.record_length_bytes_resize", "DLIO ignores it"),
}
"""Keys that people write, that DLIO ignores, and that are honoured here: (key, a note)."""
