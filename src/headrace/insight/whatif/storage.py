"""Storage: what opening a file and reading its bytes cost, as figures that the simulation draws from.

Five sources: a preset's name, a storage that `headrace bench storage --json` or `headrace doctor --json`
measured, the storage of the record itself, or figures. Whether nodes share it is part of it: a local disk is
one for each node, a file server is one for all.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from headrace.errors import RecordError
from headrace.io.simulation import PRESETS, Simulation
from headrace.machine.host import is_network

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from headrace.trace.recorded import Recorded

_DOCUMENT_BYTES_MAX: Final = 4 << 20
P99_SIGMAS: Final = 2.326
"""Standard deviations above the median of a normal distribution."""

_TAIL_MAX: Final = 100.0
_OPEN_MIN_S: Final = 5e-6
_PARALLELISM_MAX: Final = 4096
Shared = Literal["all", "servers", "none"]
"""What nodes share: link and servers, the servers alone, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A storage.

    Attributes:
        figures: latencies, link, servers.
        shared: by nodes.
        open_s: float32: recorded times to draw opens from, instead of the figures.
        read_s: float32: recorded times of reads, with
        read_bytes: int64: how long they were.
        request_bytes: the largest request; sequential reads come in such, thanks to read-ahead.
    """

    name: str
    figures: Simulation
    shared: Shared = "none"
    open_s: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    read_s: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    read_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    request_bytes: int = 1 << 20

    @property
    def is_recorded(self) -> bool:
        """Whether it is drawn from recorded times."""
        return len(self.read_s) > 0


STORAGES: Mapping[str, Storage] = {
    # The page cache: a copy at memory's speed; the open is a look-up.
    "memory": Storage(name="memory", figures=Simulation(
        name="memory", open_s=10e-6, latency_s=5e-6, stream_bytes_per_s=8e9,
    )),
    # A data-centre NVMe drive: 4 KiB at random take 90 us, a tail of half a millisecond; 3 GB/s. Its
    # inodes are cached or come with one such read.
    "ssd": Storage(name="ssd", figures=Simulation(
        name="ssd", latency_s=90e-6, latency_p99_s=500e-6, open_s=30e-6, open_p99_s=300e-6,
        bandwidth_bytes_per_s=3e9, parallelism=64,
    )),
    "hdd": Storage(name="hdd", figures=PRESETS["hdd"]),
    # One server for all nodes.
    "nfs": Storage(name="nfs", figures=PRESETS["nfs"], shared="all"),
    # Each client has its network port; metadata and object servers are everyone's.
    "lustre": Storage(name="lustre", figures=PRESETS["lustre"], shared="servers"),
    "s3": Storage(name="s3", figures=PRESETS["s3"], shared="servers"),
}  # fmt: skip
"""By name."""


def storage_of(given: str) -> Storage:
    """A storage by its name in `STORAGES`, or by a JSON file.

    The file is one that `headrace bench storage DIR --json` or `headrace doctor DATA --json` printed.

    Raises:
        ValueError: no such name.
        RecordError: the file cannot be read, or is no such document.
    """
    if given in STORAGES:
        return STORAGES[given]
    path = Path(given)
    if path.suffix != ".json" and not path.is_file():
        raise ValueError(
            f"storage is {given!r}, expected one of {', '.join(sorted(STORAGES))}, or a JSON file "
            "that `headrace bench storage DIR --json` or `headrace doctor DATA --json` printed"
        )
    try:
        with path.open("rb") as f:
            document = json.loads(f.read(_DOCUMENT_BYTES_MAX))
        if isinstance(document, dict) and "findings" in document:
            return _examined(path.stem, document["findings"])
        if isinstance(document, dict) and "latency_s" in document:
            return _measured(path.stem, document)
        wrong = "neither of the two commands below printed it"
    except OSError as e:
        raise RecordError(f"{path} cannot be read: {e.strerror}.", path=str(path)) from e
    except json.JSONDecodeError as e:
        wrong = f"it is no JSON ({e.msg} in line {e.lineno})"
    except KeyError as e:
        wrong = f"{e} is missing"
    except (ValueError, TypeError, ZeroDivisionError) as e:
        wrong = str(e)
    raise RecordError(
        f"{path} is no measured storage: {wrong}.", path=str(path),
        next_step="Measure one: headrace bench storage DIR --json > FILE.json, or without writing "
        "there: headrace doctor DATA --json > FILE.json",
    )  # fmt: skip


def _measured(name: str, document: Mapping[str, Any]) -> Storage:
    """From rates by depth and block, single reads' latencies, and files of 100 KiB at depth 16."""
    latency = document["latency_s"]
    cells = [(c["block_bytes"], c["depth"], c["bytes_per_s"]) for c in document["random"]]
    link = max([c[2] for c in cells] + list(document["sequential"]["read_bytes_per_s"].values()))
    # Little's law: what is served at a time is the rate times how long each takes.
    block, _, rate = max((c for c in cells if c[0] <= 4 << 10), key=lambda c: c[2])
    median_s = float(latency["p50"])
    servers = max(1, round(rate / block * median_s))
    batches = document["batches"]
    depth, sample = batches["reads_in_flight"], batches["sample_bytes"]
    per_file = min(depth, servers) / batches["files"]["per_s"]
    per_sample = min(depth, servers) / batches["packed"]["per_s"]
    # Of one request, from the largest blocks one at a time; 0: the link is the limit.
    largest, _, single = max((c for c in cells if c[1] == 1), key=lambda c: c[0])
    stream_s = largest / single - median_s
    stream = largest / stream_s if stream_s > 0 else 0.0
    mount = document.get("provenance", {}).get("mount", {})
    network = is_network(str(mount.get("type", "")), str(mount.get("source", "")))
    figures = Simulation(
        name=name, latency_s=median_s, latency_p99_s=float(latency["p99"]),
        open_s=max(_OPEN_MIN_S, per_file - per_sample), bandwidth_bytes_per_s=link,
        stream_bytes_per_s=stream, parallelism=min(servers, _PARALLELISM_MAX),
    )  # fmt: skip
    if not all(map(math.isfinite, (link, stream, per_file, sample))):
        raise ValueError("a rate is not finite")
    return Storage(name=name, figures=figures, shared="all" if network else "none")


