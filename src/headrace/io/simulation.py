"""Simulation: slow storage, as figures. What a simulated volume costs is computed, and then waited for.

The bytes are real and the delays are not: whatever is measured this way is labelled `simulated NAME`.
The presets are what a client of an ordinary installation sees, not the best that can be bought. Their
figures are round on purpose: a preset stands for a kind of storage, not for one machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace import _native

if TYPE_CHECKING:
    from collections.abc import Mapping

_P99_SIGMAS = 2.326
"""How many standard deviations the 99th percentile of a normal distribution lies above its median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A slow storage.

    Raises:
        ValueError: figures that make no sense.
    """

    name: str = "slow"
    """For labels."""

    latency_s: float = 0.0
    """Median time from a read's request to its first byte, on an idle storage."""

    latency_p99_s: float = 0.0
    """99th percentile of the same: latencies are lognormal. 0, or below the median: no spread."""

    open_s: float = 0.0
    """Median time of an open or stat: a look-up at the metadata server."""

    open_p99_s: float = 0.0
    """99th percentile of the same."""

    bandwidth_bytes_per_s: float = 0.0
    """Of the link, which all processes share. 0: unbounded."""

    stream_bytes_per_s: float = 0.0
    """Of one request. 0: unbounded."""

    parallelism: int = 0
    """Requests that are served at a time; the others queue. 0: unbounded."""

    error_rate: float = 0.0
    """Share of reads that fail with EIO."""

    seed: int = 0
    """Another seed, another sequence of latencies and errors."""

    steps: tuple[tuple[float, float], ...] = ()
    """(seconds since the model was made, factor of all latencies from then on), in order."""

    def model(self) -> _native.SlowModel:
        """Make the storage. Its queues are shared with processes that are forked from now on."""
        return _native.SlowModel(
            name=self.name,
            latency_median_s=self.latency_s,
            latency_sigma=_sigma(self.latency_s, self.latency_p99_s),
            open_median_s=self.open_s,
            open_sigma=_sigma(self.open_s, self.open_p99_s),
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            stream_bytes_per_s=self.stream_bytes_per_s,
            parallelism=self.parallelism,
            error_rate=self.error_rate,
            seed=self.seed,
            steps=list(self.steps),
        )

    def __post_init__(self) -> None:
        self.model()  # which knows what makes sense


def _sigma(median_s: float, p99_s: float) -> float:
    return math.log(p99_s / median_s) / _P99_SIGMAS if p99_s > median_s > 0 else 0.0


PRESETS: Mapping[str, Simulation] = {
    # A parallel file system that others use too. An open asks the metadata server and takes locks: 1 ms
    # is usual under load. A read of a small file is one round trip to an object storage server and a
    # disk array behind a cache. A client node moves 1 to 3 GB/s over one network port.
    "lustre": Simulation(
        name="lustre",
        latency_s=0.0012,
        latency_p99_s=0.012,
        open_s=0.0010,
        open_p99_s=0.015,
        bandwidth_bytes_per_s=2e9,
        parallelism=128,
    ),
    # One server, 10 Gbit/s. Close-to-open consistency asks the server at every open. Linux keeps 64 or
    # more requests per mount in flight (sunrpc's slot table).
    "nfs": Simulation(
        name="nfs",
        latency_s=0.0006,
        latency_p99_s=0.006,
        open_s=0.0008,
        open_p99_s=0.008,
        bandwidth_bytes_per_s=1.1e9,
        parallelism=64,
    ),
    # An object store over a 25 Gbit/s network. Providers' guides name 100 to 200 ms for the first byte
    # of small objects as ordinary, and 85 to 90 MB/s for one connection; medians in the same region are
    # nearer 30 ms. It serves as many requests as one cares to send. There is no open: the first byte of
    # a `stat` (HEAD) costs the same round trip.
    "s3": Simulation(
        name="s3",
        latency_s=0.030,
        latency_p99_s=0.200,
        open_s=0.020,
        open_p99_s=0.150,
        bandwidth_bytes_per_s=3e9,
        stream_bytes_per_s=85e6,
    ),
    # One disk at 7,200 rpm: an average seek of 8.5 ms and half a turn, 4.2 ms; 200 MB/s on its outer
    # tracks. One head: nothing is gained by asking for more at a time but a shorter way. An open of a
    # cold file seeks to its inode.
    "hdd": Simulation(
        name="hdd",
        latency_s=0.0127,
        latency_p99_s=0.025,
        open_s=0.0127,
        open_p99_s=0.025,
        stream_bytes_per_s=200e6,
        parallelism=1,
    ),
}
"""Kinds of storage by name."""


def simulation_of(given: str | Simulation) -> Simulation:
    """Return a simulation by its preset's name, or the one that was given.

    A name may end in `@SEED`: `lustre@7`.

    Raises:
        ValueError: no preset has this name.
    """
    if isinstance(given, Simulation):
        return given
    name, _, seed = given.partition("@")
    if name not in PRESETS or (seed and not seed.isdecimal()):
        raise ValueError(
            f"simulate is {given!r}, expected one of {sorted(PRESETS)} or a Simulation"
        )
    return replace(PRESETS[name], seed=int(seed or 0))


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedPaths:
    """Folders, and what they are like."""

    model: _native.SlowModel
    """The storage."""

    roots: tuple[str, ...]
    """Resolved paths of folders or files that are on it."""


_simulated: tuple[SimulatedPaths, ...] = ()


def simulated_paths() -> SimulatedPaths | None:
    """Return what is simulated now; None: all is as fast as it is."""
    return _simulated[-1] if _simulated else None


def simulate_paths(paths: SimulatedPaths) -> None:
    """Simulate from now on."""
    global _simulated  # noqa: PLW0603 - a process has one
    _simulated = (*_simulated, paths)


def stop_simulating(paths: SimulatedPaths) -> None:
    """Simulate these no more, whatever else has come since."""
    global _simulated  # noqa: PLW0603 - a process has one
    _simulated = tuple(others for others in _simulated if others is not paths)
