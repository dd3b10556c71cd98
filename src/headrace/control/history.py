"""History: what was measured on a plane, interval by interval, and what that says by queueing theory. Pure.

The tuner sees nothing else: a simulated plant, a recorded run and a live plane give it the same things. A
`PlaneInterval` is the difference of two readings of the stages' statistics; a `PlaneWindow` several intervals
taken together; `WindowEvidence` what they say about the setting in force, and what the consumer needs.

Little's law: reads in flight = rate x latency. A consumer that takes `demand` samples per second is served
without waiting when that many reads, at the present latency, are in flight. Batches are delivered in order, so
a slow read holds up everything behind it: the buffer must last as long as all but the slowest reads take. That
is the tuner's first guess; trials decide. Figures come with their noise: the spread of the intervals gives a
standard error, and a judgement within it waits for more, up to a second and a half; then the mean decides.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final

from headrace.base.lifetime import lazy
from headrace.plane.stage import LATENCY_BUCKETS, ConsumerStats, latency_percentile_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.control.tuner import Memory
    from headrace.plane.batch_trace import StepLog
    from headrace.plane.stage import StageStats


INTERVALS_KEPT = 300  # a minute at the controller's pace: older evidence is about another plant


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
    waited_s: float = 0.0  # time that the consumer waited for data
    worked_s: float = 0.0  # time that it worked, asking for nothing
    batches: int = 0
    samples: int = 0
    bytes: int = 0
    reads: int = 0  # reads that finished
    in_flight: float = 0.0  # mean reads in flight
    buffered_bytes: int = 0
    ready_bytes: int = 0
    latency_us: tuple[int, ...] = (0,) * LATENCY_BUCKETS
    """Histogram of the finished reads' latency, as in `StageStats`."""
    decode_busy_s: float = 0.0  # time that decoding threads worked, added up
    decode_wait_s: float = 0.0  # time that they waited for bytes, added up
    knobs: Knobs = field(default_factory=Knobs)  # in force during the interval


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneWindow(PlaneInterval):
    """Several intervals taken together: sums, and the means of what was under way and ready at their ends."""

    in_flight_min: float
    ready_growth: int  # by how many bytes the ready ones grew
    stall_error: float
    """Standard error of `stall`, from how much the intervals differ; 1.0: unknown."""
    rate_error: float  # standard error of `read_rate`, as a share of it; 1.0: unknown

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
            ready_bytes=sum(each.ready_bytes for each in intervals) // count,
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
    memory: Memory | None = None  # what the tuner concluded so far; None: nothing

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


HEADROOM = 1.2  # reads in flight above Little's bare number: what is lost in the tails of batches
BATCH_MARGIN = 1.04  # batches differ in size, and direct reads in what they add for alignment
TAIL_STALL = 0.015
"""Share of time that reads slower than what the buffer covers may hold up the consumer."""

_Z95 = 1.6449  # the standard normal's 95th percentile


@dataclass(frozen=True, slots=True)
class Need:
    """What the consumer's demand needs at the present latency."""

    reads_in_flight: int
    buffer_bytes: int


def _read_latency_s(window: PlaneWindow, knobs: Knobs) -> float:
    """Mean latency of a read, from Little's law where that is exact, else from the histogram."""
    pinned = window.in_flight_min >= 0.99 * knobs.reads_in_flight > 0
    if pinned and window.reads >= 4 * knobs.reads_in_flight:
        return window.in_flight * window.seconds / window.reads
    return window.latency_s


def reads_per_sample(window: PlaneWindow) -> float:
    """Reads that a sample takes: less than one where neighbours are read together."""
    if window.samples == 0 or window.reads == 0 or window.bytes == 0:
        return 1.0
    # What was read and waits to be taken was read for samples too.
    read = window.samples * (1.0 + window.ready_growth / window.bytes)
    return min(4.0, max(0.01, window.reads / read)) if read >= 1.0 else 1.0


def batches_held(window: PlaneWindow, latency_us: Sequence[int], rate: float) -> int:
    """Batches that are under way or ready at once when `rate` samples/s pass."""
    if window.batches == 0 or rate <= 0.0:
        return 2
    batch_s = window.samples / window.batches / rate
    cover_s = _cover_s(latency_us, rate * reads_per_sample(window))
    return 1 + math.ceil(cover_s / batch_s + 0.3)


def _cover_s(latency_us: Sequence[int], read_rate: float) -> float:
    """Time that the buffer must last so that slow reads hold up the consumer for TAIL_STALL only.

    A read that takes longer than that by x holds it up for x. The slowest reads are too rare to have
    been seen when they are needed: what the fitted lognormal says counts as well as what was counted.
    """
    if sum(latency_us) == 0:
        return 0.0
    return max(_cover_seen_s(latency_us, read_rate), _cover_fitted_s(latency_us, read_rate))


