"""Schema: DLIO's keys, upstream's and MLCommons': what may stand under each, and the workload as dataclasses.

A key is honoured (it has a converter), honoured for some values only (`only`, with the reason), or refused
with a reason. Nothing is ignored: a key that did nothing would make two runs look different that are not.

A converter takes what YAML gave and returns what we use; it raises `ValueError` whose message goes after
"expected": the caller knows file, line and key. Names of sections' fields are DLIO's, nested keys are joined
with `_`, and defaults are those of DLIO's code, where they differ from its documents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.dataset import DatasetSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Converter = Callable[[Any], Any]
"""From YAML's value to ours."""

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers like 1e-3, which YAML 1.1 takes for text and OmegaConf, DLIO's reader, does not."""


def boolean(value: Any) -> bool:
    """True or false, also as OmegaConf reads text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("true or false")


def integer(least: int | None = None, most: int | None = None) -> Converter:
    """Whole numbers within bounds; 4.0 is one."""

    def convert(value: Any) -> int:
        whole = _numeric(value)
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        if whole is None or whole != int(whole) or not low <= whole <= high:
            bounds = "" if least is None else f" of at least {least}"
            raise ValueError(
                f"a whole number{bounds}" + ("" if most is None else f", at most {most}")
            )
        return int(whole)

    return convert


def number(least: float | None = None, most: float | None = None) -> Converter:
    """Finite numbers within bounds."""

    def convert(value: Any) -> float:
        finite = _numeric(value)
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        if finite is None or not low <= finite <= high:
            bounds = "" if least is None else f" of at least {least:g}"
            raise ValueError(f"a number{bounds}" + ("" if most is None else f", at most {most:g}"))
        return float(finite)

    return convert


def _numeric(value: Any) -> float | int | None:
    if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def text(value: Any) -> str:
    """A word or a line. Numbers are text, too: a prefix may be 7."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        raise ValueError("text")
    return str(value)


def word(value: Any) -> str:
    """Text, where YAML takes the word null for nothing."""
    return "null" if value is None else text(value)


def choice(*names: str) -> Converter:
    """One of some words, in any case."""

    def convert(value: Any) -> str:
        if isinstance(value, str) and value.lower() in names:
            return value.lower()
        raise ValueError("one of " + ", ".join(names))

    return convert


def shuffle(value: Any) -> str:
    """off, seed or random. YAML reads a bare `off` as false, on which DLIO fails."""
    if value is False:
        return "off"
    converted: str = choice("off", "seed", "random")(value)
    return converted


def integers(least: int | None = None) -> Converter:
    """A list of whole numbers, as a tuple; one number is a list of one."""
    one = integer(least)

    def convert(value: Any) -> tuple[int, ...]:
        entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        try:
            return tuple(one(entry) for entry in entries)
        except ValueError as e:
            raise ValueError(f"a list, each {e}") from e

    return convert


def texts(value: Any) -> tuple[str, ...]:
    """A list of words, as a tuple; one word is a list of one."""
    entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return tuple(text(entry) for entry in entries)


def mapping(value: Any) -> dict[str, Any]:
    """Keys and values, whatever they are."""
    if isinstance(value, dict):
        return value
    raise ValueError("keys and values")


def optional(converter: Converter) -> Converter:
    """The same, or null for none."""

    def convert(value: Any) -> Any:
        return None if value is None or value == "None" else converter(value)

    return convert


_PARAMETERS: Final = {
    "normal": ("mean", "stdev"),
    "uniform": ("min", "max"),
    "gamma": ("shape", "scale"),
    "exponential": ("scale",),
    "poisson": ("lam",),
}


@dataclass(frozen=True, slots=True)
class TimeDistribution:
    """A time in seconds.

    Attributes:
        kind: constant, normal, uniform, gamma, exponential or poisson.
        parameters: of the kind, in DLIO's order and names: constant has its value alone.
    """

    kind: str = "constant"
    parameters: tuple[float, ...] = (0.0,)

    @property
    def mean_s(self) -> float:
        """The expected time before negative draws are turned positive."""
        first, *rest = self.parameters
        if self.kind == "uniform":
            return (first + rest[0]) / 2
        if self.kind == "gamma":
            return first * rest[0]
        return first

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Draw `count` times: float64, shape (count,), none below 0."""
        import numpy as np

        if self.kind == "constant":
            return np.full(count, self.parameters[0])
        drawn: NDArray[np.float64] = getattr(random, self.kind)(*self.parameters, size=count)
        return np.abs(drawn.astype(np.float64))

    def with_stdev(self, stdev_s: float) -> TimeDistribution:
        """The same with DLIO's separate `..._stdev` key: a constant becomes a normal distribution."""
        if self.kind != "constant" or stdev_s == 0:
            return self
        return TimeDistribution("normal", (self.parameters[0], stdev_s))


