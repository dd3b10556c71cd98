"""Stage: one step of a data plane, as whoever watches or tunes it sees it.

A stage publishes numbers and accepts knobs; it never decides its own depth. Numbers are cumulative,
so that two readers at different pace can take differences without disturbing each other; gauges say
so. Publishing must be cheap (it is asked several times a second, for ever) and may be called from
any thread; so may `turn`, which takes effect soon rather than at once and never throws data away.

Nothing here knows who turns the knobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace import _native
    from headrace.io.objects.faults import RemoteStats


KNOBS: Final = ("reads_in_flight", "buffer_bytes", "decode_threads")
"""Knobs that stages may have: reads in flight over the whole stage; bytes that it may hold, being
read or ready; threads that decode."""

TIERS: Final = ("ram", "page_cache", "disk", "peer", "source")
"""Where bytes can have come from, nearest first. `disk` is the local-disk tier; `source` the storage
that the data set lies on."""

TIER_WORDS: Final = {
    "ram": "memory",
    "page_cache": "page cache",
    "disk": "local disk",
    "peer": "other nodes",
    "source": "storage",
}

LATENCY_BUCKETS: Final = 64
"""Bucket i counts reads that took [2^(i/2), 2^((i+1)/2)) microseconds: 1 us to 71 minutes, each to
within a factor of 1.41."""

_NO_LATENCIES: Final = (0,) * LATENCY_BUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """What one stage has done since it started, and what it holds now."""

    name: str  # `prefetch`, `ram`, `disk`, `throttle`, `decode`, `ahead`
    busy_s: float = 0.0  # seconds spent working, added up over its threads
    wait_input_s: float = 0.0  # seconds with nothing to do: the stage before is slower
    wait_output_s: float = 0.0
    """Seconds waiting for room, or for the stage after: that one is slower."""
    samples: int = 0  # samples passed on
    bytes: int = 0  # bytes passed on
    reads: int = 0  # finished reads
    in_flight: int = 0  # gauge: reads in flight now
    in_flight_s: float = 0.0
    """Integral of `in_flight` over time, for exact means; 0.0 where it is not kept."""
    buffered_bytes: int = 0  # gauge: bytes held, being read or ready and not taken
    ready_bytes: int = 0  # gauge: bytes ready and not taken
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    """Bytes passed on, by where they came from (`TIERS`)."""
    latency_us: tuple[int, ...] = _NO_LATENCIES
    """Histogram of the reads' latency: counts of `LATENCY_BUCKETS` buckets."""
    remote: RemoteStats | None = None
    """What the engine behind this stage did; None where all that it reads is local."""
    simulation: str = ""
    """`simulated lustre` where the storage is not real; its figures must carry this label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStats:
    """What the consumer of a plane has done since it started."""

    waited_s: float = 0.0  # seconds that it waited for data
    worked_s: float = 0.0  # seconds between a delivery and its next request: its own work
    batches: int = 0  # deliveries
    samples: int = 0  # samples delivered to it
    bytes: int = 0  # bytes delivered to it
    waiting_since_s: float = 0.0
    """Gauge: seconds that the wait under way has lasted, not yet in `waited_s`; 0: it works."""


@runtime_checkable
class Stage(Protocol):
    """One step of a plane."""

    @property
    def name(self) -> str:
        """Its name in statistics and logs; one of each in a plane."""

    def stats(self) -> StageStats:
        """Its numbers so far."""

    def knobs(self) -> Mapping[str, int]:
        """What can be turned (`KNOBS`), and where it stands."""

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set some knobs; others stay. What a stage does not have is ignored.

        Raises:
            ValueError: a value is not positive.
        """


def latency_bucket(seconds: float) -> int:
    """The bucket of `StageStats.latency_us` that a latency falls into."""
    microseconds = seconds * 1e6
    if microseconds < 1.0:
        return 0
    return min(LATENCY_BUCKETS - 1, int(2.0 * math.log2(microseconds)))


def latency_percentile_s(counts: Sequence[int], share: float) -> float:
    """Estimate a percentile from a histogram.

    Args:
        counts: as in `StageStats.latency_us`, or the difference of two.
        share: 0.5 for the median, 0.99 for the tail.

    Returns:
        Seconds, interpolated within its bucket; 0.0 when nothing was counted.
    """
    total = sum(counts)
    left = share * total
    for bucket, count in enumerate(counts):
        if count and left <= count:
            return float(2.0 ** ((bucket + left / count) / 2.0) * 1e-6)
        left -= count
    return 0.0


def native_figures(native: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a native reader that its stage publishes under the same name; none before it reads."""
    names = (
        "busy_s", "wait_input_s", "wait_output_s", "reads", "in_flight", "buffered_bytes", "ready_bytes",
        "bytes_by_tier",
    )  # fmt: skip
    if not native:
        return {}
    return {name: native[name] for name in names} | {"latency_us": tuple(native["latency_us"])}


def own_knobs(knobs: Mapping[str, int], names: Container[str]) -> dict[str, int]:
    """Those of some knobs that a stage has.

    Raises:
        ValueError: the value of one is not positive.
    """
    own = {name: value for name, value in knobs.items() if name in names}
    for name, value in own.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    return own


class PendingReads(Protocol):
    """A batch that was asked for."""

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""

    @property
    def waits_for(self) -> str:
        """What it waits for now, for messages."""

    def take(self) -> _native.Batch:
        """Wait for the batch, once.

        Raises:
            VolumeTimeout: the deadline passed; names what the batch waits for.
        """


class BatchReads(Protocol):
    """Gives batches of samples by index."""

    @property
    def usable(self) -> bool:
        """False in a forked child of the process that made it."""

    @property
    def engine(self) -> tuple[str, str]:
        """The engine of the source, and why it is not io_uring (or '')."""

    @property
    def mapped_bytes(self) -> int:
        """Memory that it and those below it take."""

    @property
    def ahead_bytes(self) -> int:
        """How many bytes of batches should be under way; 0: as the knobs say."""

    @property
    def attached(self) -> bool:
        """Whether a node daemon serves it now."""

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        """Ask for one batch; returns at once.

        Raises:
            SampleNotFound: an index lies outside the data set.
        """

    def gather(self, pieces: list[tuple[_native.Batch, int, int]]) -> _native.Batch:
        """Copy samples start to stop - 1 of each (batch, start, stop) into one new batch."""

    def close(self) -> None:
        """Stop. Batches that were taken stay valid."""


class ReadStage:
    """Passes on what is below."""

    def __init__(self, below: BatchReads) -> None:
        self._below = below

    @property
    def usable(self) -> bool:
        """False in a forked child of the process that made it."""
        return self._below.usable

    @property
    def engine(self) -> tuple[str, str]:
        """As below."""
        return self._below.engine

    @property
    def mapped_bytes(self) -> int:
        """Memory of this process that it and those below it take."""
        return self._own_bytes() + self._below.mapped_bytes

    def _own_bytes(self) -> int:
        return 0

    @property
    def ahead_bytes(self) -> int:
        """As the knobs say."""
        return 0

    @property
    def attached(self) -> bool:
        """As below."""
        return self._below.attached

    def gather(self, pieces: list[tuple[_native.Batch, int, int]]) -> _native.Batch:
        """As below."""
        return self._below.gather(pieces)
