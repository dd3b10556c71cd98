"""Schema: DLIO's keys, upstream's and MLCommons', and the workload that they make, as dataclasses.

Names of sections' fields are DLIO's, nested keys are joined with `_`, and defaults are those of DLIO's code,
where they differ from its documents. The fields of `dataset` are in `dataset.DatasetSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from headrace.bench.dataset import NO_TENSOR, DatasetSpec
from headrace.bench.values import (
    NO_TIME,
    SchemaKey,
    TimeDistribution,
    boolean,
    choice,
    integer,
    integers,
    key,
    keys_of,
    mapping,
    number,
    optional,
    shuffle,
    text,
    texts,
    time_distribution,
    word,
)

DATATYPE_BYTES: Final = {"int8": 1, "uint8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""DLIO's names of element types."""
_DATATYPE: Final = choice(*DATATYPE_BYTES)
_STEPS: Final = integer(-1)
_PYTHON_CLASS: Final = "DLIO's plugin classes are made for its own base classes; "
_NO_EFFECT: Final = "DLIO reads this key and does nothing with it"
_MOUNTED: Final = "mounted file systems are read"
_LEFT_TO_ENGINE: Final = "it is left to the engine"
_FRAMEWORKS: Final = ("torch", "tensorflow")
_DECODING: Final = ("headrace", *_FRAMEWORKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The model whose checkpoints are written."""

    name: str = key("default", text)
    type: str | None = key(None, optional(text))
    """`transformer` is sized by its dimensions, anything else by `model_size_bytes`."""
    model_size_bytes: int = key(10240, integer(0))
    model_datatype: str = key("fp16", _DATATYPE)
    optimizer_datatype: str = key("fp32", _DATATYPE)
    optimization_groups: tuple[int, ...] = key((), integers(0))
    num_layers: int = key(-1, integer(-1))
    layer_parameters: tuple[int, ...] = key((), integers(0))
    parallelism_tensor: int = key(1, integer(1))
    parallelism_pipeline: int = key(1, integer(1))
    parallelism_data: int = key(-1, integer(-1))
    """-1: as many as the ranks allow."""
    parallelism_zero_stage: int = key(0, integer(0, 3))
    transformer_vocab_size: int = key(32000, integer(1))
    transformer_hidden_size: int = key(2048, integer(1))
    transformer_ffn_hidden_size: int = key(8192, integer(1))
    transformer_num_attention_heads: int = key(32, integer(1))
    transformer_num_kv_heads: int = key(8, integer(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSection:
    """What a run does."""

    generate_data: bool = key(False, boolean)
    train: bool = key(True, boolean)
    evaluation: bool = key(False, boolean)
    checkpoint: bool = key(False, boolean)
    profiling: bool = key(False, boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSection:
    """Where the data set lies."""

    storage_type: str = key(
        "local_fs", choice("local_fs", "parallel_fs", "s3", "aistore", "direct_fs")
    )
    storage_root: str = key("./", text)
    storage_library: str | None = key(None, optional(text), unused=f"{_MOUNTED}, without a library")
    storage_options: dict[str, Any] = key(  # noqa: RUF009 - a field
        {}, mapping, unused=f"{_MOUNTED}, without options"
    )
    post_generation_settle_seconds: float = key(0.0, number(0))

    @property
    def is_objects(self) -> bool:
        """Whether it is an object store; else folders are read."""
        return self.storage_type in ("s3", "aistore")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSection:
    """How each accelerator reads."""

    engine: str = key("headrace", word)
    """What reads: headrace, torch, tensorflow, null, or custom:MODULE:CLASS. DLIO has no such key."""
    data_loader: str = key(
        "tensorflow",
        choice("pytorch", "tensorflow", "dali", "native_dali", "synthetic", "custom", "none"),
    )
    """DLIO's choice; it decides the engine only where it is `synthetic`."""
    multiprocessing_context: str | None = key(
        "fork", optional(choice("fork", "spawn", "forkserver")),
        unused="there are no worker processes", engines=("torch",),
    )  # fmt: skip
    batch_size: int = key(1, integer(1))
    batch_size_eval: int = key(1, integer(1))
    read_threads: int = key(1, integer(0), unused=_LEFT_TO_ENGINE, engines=_DECODING)
    write_threads: int | None = key(None, integer(1))
    """Threads that generate data; None: as many as the disk wants."""
    computation_threads: int = key(
        1, integer(1), unused="nothing is computed upon samples", engines=("tensorflow",)
    )
    prefetch_size: int = key(2, integer(0), unused=_LEFT_TO_ENGINE, engines=_DECODING)
    file_shuffle: str = key("off", shuffle)
    sample_shuffle: str = key("off", shuffle)
    shuffle_size: int = key(
        1024, integer(1), engines=("tensorflow",),
        unused="samples are shuffled over the whole data set, not in a window",
    )  # fmt: skip
    transfer_size: int | None = key(
        None, optional(integer(1)), engines=("tensorflow",),
        unused="each sample or file is read as a whole",
    )  # fmt: skip
    preprocess_time: TimeDistribution = key(  # noqa: RUF009 - a field
        NO_TIME, time_distribution, unused=_LEFT_TO_ENGINE, engines=_DECODING
    )
    pin_memory: bool = key(True, boolean, unused="memory is not pinned", engines=("torch",))
    odirect: bool = key(False, boolean)
    transformed_record_dims: tuple[int, ...] = key(
        (), integers(1), unused=NO_TENSOR, engines=_FRAMEWORKS
    )
    transformed_record_element_type: str = key("uint8", text, unused=NO_TENSOR, engines=_FRAMEWORKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """How long to train."""

    epochs: int = key(1, integer(1))
    computation_time: TimeDistribution = key(NO_TIME, time_distribution)  # noqa: RUF009 - a field
    total_training_steps: int = key(-1, _STEPS)
    """At most so many steps an epoch; -1: all."""
    seed: int = key(123, integer(0))
    seed_change_epoch: bool = key(True, boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSection:
    """When and how long to evaluate."""

    eval_time: TimeDistribution = key(NO_TIME, time_distribution)  # noqa: RUF009 - a field
    eval_after_epoch: int = key(1, integer(0))
    epochs_between_evals: int = key(1, integer(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """When and how checkpoints are written and read."""

    checkpoint_folder: str = key("./checkpoints/", text)
    checkpoint_after_epoch: int = key(1, integer(0))
    epochs_between_checkpoints: int = key(1, integer(1))
    steps_between_checkpoints: int = key(-1, _STEPS)
    type: str = key(
        "rank_zero", choice("rank_zero", "all_ranks"),
        unused="which ranks write follows from model.parallelism, as in DLIO",
    )  # fmt: skip
    mode: str = key("default", choice("default", "subset"))
    fsync: bool = key(False, boolean)
    writer: str | None = key(None, optional(choice("plain", "fsync", "direct", "headrace")))
    """What writes: plain, fsync, direct or headrace; None: as `fsync` says. DLIO has no such key."""
    local_folder: str | None = key(None, optional(text))
    """Writer headrace: a folder that is written first. DLIO has no such key."""
    time_between_checkpoints: float = key(-1.0, number(-1))
    num_checkpoints_write: int = key(-1, integer(-1))
    num_checkpoints_read: int = key(-1, integer(-1))
    recovery_rank_shift: bool = key(False, boolean)
    rank_sync: bool = key(False, boolean)
    randomize_tensor: bool = key(True, boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSection:
    """Where results go."""

    folder: str | None = key(None, optional(text))
    """None: hydra's run directory."""
    log_file: str = key("dlio.log", text)
    metric_exclude_start_steps: int = key(1, integer(0))
    metric_exclude_end_steps: int = key(0, integer(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingSection:
    """What else is noted down, with `workflow.profiling`. DLIO starts other programs for it."""

    profiler: str = key("iostat", choice("none", "iostat", "darshan", "tensorboard"))
    iostat_devices: tuple[str, ...] = key((), texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSection:
    """When a run passes."""

    au: float = key(0.90, number(0, 1))
    """Accelerator utilisation, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training job's I/O."""

    framework: str = key("tensorflow", choice("tensorflow", "pytorch"))
    model: ModelSection = field(default_factory=ModelSection)
    workflow: WorkflowSection = field(default_factory=WorkflowSection)
    storage: StorageSection = field(default_factory=StorageSection)
    dataset: DatasetSpec = field(default_factory=DatasetSpec)
    reader: ReaderSection = field(default_factory=ReaderSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    output: OutputSection = field(default_factory=OutputSection)
    profiling: ProfilingSection = field(default_factory=ProfilingSection)
    metric: MetricSection = field(default_factory=MetricSection)

    @property
    def evaluates(self) -> bool:
        """Whether a run that trains evaluates anything: DLIO evaluates no files, too, in no steps."""
        return self.workflow.evaluation and self.dataset.num_files_eval > 0


KEYS: Final[dict[str, SchemaKey]] = {
    **keys_of(Workload),
    "debug": SchemaKey(boolean, (False,), _NO_EFFECT),
    "workflow.debug": SchemaKey(boolean, (False,), _NO_EFFECT),
    "workflow.evaluate": SchemaKey(boolean, unused="DLIO does not read it; it reads workflow.evaluation"),
    "workflow.query": SchemaKey(reason="`dlio_benchmark_query` alone has it"),
    "dataset.record_element_bytes": SchemaKey(
        reason="DLIO overwrites it with the size of dataset.record_element_type; set that one"
    ),
    "dataset.enable_chunking": SchemaKey(boolean, (False,), f"{_NO_EFFECT}; set hdf5.chunk_dims"),
    "dataset.chunk_size": SchemaKey(integer(0), (0,), f"{_NO_EFFECT}; set hdf5.chunk_dims"),
    "dataset.parquet.read_mode": SchemaKey(
        choice("row_group"), ("row_group",), "row groups are what is read"
    ),
    "dataset.parquet.use_s3dlio_gen": SchemaKey(boolean, (False,), "s3dlio is not used"),
    "dataset.data_gen_method": SchemaKey(
        choice("dgen", "numpy"),
        unused="data is made by headrace's own generator; it cannot be compressed",
    ),
    "dataset.skip_listing": SchemaKey(boolean),
    "dataset.listing_validation_interval": SchemaKey(integer(1)),
    "dataset.num_files_generated": SchemaKey(reason="set num_files_train to the files that are there"),
    "reader.data_loader_classname": SchemaKey(
        reason=_PYTHON_CLASS + "give reader.engine=custom:MODULE:CLASS"
    ),
    "reader.data_loader_sampler": SchemaKey(choice("iterative", "index"), ("index",),
        "samples are always read by their index, truly shuffled"),
    "reader.reader_classname": SchemaKey(reason=_PYTHON_CLASS + "give reader.engine=custom:MODULE:CLASS"),
    "reader.read_type": SchemaKey(choice("on_demand", "memory"), ("on_demand",),
        "data that is read once and then served from memory says nothing about storage"),
    "reader.file_access": SchemaKey(choice("multi", "shared", "collective", "mpio", "posix"),
        ("multi", "posix"), _NO_EFFECT),
    "reader.preprocess_time_stdev": SchemaKey(number(0)),
    "reader.dont_use_mmap": SchemaKey(boolean, unused="DLIO hands it to DALI's readers alone"),
    "train.computation_time_stdev": SchemaKey(number(0)),
    "evaluation.eval_time_stdev": SchemaKey(number(0)),
    "checkpoint.checkpoint_mechanism_classname": SchemaKey(reason=_PYTHON_CLASS + "leave it out"),
    "checkpoint.ksm": SchemaKey(
        optional(mapping), unused="checkpoints are streamed from small buffers: there is no memory to merge"
    ),
}  # fmt: skip
"""By their full names."""

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