NO_TIME: Final = TimeDistribution()
"""Always 0."""


def time_distribution(value: Any) -> TimeDistribution:
    """A scalar, `{mean}`, `{mean, stdev}`, or `{type, ...}` with the parameters of the type.

    Raises:
        ValueError: anything else.
    """
    positive = number(0)
    if value is None or value == {}:
        return TimeDistribution()
    if not isinstance(value, dict):
        try:
            return TimeDistribution("constant", (positive(value),))
        except ValueError as e:
            raise ValueError(f"{e} (seconds), or a distribution like {{mean: 0.3}}") from e
    given = dict(value)
    if "type" not in given and set(given) == {"mean"}:
        return TimeDistribution("constant", (positive(given["mean"]),))
    kind = str(given.pop("type", "normal")).lower()
    names = _PARAMETERS.get(kind)
    if names is None:
        raise ValueError(f"a type of {', '.join(_PARAMETERS)}")
    if set(given) != set(names):
        raise ValueError(f"for the type {kind} exactly {', '.join(names)}")
    try:
        parameters = tuple(positive(given[name]) for name in names)
    except ValueError as e:
        raise ValueError(f"{', '.join(names)} each {e}") from e
    if kind == "uniform" and parameters[0] > parameters[1]:
        raise ValueError("min not above max")
    return TimeDistribution(kind, parameters)


@dataclass(frozen=True, slots=True)
class SchemaKey:
    """What may stand under a key.

    Attributes:
        convert: from YAML's value to ours; says what is expected.
        only: the values that are possible here, after conversion; None: all.
        reason: why others are not possible; alone: why the key is not possible at all.
    """

    convert: Converter | None = None
    only: tuple[Any, ...] | None = None
    reason: str = ""


