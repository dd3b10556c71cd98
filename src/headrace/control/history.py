"""History: what was measured on a plane, interval by interval. Immutable.

The tuner sees nothing else: a simulated plant, a recorded run and a live plane give it the same
things. A `PlaneInterval` is the difference of two readings of the stages' statistics; a `PlaneWindow` several
intervals taken together.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final

from headrace.plane.stage import LATENCY_BUCKETS, ConsumerStats, latency_percentile_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.control.tuner import Memory
    from headrace.plane.batch_trace import StepLog
    from headrace.plane.stage import StageStats

INTERVALS_KEPT = 300
"""A minute at the controller's pace: older evidence is about another plant."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Where the knobs of a plane stand. 0: the plane has no such knob."""

    reads_in_flight: int = 0
    buffer_bytes: int = 0
    decode_threads: int = 0

    def turned(self, changes: Mapping[str, int]) -> Knobs:
        """The same with some of them changed."""
        return replace(self, **changes)

    def changes_from(self, other: Knobs) -> dict[str, int]:
        """Names and new values of what differs from `other`."""
        return {k: value for k, value in asdict(self).items() if value != getattr(other, k)}


@dataclass(frozen=True, slots=True)
class PlaneReading:
    """What the consumer and the stages of a plane had done at a moment."""

    at: float = 0.0
    consumer: ConsumerStats = field(default_factory=ConsumerStats)
    stages: Sequence[StageStats] = ()
    readers: frozenset[str] = frozenset()  # names of the stages whose reads are tuned
    steps: StepLog | None = None  # the last deliveries; None: they are not counted, or not known


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneInterval:
    """What happened on one plane between two looks at it."""

    seconds: float
    waited_s: float = 0.0
    """Time that the consumer waited for data."""
    worked_s: float = 0.0
    """Time that it worked, asking for nothing."""
    batches: int = 0
    samples: int = 0
    bytes: int = 0
    reads: int = 0
    """Reads that finished."""
    in_flight: float = 0.0
    """Mean reads in flight."""
    buffered_bytes: int = 0
    ready_bytes: int = 0
    latency_us: tuple[int, ...] = (0,) * LATENCY_BUCKETS
    """Histogram of the finished reads' latency, as in `StageStats`."""
    decode_busy_s: float = 0.0
    """Time that decoding threads worked, added up."""
    decode_wait_s: float = 0.0
    """Time that they waited for bytes, added up."""
    knobs: Knobs = field(default_factory=Knobs)
    """In force during the interval."""


@dataclass(frozen=True, slots=True)
class PlaneWindow:
    """Several intervals taken together."""

    seconds: float
    waited_s: float
    worked_s: float
    batches: int
    samples: int
    bytes: int
    reads: int
    in_flight: float
    """Mean over the intervals' ends."""
    in_flight_min: float
    ready_bytes: float
    ready_growth: int
    """By how many bytes the ready ones grew."""
    latency_us: tuple[int, ...]
    decode_busy_s: float
    decode_wait_s: float
    stall_error: float
    """Standard error of `stall`, from how much the intervals differ; 1.0: unknown."""
    rate_error: float
    """Standard error of `read_rate`, as a share of it; 1.0: unknown."""

    @classmethod
    def over(cls, intervals: Sequence[PlaneInterval], *, histogram: bool = True) -> PlaneWindow:
        """Add intervals up. Without the histogram, which costs most, it is empty."""
        count = max(1, len(intervals))
        held = [each.in_flight for each in intervals] or [0.0]
        histograms = [each.latency_us for each in intervals if each.reads] if histogram else []
        counts = tuple(map(sum, zip(*histograms, strict=True))) or (0,) * LATENCY_BUCKETS
        return cls(
            **{name: sum(getattr(each, name) for each in intervals) for name in _ADDED_UP},
            in_flight=sum(held) / count,
            in_flight_min=min(held),
            ready_bytes=sum(each.ready_bytes for each in intervals) / count,
            ready_growth=intervals[-1].ready_bytes - intervals[0].ready_bytes if intervals else 0,
            latency_us=counts,
            stall_error=_error([each.waited_s / each.seconds for each in intervals]),
            rate_error=_relative_error(intervals),
        )

    @property
    def stall(self) -> float:
        """Share of the consumer's time that it waited; 0.0 when it did not show up."""
        known_s = self.waited_s + self.worked_s
        return self.waited_s / known_s if known_s > 0 else 0.0

    @property
    def rate(self) -> float:
        """Samples per second that the consumer got."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def read_rate(self) -> float:
        """Reads per second that the storage finished."""
        return self.reads / self.seconds if self.seconds > 0 else 0.0

    @property
    def demand(self) -> float | None:
        """Samples per second that the consumer would take if it never waited; None: unknown."""
        if self.batches == 0 or self.worked_s <= 0:
            return None
        return self.samples / self.worked_s

    @property
    def latency_s(self) -> float:
        """Mean latency of a read; 0.0 when none finished. To within some percent."""
        reads = sum(self.latency_us)
        if reads == 0:
            return 0.0
        # 1.0151: mean of a bucket that is evenly filled on the logarithmic scale, from its middle.
        total: float = sum(
            n * 2.0 ** ((at + 0.5) / 2.0) for at, n in enumerate(self.latency_us) if n
        )
        return 1.005e-6 * total / reads

    def latency_percentile_s(self, share: float) -> float:
        """Latency that `share` of the reads stayed below."""
        return latency_percentile_s(self.latency_us, share)

    @property
    def batch_bytes(self) -> float:
        """Mean bytes of a delivered batch; 0.0 when none was."""
        return self.bytes / self.batches if self.batches else 0.0


_ADDED_UP: Final = (
    "seconds", "waited_s", "worked_s", "batches", "samples", "bytes", "reads", "decode_busy_s",
    "decode_wait_s",
)  # fmt: skip


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    count = len(values)
    if count < 2:
        return 1.0
    mean = sum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count * (count - 1)))


def _relative_error(intervals: Sequence[PlaneInterval]) -> float:
    """Of the rate of reads; few intervals may agree by chance, few reads cannot."""
    reads = sum(each.reads for each in intervals)
    if reads == 0:
        return 1.0
    rates = [each.reads / each.seconds for each in intervals]
    return max(_error(rates) * len(rates) / max(1e-9, sum(rates)), 0.6 / math.sqrt(reads))


@dataclass(frozen=True, slots=True)
class PlaneHistory:
    """The intervals of one plane so far, the newest last."""

    intervals: tuple[PlaneInterval, ...] = ()
    now_s: float = 0.0
    """Length of all intervals ever, those forgotten included: the tuner's only clock."""
    memory: Memory | None = None
    """What the tuner concluded so far; None: nothing."""

    def after(self, interval: PlaneInterval) -> PlaneHistory:
        """This history and one more interval."""
        kept = (*self.intervals[-(INTERVALS_KEPT - 1) :], interval)
        return PlaneHistory(kept, self.now_s + interval.seconds, self.memory)

    def remembering(self, memory: Memory) -> PlaneHistory:
        """This history with what the tuner concluded from it."""
        return PlaneHistory(self.intervals, self.now_s, memory)

    def since(self, start_s: float) -> tuple[PlaneInterval, ...]:
        """The intervals that began at `start_s` (of `now_s`'s clock) or later."""
        begins_s, first = self.now_s, len(self.intervals)
        while first > 0:
            begins_s -= self.intervals[first - 1].seconds
            if begins_s < start_s - 1e-9:
                break
            first -= 1
        return self.intervals[first:]