def _examined(name: str, document: Mapping[str, Any]) -> Storage:
    """From the doctor's findings: whole samples at random with 1, 4, 16 and 64 asked for at a time.

    One at a time says how long it takes; opening, and the pieces of 4 KiB beside whole samples of open files,
    say which part of that is the open's, the answer's and the bytes'; the largest rate says how many are
    served at a time.
    """
    storage = document["storage"]
    if not isinstance(storage, dict) or not storage["points"]:
        raise ValueError("the doctor measured no storage: give it more --seconds")
    if storage["cold"] is not True:
        raise ValueError("the doctor read from memory only: what the storage takes is not known")
    points = sorted(storage["points"], key=lambda point: _real(point["depth"]))
    first = points[0]
    mean_bytes = _real(first["bytes_per_s"]) / _real(first["per_s"])
    whole_s = _real(first["depth"]) / _real(first["per_s"])
    opens, opened, small = document["opens"], storage["opened"], storage["small"]
    open_s = min(1.0 / _real(opens["one_per_s"]), 0.95 * whole_s) if opens else 0.0
    bytes_share = 0.0
    if opened and small:
        bytes_share = min(0.95, max(0.0, 1.0 - _real(opened["per_s"]) / _real(small["per_s"])))
    bytes_s = (whole_s - open_s) * bytes_share
    # The mean is what was measured; draws are around the median, which a long tail leaves below it.
    tail = min(_TAIL_MAX, max(1.0, _real(first["p99_s"]) / _real(first["p50_s"])))
    sigma = math.log(tail) / P99_SIGMAS
    latency_s = (whole_s - open_s - bytes_s) / math.exp(sigma * sigma / 2)
    most = max(_real(point["per_s"]) for point in points)
    link = max(_real(point["bytes_per_s"]) for point in [*points, *([opened] if opened else [])])
    figures = Simulation(
        name=name, latency_s=latency_s, latency_p99_s=latency_s * tail,
        open_s=max(_OPEN_MIN_S, open_s), bandwidth_bytes_per_s=link,
        stream_bytes_per_s=mean_bytes / bytes_s if bytes_s > 0 else 0.0,
        parallelism=min(_PARALLELISM_MAX, max(1, round(most * whole_s))),
    )  # fmt: skip
    shared: Shared = "all" if document["place"]["network"] is True else "none"
    if document["data"]["kind"] == "object":
        shared = "servers"
    return Storage(name=name, figures=figures, shared=shared)


def _real(value: Any) -> float:
    """A positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value!r} is not above 0")
    return float(value)


def recorded_storage(recorded: Recorded) -> Storage:
    """The storage of a record: each open and read takes as long as one that was recorded.

    Raises:
        ValueError: the record has no times.
    """
    if not len(recorded.read_s):
        raise ValueError("the record has no times of reads: name a storage")
    opens = recorded.open_s[recorded.open_s > 0]
    return Storage(
        name="as recorded", figures=Simulation(name="recorded"), open_s=opens,
        read_s=recorded.read_s, read_bytes=recorded.sample_bytes[recorded.order],
    )  # fmt: skip


def slower(storage: Storage, factor: float) -> Storage:
    """The same, busier: everything but its link takes `factor` times as long.

    Raises:
        ValueError: the factor makes no sense.
    """
    if not 1e-6 <= factor <= 1e6:
        raise ValueError(f"latency is {factor} times as long, expected more than 0")
    names, times = ("open_s", "open_p99_s", "latency_s", "latency_p99_s"), np.float32(factor)
    changed = {name: getattr(storage.figures, name) * factor for name in names}
    return replace(
        storage, figures=replace(storage.figures, **changed),
        open_s=storage.open_s * times, read_s=storage.read_s * times,
    )  # fmt: skip