DATATYPE_BYTES: Final = {"int8": 1, "uint8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""DLIO's names of element types."""
_DATATYPE: Final = choice(*DATATYPE_BYTES)
_STEPS: Final = integer(-1)
_PYTHON_CLASS: Final = "DLIO's plugin classes are made for its own base classes; "
_NO_EFFECT: Final = "DLIO reads this key and does nothing with it"
_PROFILER: Final = "outside profilers are not started: the report has device bytes and latencies"
_OBJECTS: Final = "object stores are not read by the benchmark"

_FORMAT: Final = choice(
    "tfrecord", "hdf5", "csv", "npz", "npy", "jpeg", "png", "indexed_binary", "mmap_indexed_binary",
    "parquet", "synthetic",
)  # fmt: skip


def _format(value: Any) -> str:
    if value == "hdf5_opt":
        raise ValueError("hdf5: DLIO has a name hdf5_opt, and neither writes nor reads it")
    name: str = _FORMAT(value)
    return name


def _dotted(name: str) -> str:
    """A field's name as a key: sections within sections are joined with `_` in fields."""
    return re.sub(r"^(parallelism|transformer|metric)_", r"\1.", name)


def _key(
    default: Any, convert: Converter, only: tuple[Any, ...] | None = None, reason: str = ""
) -> Any:
    """A field that is a key of DLIO's."""
    key = SchemaKey(convert, only, reason)
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"key": key})
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The model whose checkpoints are written."""

    name: str = _key("default", text)
    type: str | None = _key(None, optional(text))
    """`transformer` is sized by its dimensions, anything else by `model_size_bytes`."""
    model_size_bytes: int = _key(10240, integer(0))
    model_datatype: str = _key("fp16", _DATATYPE)
    optimizer_datatype: str = _key("fp32", _DATATYPE)
    optimization_groups: tuple[int, ...] = _key((), integers(0))
    num_layers: int = _key(-1, integer(-1))
    layer_parameters: tuple[int, ...] = _key((), integers(0))
    parallelism_tensor: int = _key(1, integer(1))
    parallelism_pipeline: int = _key(1, integer(1))
    parallelism_data: int = _key(-1, integer(-1))
    """-1: as many as the ranks allow."""
    parallelism_zero_stage: int = _key(0, integer(0, 3))
    transformer_vocab_size: int = _key(32000, integer(1))
    transformer_hidden_size: int = _key(2048, integer(1))
    transformer_ffn_hidden_size: int = _key(8192, integer(1))
    transformer_num_attention_heads: int = _key(32, integer(1))
    transformer_num_kv_heads: int = _key(8, integer(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSection:
    """What a run does."""

    generate_data: bool = _key(False, boolean)
    train: bool = _key(True, boolean)
    evaluation: bool = _key(False, boolean)
    checkpoint: bool = _key(False, boolean)
    profiling: bool = _key(False, boolean, (False,), _PROFILER)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSection:
    """Where the data set lies."""

    storage_type: str = _key(
        "local_fs", choice("local_fs", "parallel_fs", "s3", "aistore", "direct_fs")
    )
    storage_root: str = _key("./", text)
    storage_library: str | None = _key(None, optional(text))
    storage_options: dict[str, Any] = _key({}, mapping)  # noqa: RUF009 - a field
    post_generation_settle_seconds: float = _key(0.0, number(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSection:
    """How each accelerator reads."""

    engine: str = _key("headrace", word)
    """What reads: headrace, torch, tensorflow, null, or custom:MODULE:CLASS. DLIO has no such key."""
    data_loader: str = _key(
        "tensorflow",
        choice("pytorch", "tensorflow", "dali", "native_dali", "synthetic", "custom", "none"),
    )
    """DLIO's choice; it decides the engine only where it is `synthetic`."""
    multiprocessing_context: str | None = _key(
        "fork", optional(choice("fork", "spawn", "forkserver"))
    )
    batch_size: int = _key(1, integer(1))
    batch_size_eval: int = _key(1, integer(1))
    read_threads: int = _key(1, integer(0))
    write_threads: int | None = _key(None, integer(1))
    """Threads that generate data; None: as many as the disk wants."""
    computation_threads: int = _key(1, integer(1))
    prefetch_size: int = _key(2, integer(0))
    file_shuffle: str = _key("off", shuffle)
    sample_shuffle: str = _key("off", shuffle)
    shuffle_size: int = _key(1024, integer(1))
    transfer_size: int | None = _key(None, optional(integer(1)))
    preprocess_time: TimeDistribution = _key(NO_TIME, time_distribution)  # noqa: RUF009 - a field
    pin_memory: bool = _key(True, boolean)
    odirect: bool = _key(False, boolean)
    transformed_record_dims: tuple[int, ...] = _key((), integers(1))
    transformed_record_element_type: str = _key("uint8", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """How long to train."""

    epochs: int = _key(1, integer(1))
    computation_time: TimeDistribution = _key(NO_TIME, time_distribution)  # noqa: RUF009 - a field
    total_training_steps: int = _key(-1, _STEPS)
    """At most so many steps an epoch; -1: all."""
    seed: int = _key(123, integer(0))
    seed_change_epoch: bool = _key(True, boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSection:
    """When and how long to evaluate."""

    eval_time: TimeDistribution = _key(NO_TIME, time_distribution)  # noqa: RUF009 - a field
    eval_after_epoch: int = _key(1, integer(0))
    epochs_between_evals: int = _key(1, integer(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """When and how checkpoints are written and read."""

    checkpoint_folder: str = _key("./checkpoints/", text)
    checkpoint_after_epoch: int = _key(1, integer(0))
    epochs_between_checkpoints: int = _key(1, integer(1))
    steps_between_checkpoints: int = _key(-1, _STEPS)
    type: str = _key("rank_zero", choice("rank_zero", "all_ranks"))
    mode: str = _key("default", choice("default", "subset"))
    fsync: bool = _key(False, boolean)
    writer: str | None = _key(None, optional(choice("plain", "fsync", "direct", "headrace")))
    """What writes: plain, fsync, direct or headrace; None: as `fsync` says. DLIO has no such key."""
    local_folder: str | None = _key(None, optional(text))
    """Writer headrace: a folder that is written first. DLIO has no such key."""
    time_between_checkpoints: float = _key(-1.0, number(-1))
    num_checkpoints_write: int = _key(-1, integer(-1))
    num_checkpoints_read: int = _key(-1, integer(-1))
    recovery_rank_shift: bool = _key(False, boolean)
    rank_sync: bool = _key(False, boolean)
    randomize_tensor: bool = _key(True, boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSection:
    """Where results go."""

    folder: str | None = _key(None, optional(text))
    """None: hydra's run directory."""
    log_file: str = _key("dlio.log", text)
    metric_exclude_start_steps: int = _key(1, integer(0))
    metric_exclude_end_steps: int = _key(0, integer(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingSection:
    """DLIO's outside profilers, which the report's own figures replace."""

    profiler: str = _key("iostat", choice("none", "iostat", "darshan", "tensorboard"))
    iostat_devices: tuple[str, ...] = _key((), texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSection:
    """When a run passes."""

    au: float = _key(0.90, number(0, 1))
    """Accelerator utilisation, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training job's I/O."""

    framework: str = "tensorflow"
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


_SECTION_KEYS: Final = {
    f"{section.name}.{_dotted(entry.name)}": entry.metadata["key"]
    for section in fields(Workload)
    if section.default_factory is not MISSING and section.name != "dataset"
    for entry in fields(section.default_factory)  # type: ignore[arg-type]  # a section's class
}

KEYS: Final[dict[str, SchemaKey]] = {
    "framework": SchemaKey(choice("tensorflow", "pytorch")),
    **_SECTION_KEYS,
    "debug": SchemaKey(boolean, (False,), _NO_EFFECT),
    "workflow.debug": SchemaKey(boolean, (False,), _NO_EFFECT),
    "workflow.query": SchemaKey(reason="`dlio_benchmark_query` alone has it"),
    "dataset.data_folder": SchemaKey(text),
    "dataset.format": SchemaKey(_format),
    "dataset.num_files_train": SchemaKey(integer(0)),
    "dataset.num_files_eval": SchemaKey(integer(0)),
    "dataset.num_samples_per_file": SchemaKey(integer(1)),
    "dataset.record_length_bytes": SchemaKey(number(1)),
    "dataset.record_length_bytes_stdev": SchemaKey(number(0)),
    "dataset.record_length_bytes_resize": SchemaKey(number(0)),
    "dataset.record_dims": SchemaKey(integers(1)),
    "dataset.record_element_type": SchemaKey(text),
    "dataset.record_element_bytes": SchemaKey(
        reason="DLIO overwrites it with the size of dataset.record_element_type; set that one"
    ),
    "dataset.num_subfolders_train": SchemaKey(integer(0)),
    "dataset.num_subfolders_eval": SchemaKey(integer(0)),
    "dataset.file_prefix": SchemaKey(text),
    "dataset.compression": SchemaKey(choice(
        "none", "gzip", "zip", "bz2", "xz", "lzf", "snappy", "lz4", "zstd"
    )),
    "dataset.compression_level": SchemaKey(integer(0)),
    "dataset.enable_chunking": SchemaKey(boolean, (False,), f"{_NO_EFFECT}; set hdf5.chunk_dims"),
    "dataset.chunk_size": SchemaKey(integer(0), (0,), f"{_NO_EFFECT}; set hdf5.chunk_dims"),
    "dataset.keep_files": SchemaKey(boolean),
    "dataset.generation_buffer_size": SchemaKey(integer(1)),
    "dataset.hdf5.chunk_dims": SchemaKey(integers(1)),
    "dataset.hdf5.num_dset_per_record": SchemaKey(integer(1)),
    "dataset.hdf5.max_shape": SchemaKey(integers(1)),
    "dataset.parquet.columns": SchemaKey(list),
    "dataset.parquet.row_group_size": SchemaKey(integer(1)),
    "dataset.parquet.partition_by": SchemaKey(optional(text), (None,), "files would be named anew"),
    "dataset.parquet.generation_batch_size": SchemaKey(integer(0)),
    "dataset.parquet.read_mode": SchemaKey(
        choice("row_group"), ("row_group",), "row groups are what is read"
    ),
    "dataset.parquet.use_s3dlio_gen": SchemaKey(boolean, (False,), "s3dlio is not used"),
    "dataset.data_gen_method": SchemaKey(choice("dgen", "numpy")),
    "dataset.skip_listing": SchemaKey(boolean),
    "dataset.listing_validation_interval": SchemaKey(integer(1)),
    "dataset.requests": SchemaKey(optional(text)),
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
    "reader.dont_use_mmap": SchemaKey(boolean, (False,), _NO_EFFECT),
    "train.computation_time_stdev": SchemaKey(number(0)),
    "evaluation.eval_time_stdev": SchemaKey(number(0)),
    "checkpoint.checkpoint_mechanism_classname": SchemaKey(reason=_PYTHON_CLASS + "leave it out"),
    "checkpoint.ksm": SchemaKey(
        reason="checkpoints are streamed from small buffers: there is no memory to merge"
    ),
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
