"""Options: typed, validated, and each value knows where it came from.

One order of precedence: argument, then the environment (`HEADRACE_QUEUE_DEPTH=32`), then the default.
Nothing is read at import and there are no global setters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ReaderOptions",
    "TierOptions",
    "reader_options",
    "tier_options",
    "trace_folder",
]

ENVIRONMENT_PREFIX = "HEADRACE_"

BUDGET_BYTES_MIN = 1 << 20

EngineName = Literal["auto", "uring", "threads", "mmap"]
DirectReads = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """How batches are read. None of it changes what is delivered; most users leave it alone.

    Raises:
        ValueError: a value is out of bounds.
    """

    engine: EngineName = "auto"
    """`auto` gathers resident bytes from the page cache and reads the rest by io_uring, or by a pool
    of threads where io_uring is forbidden. The others force one engine."""

    direct: DirectReads = "auto"
    """Whether bytes that are not resident are read with O_DIRECT, past the page cache."""

    reads_in_flight: int | None = None
    """Reads in flight in all, live: `BatchReader.turn` changes it. Workers are started as it takes to
    reach it with the batches at hand, 64 at most. Not given, a loader begins with `queue_depth`
    (`threads`, with the threads engine) times `workers`; a `BatchReader` of its own has that many per
    worker until it is turned."""

    queue_depth: int = 64
    """Reads in flight per worker while `reads_in_flight` is not given. 32 saturates an NVMe device at
    110 kB, 64 at 4 kB."""

    threads: int = 16
    """Threads per worker of the `threads` engine, likewise; each holds one file of a folder open."""

    workers: int = 2
    """Threads that plan, gather and check batches, each with its own ring: the fewest there are."""

    budget_bytes: int = 64 << 20
    """Memory for batches that are being read or wait to be taken. A single batch may exceed it."""

    verify: bool = True
    """Check every sample against its crc32c. Costs 0.06 CPU seconds per GB."""

    deadline_s: float = 300.0
    """A batch that takes longer raises VolumeTimeout, which names what it waits for."""

    simulate: Any = None
    """Slow storage to simulate: a preset's name (`lustre`, `nfs`, `s3`, `hdd`), a `Simulation` or a
    `SlowVolume`. Figures that are measured with it are labelled."""

    def __post_init__(self) -> None:
        bounds = {
            "reads_in_flight": (1, 65536),
            "queue_depth": (1, 4096),
            "threads": (1, 1024),
            "workers": (1, 256),
            "budget_bytes": (BUDGET_BYTES_MIN, 1 << 48),
            "deadline_s": (0.001, 1e9),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}, expected {low} to {high}")
        choices = {"engine": get_args(EngineName), "direct": get_args(DirectReads)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Where samples are kept nearer than their source, and how hard the source may be asked.

    None of it changes what is delivered. All of it is off unless asked for.

    Raises:
        ValueError: a value is out of bounds.
    """

    cache_dir: str | None = None
    """Folder on a local disk where samples are packed as they are read; shared by all processes."""

    cache_bytes: int | None = None
    """Quota over all of `cache_dir`. None: what leaves 2 GiB of the disk free, or a twentieth."""

    ram_bytes: int | Literal["auto"] | None = None
    """Memory of this process for samples. `auto`: half of what is available, given back when it runs
    short. None: `auto` for remote sources without `cache_dir`, else none."""

    bytes_per_s: float | None = None
    """Limit on bytes read from the source, to share its file system. None: no limit."""

    reads_per_s: float | None = None
    """Limit on reads from the source. None: no limit."""

    plane: Literal["process", "node"] = "process"
    """Who reads: this process, or the node daemon, which shares one cache among all processes. Where
    no daemon runs, this process does."""

    def __post_init__(self) -> None:
        if isinstance(self.ram_bytes, str) and self.ram_bytes != "auto":
            raise ValueError(f"ram_bytes is {self.ram_bytes!r}, expected bytes or 'auto'")
        if self.plane not in ("process", "node"):
            raise ValueError(f"plane is {self.plane!r}, expected 'process' or 'node'")
        for name in ("cache_bytes", "ram_bytes", "bytes_per_s", "reads_per_s"):
            value = getattr(self, name)
            if isinstance(value, str) or value is None:
                continue
            if isinstance(value, bool) or not 0 <= value <= 1 << 60:
                raise ValueError(f"{name} is {value!r}, expected 0 to 2^60")
            if value == 0 and name.endswith("_per_s"):
                raise ValueError(f"{name} is 0, expected more, or None for no limit")
        if self.cache_bytes is not None and self.cache_dir is None:
            raise ValueError(f"cache_bytes is {self.cache_bytes}, but no cache_dir is given")


def tier_options(
    given: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> tuple[TierOptions, dict[str, Any], dict[str, str]]:
    """Resolve the options of tiers and limits.

    Args:
        given: arguments by name, those of others among them; None means not given.
        environment: defaults to `os.environ`.

    Returns:
        The options, the arguments that are none of theirs, and each field's origin: `argument`,
        `environment` or `default`.

    Raises:
        ValueError: a value is out of bounds or cannot be parsed.
    """
    values, origins = _resolved(_TIER_KINDS, given, environment)
    if origins["cache_dir"] == "argument":
        values["cache_dir"] = os.fsdecode(values["cache_dir"])
    rest = {name: value for name, value in given.items() if name not in _TIER_KINDS}
    return TierOptions(**values), rest, origins


_TIER_KINDS = {
    "cache_dir": "str",
    "cache_bytes": "int",
    "ram_bytes": "int or auto",
    "bytes_per_s": "float",
    "reads_per_s": "float",
    "plane": "str",
}


def reader_options(
    given: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> tuple[ReaderOptions, dict[str, str]]:
    """Resolve the reader's options.

    Args:
        given: arguments by field name; None means not given.
        environment: defaults to `os.environ`.

    Returns:
        The options and, for each field, its origin: `argument`, `environment` or `default`.

    Raises:
        ValueError: an unknown name, or a value that is out of bounds or cannot be parsed.
    """
    kinds = {field.name: str(field.type) for field in fields(ReaderOptions)}
    unknown = set(given) - set(kinds)
    if unknown:
        raise ValueError(f"unknown options {sorted(unknown)}, expected some of {sorted(kinds)}")
    values, origins = _resolved(kinds, given, environment)
    return ReaderOptions(**values), origins


def _resolved(
    kinds: Mapping[str, str], given: Mapping[str, Any], environment: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of options that are not left to the default, and every option's origin."""
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    origins = dict.fromkeys(kinds, "default")
    for name, kind in kinds.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if given.get(name) is not None:
            values[name], origins[name] = given[name], "argument"
        elif variable in environment:
            values[name] = _parse(variable, environment[variable], kind)
            origins[name] = "environment"
    return values, origins


def _parse(variable: str, text: str, kind: str) -> Any:
    if kind == "int or auto":
        if text == "auto":
            return text
        kind = "int"
    try:
        if kind == "bool":
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return {"int": int, "int | None": int, "float": float}.get(kind, str)(text)
    except (KeyError, ValueError) as e:
        raise ValueError(f"{variable} is {text!r}, expected {kind}") from e


def trace_folder(given: str | os.PathLike[str] | None = None) -> str | None:
    """Where a run is to be traced: as given, else HEADRACE_TRACE; None: nowhere."""
    folder = os.environ.get("HEADRACE_TRACE", "") if given is None else os.fspath(given)
    return os.path.abspath(folder) if folder else None  # noqa: PTH100