def _cover_seen_s(latency_us: Sequence[int], read_rate: float) -> float:
    """The same, from the reads that were counted."""
    total = sum(latency_us)
    excess = slower = 0.0  # seconds beyond the present bound, summed over reads; reads beyond it
    for bucket in range(len(latency_us) - 1, 0, -1):
        low, high = (math.exp2(at / 2.0) * 1e-6 for at in (bucket, bucket + 1))
        inside = latency_us[bucket] * (high - low) / 2.0 + slower * (high - low)
        if read_rate * (excess + inside) / total > TAIL_STALL:
            share = (TAIL_STALL * total / read_rate - excess) / inside
            return high - share * (high - low)
        excess += inside
        slower += latency_us[bucket]
    return 0.0


def _cover_fitted_s(latency_us: Sequence[int], read_rate: float) -> float:
    """The same, from the lognormal distribution with their median and 95th percentile.

    Mean excess of a lognormal L beyond x: E[L] Phi(d + sigma) - x Phi(d), d = (mu - ln x) / sigma.
    """
    median, slow = (latency_percentile_s(latency_us, share) for share in (0.5, 0.95))
    if median <= 0.0 or slow <= 1.02 * median:
        return 0.0
    sigma = math.log(slow / median) / _Z95
    mean = median * math.exp(sigma * sigma / 2.0)

    def stall(cover_s: float) -> float:
        d = math.log(median / cover_s) / sigma
        return read_rate * (mean * _below(d + sigma) - cover_s * _below(d))

    low, high = 0.0, median * math.exp(6.0 * sigma)
    for _ in range(30):
        middle = (low + high) / 2.0
        low, high = (middle, high) if stall(middle) > TAIL_STALL else (low, middle)
    return high


def _below(z: float) -> float:
    """The standard normal distribution function."""
    return math.erfc(-z / math.sqrt(2.0)) / 2.0


def batches_read(delivered: PlaneWindow, reads_in_flight: int) -> float:
    """Batches that must be under way at once to have so many reads in flight."""
    if delivered.batches == 0:
        return 2.0
    per_batch = delivered.samples / delivered.batches * reads_per_sample(delivered)
    return 1.0 + reads_in_flight / max(1.0, per_batch)


STALL_OK = 0.01  # share of time that a consumer may wait without anything being done about it
STALL_BAD = 0.02
"""Above this it waits. Between the two nothing is changed, so that noise turns no knobs."""

SAME_RATE = 0.975  # a smaller setting is as good when it reads at least this share of the best rate
LATENCY_STEP = 2.0
DEMAND_STEP = 1.6  # latency or demand that changes by such a factor is another regime, not noise
PATIENCE_S = 1.5  # a verdict that is within its noise waits for more evidence, but not longer
WINDOW_S = 3.0
WINDOW_BATCHES = 40  # what happened longer ago than both counts no more


