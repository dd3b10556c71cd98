"""Sections: a workload as frozen dataclasses. Names are DLIO's, nested keys are joined with `_`.

Defaults are those of DLIO's code, where they differ from its documents. What the files of a data set
are like is said in `headrace.bench.dataset`, because the generator and the readers need it alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.bench.config.times import NO_TIME, TimeDistribution
from headrace.bench.dataset import DatasetSpec

__all__ = [
    "Checkpoint",
    "Evaluation",
    "Metric",
    "Model",
    "Output",
    "Profiling",
    "Reader",
    "Storage",
    "Train",
    "Workflow",
    "Workload",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model whose checkpoints are written."""

    name: str = "default"
    type: str | None = None
    """`transformer` is sized by its dimensions, anything else by `model_size_bytes`."""
    model_size_bytes: int = 10240
    model_datatype: str = "fp16"
    optimizer_datatype: str = "fp32"
    optimization_groups: tuple[int, ...] = ()
    num_layers: int = -1
    layer_parameters: tuple[int, ...] = ()
    parallelism_tensor: int = 1
    parallelism_pipeline: int = 1
    parallelism_data: int = -1
    """-1: as many as the ranks allow."""
    parallelism_zero_stage: int = 0
    transformer_vocab_size: int = 32000
    transformer_hidden_size: int = 2048
    transformer_ffn_hidden_size: int = 8192
    transformer_num_attention_heads: int = 32
    transformer_num_kv_heads: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """What a run does."""

    generate_data: bool = False
    train: bool = True
    evaluation: bool = False
    checkpoint: bool = False
    profiling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where the data set lies."""

    storage_type: str = "local_fs"
    storage_root: str = "./"
    storage_library: str | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    post_generation_settle_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How each accelerator reads."""

    engine: str = "headrace"
    """What reads: headrace, torch, tensorflow, null, or custom:MODULE:CLASS. DLIO has no such key."""
    data_loader: str = "tensorflow"
    """DLIO's choice; it decides the engine only where it is `synthetic`."""
    multiprocessing_context: str | None = "fork"
    batch_size: int = 1
    batch_size_eval: int = 1
    read_threads: int = 1
    write_threads: int | None = None
    """Threads that generate data; None: as many as the disk wants."""
    computation_threads: int = 1
    prefetch_size: int = 2
    file_shuffle: str = "off"
    sample_shuffle: str = "off"
    shuffle_size: int = 1024
    transfer_size: int | None = None
    preprocess_time: TimeDistribution = NO_TIME
    pin_memory: bool = True
    odirect: bool = False
    transformed_record_dims: tuple[int, ...] = ()
    transformed_record_element_type: str = "uint8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """How long to train."""

    epochs: int = 1
    computation_time: TimeDistribution = NO_TIME
    total_training_steps: int = -1
    """At most so many steps an epoch; -1: all."""
    seed: int = 123
    seed_change_epoch: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """When and how long to evaluate."""

    eval_time: TimeDistribution = NO_TIME
    eval_after_epoch: int = 1
    epochs_between_evals: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """When and how checkpoints are written and read."""

    checkpoint_folder: str = "./checkpoints/"
    checkpoint_after_epoch: int = 1
    epochs_between_checkpoints: int = 1
    steps_between_checkpoints: int = -1
    type: str = "rank_zero"
    mode: str = "default"
    fsync: bool = False
    writer: str | None = None
    """What writes: plain, fsync, direct or headrace; None: as `fsync` says. DLIO has no such key."""
    local_folder: str | None = None
    """Writer headrace: a folder that is written first. DLIO has no such key."""
    time_between_checkpoints: float = -1.0
    num_checkpoints_write: int = -1
    num_checkpoints_read: int = -1
    recovery_rank_shift: bool = False
    rank_sync: bool = False
    randomize_tensor: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where results go."""

    folder: str | None = None
    """None: hydra's run directory."""
    log_file: str = "dlio.log"
    metric_exclude_start_steps: int = 1
    metric_exclude_end_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """DLIO's outside profilers, which the report's own figures replace."""

    profiler: str = "iostat"
    iostat_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """When a run passes."""

    au: float = 0.90
    """Accelerator utilisation, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training job's I/O."""

    framework: str = "tensorflow"
    model: Model = field(default_factory=Model)
    workflow: Workflow = field(default_factory=Workflow)
    storage: Storage = field(default_factory=Storage)
    dataset: DatasetSpec = field(default_factory=DatasetSpec)
    reader: Reader = field(default_factory=Reader)
    train: Train = field(default_factory=Train)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    output: Output = field(default_factory=Output)
    profiling: Profiling = field(default_factory=Profiling)
    metric: Metric = field(default_factory=Metric)