class WindowEvidence:
    """What the history says about `knobs`."""

    def __init__(self, history: PlaneHistory, knobs: Knobs, memory: Memory) -> None:
        self.history = history
        self.knobs = knobs
        self.memory = memory
        intervals = history.since(memory.evidence_s)
        if memory.evidence_s == 0.0:  # the first batch has to be waited for, whatever is done
            first = next((at for at, each in enumerate(intervals) if each.batches), None)
            intervals = intervals[first + 1 :] if first is not None else intervals
        self.intervals = intervals

    @lazy
    def window(self) -> PlaneWindow:
        """The setting in force, as far back as it is of interest."""
        return PlaneWindow.over(_last(self.intervals, batches=WINDOW_BATCHES, seconds=WINDOW_S))

    @lazy
    def recent(self) -> PlaneWindow:
        """The shortest past that shows the storage's present latency."""
        return PlaneWindow.over(_last(self.intervals, reads=30, batches=1, seconds=0.2))

    @lazy
    def latency_us(self) -> Sequence[int]:
        """Histogram of many reads: the tail takes more of them than a window has."""
        own = PlaneWindow.over(_last(self.intervals, reads=5000))
        if own.reads >= 500:
            return own.latency_us
        regime = self.history.since(self.memory.regime_s)
        return PlaneWindow.over(_last(regime, reads=5000)).latency_us

    @lazy
    def delivered(self) -> PlaneWindow:
        """The last deliveries, however long ago: they say what batches are like."""
        return PlaneWindow.over(_last(self.history.intervals, batches=64), histogram=False)

    def need(self, knobs: Knobs, rate_max: float) -> Need | None:
        """Reads and bytes that serve the consumer's demand under `knobs`; None while that is unknown.

        Beyond `rate_max` samples per second the demand is not followed.
        """
        delivered = self.delivered
        demand = self.window.demand or self.memory.demand
        latency_s = _read_latency_s(self.window, knobs)
        if not demand or latency_s <= 0.0:
            return None
        demand = min(demand, rate_max)
        per_sample = reads_per_sample(delivered)
        reads = max(1, math.ceil(demand * per_sample * latency_s * HEADROOM))
        held = batches_held(delivered, self.latency_us, demand)
        held_or_read = max(held, batches_read(delivered, reads))
        return Need(reads, int(held_or_read * delivered.batch_bytes * BATCH_MARGIN))

    def enough(self, batches: int) -> bool:
        """Whether the window is long enough to be looked at."""
        window = self.window
        if window.seconds < 0.25:
            return False
        if window.batches >= batches:
            return True
        # The storage is the limit: its reads are many more than the batches.
        reads = max(100, 4 * self.knobs.reads_in_flight)
        return window.stall > 0.5 and window.reads >= reads

    def served(self) -> bool:
        """Whether the consumer does not wait, beyond doubt."""
        window = self.window
        if not self.enough(batches=6) or window.batches < 6 or window.stall > STALL_OK:
            return False
        doubt = 0.0 if window.seconds >= PATIENCE_S else window.stall_error
        return window.stall + doubt <= STALL_BAD

    def flows(self) -> bool:
        """Whether as much is read as is delivered: a stock that is eaten up proves nothing."""
        window = self.window
        return window.reads >= 0.7 * window.samples * reads_per_sample(self.delivered)

    def waits(self) -> bool:
        """Whether the consumer waits, beyond doubt."""
        window = self.window
        if window.batches == 0:
            return window.waited_s >= max(0.15, 0.9 * window.seconds)
        if window.seconds < 0.25:
            return False
        if window.seconds >= PATIENCE_S and window.batches >= 12:
            return window.stall > STALL_BAD
        return window.stall - 2.0 * window.stall_error > STALL_BAD

    def news(self) -> str:
        """What has changed beyond noise since this regime was learned, in words; or ''."""
        return self.latency_news() or self._demand_news()

    def rate_known(self) -> bool:
        """Whether the storage's rate is known to within a few percent."""
        window = self.window
        if not self.enough(batches=8):
            return False
        return window.rate_error < 0.03 or window.seconds >= PATIENCE_S

    def latency_news(self) -> str:
        """What has changed about the storage's latency, in words; or ''."""
        memory = self.memory
        if not memory.latency_s:
            return ""
        recent = self.recent
        if recent.reads < 24:
            return ""
        # Reads that wait for each other take longer when more are in flight: that is no news.
        more = max(1.0, recent.in_flight) / memory.latency_reads
        fewer = self.knobs.reads_in_flight / max(1, memory.latency_knob)
        ratio = recent.latency_s / memory.latency_s
        if ratio > 1.0 and recent.in_flight < 0.5 * memory.latency_reads:
            return ""  # of a reader that waits for room only the slow reads are left
        if min(1.0, fewer) / LATENCY_STEP < ratio < LATENCY_STEP * max(1.0, more):
            return ""
        return f"reads take {recent.latency_s * 1e3:.3g} ms, no longer {memory.latency_s * 1e3:.3g}"

    def _demand_news(self) -> str:
        demand = self.memory.demand
        if not demand or self.window.stall > 0.9:  # it takes whatever comes
            return ""
        newest = _last(self.intervals, batches=12)
        half = len(newest) // 2
        parts = newest[:half], newest[half:]
        halves = [PlaneWindow.over(part, histogram=False) for part in parts]
        if min(each.batches for each in halves) < 3:
            return ""
        ratios = [(each.demand or demand) / demand for each in halves]
        if max(ratios) > 1.0 / DEMAND_STEP and min(ratios) < DEMAND_STEP:
            return ""
        return f"the consumer takes {ratios[1] * demand:,.0f} samples/s, no longer {demand:,.0f}"

    def facts(self) -> str:
        """The window in a line."""
        window = self.window
        parts = [
            f"{window.seconds:.2f} s",
            f"{window.rate:,.0f} samples/s",
            f"{window.reads:,} reads of {window.latency_s * 1e3:.3g} ms",
            f"{window.in_flight:.0f} in flight",
            f"waited {window.stall:.1%} +- {window.stall_error:.1%}",
        ]
        if window.demand:
            parts.append(f"demand {window.demand:,.0f}/s")
        return ", ".join(parts)


def _last(
    intervals: Sequence[PlaneInterval], *, batches: int = 0, reads: int = 0, seconds: float = 0.0
) -> Sequence[PlaneInterval]:
    """The fewest of the newest intervals that hold as much; all when they do not."""
    held_batches = held_reads = 0
    held_s = 0.0
    for at in range(len(intervals) - 1, -1, -1):
        held_batches += intervals[at].batches
        held_reads += intervals[at].reads
        held_s += intervals[at].seconds
        if held_batches >= batches and held_reads >= reads and held_s >= seconds - 1e-9:
            return intervals[at:]
    return intervals
