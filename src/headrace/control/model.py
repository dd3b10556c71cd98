"""Model: what a plane needs, by queueing theory, from what was measured. Pure arithmetic.

Little's law: reads in flight = rate x latency. A consumer that takes `demand` samples per second is
served without waiting when that many reads, at the present latency, are in flight. Batches are
delivered in order, so a slow read holds up everything behind it: the buffer must last as long as
all but the slowest reads take. The model is the tuner's first guess; trials decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.plane.stage import latency_percentile_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.control.history import Knobs, Window

__all__ = [
    "BATCH_MARGIN",
    "Need",
    "batches_held",
    "batches_read",
    "need",
    "read_latency_s",
    "reads_per_sample",
]

HEADROOM = 1.2
"""Reads in flight above Little's bare number: what is lost in the tails of batches."""

BATCH_MARGIN = 1.04
"""Batches differ in size, and direct reads in what they add for alignment."""

TAIL_STALL = 0.015
"""Share of time that reads slower than what the buffer covers may hold up the consumer."""

_Z95 = 1.6449
"""The standard normal's 95th percentile."""


@dataclass(frozen=True, slots=True)
class Need:
    """What the consumer's demand needs at the present latency."""

    reads_in_flight: int
    buffer_bytes: int


def read_latency_s(window: Window, knobs: Knobs) -> float:
    """Mean latency of a read, from Little's law where that is exact, else from the histogram."""
    pinned = window.in_flight_min >= 0.99 * knobs.reads_in_flight > 0
    if pinned and window.reads >= 4 * knobs.reads_in_flight:
        return window.in_flight * window.seconds / window.reads
    return window.latency_s


def reads_per_sample(window: Window) -> float:
    """Reads that a sample takes: less than one where neighbours are read together."""
    if window.samples == 0 or window.reads == 0 or window.bytes == 0:
        return 1.0
    # What was read and waits to be taken was read for samples too.
    read = window.samples * (1.0 + window.ready_growth / window.bytes)
    return min(4.0, max(0.01, window.reads / read)) if read >= 1.0 else 1.0


def batches_held(window: Window, latency_us: Sequence[int], rate: float) -> int:
    """Batches that are under way or ready at once when `rate` samples/s pass.

    Args:
        window: gives the batches' size.
        latency_us: a histogram of many reads, for the tail.
        rate: samples per second.
    """
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


def need(
    window: Window,
    delivered: Window,
    latency_us: Sequence[int],
    knobs: Knobs,
    *,
    demand_before: float = 0.0,
    rate_max: float = math.inf,
) -> Need | None:
    """Reads and bytes that serve the consumer's demand; None while that is unknown.

    Args:
        window: what was measured.
        delivered: the last deliveries, for what batches are like.
        latency_us: a histogram of many reads, for the tail.
        knobs: in force during the window.
        demand_before: samples per second, for windows in which nothing was delivered.
        rate_max: samples per second beyond which the demand is not followed.
    """
    demand, latency_s = window.demand or demand_before, read_latency_s(window, knobs)
    if not demand or latency_s <= 0.0:
        return None
    demand = min(demand, rate_max)
    per_sample = reads_per_sample(delivered)
    reads = max(1, math.ceil(demand * per_sample * latency_s * HEADROOM))
    held = max(batches_held(delivered, latency_us, demand), batches_read(delivered, reads))
    return Need(reads, int(held * delivered.batch_bytes * BATCH_MARGIN))


def batches_read(delivered: Window, reads_in_flight: int) -> float:
    """Batches that must be under way at once to have so many reads in flight."""
    if delivered.batches == 0:
        return 2.0
    per_batch = delivered.samples / delivered.batches * reads_per_sample(delivered)
    return 1.0 + reads_in_flight / max(1.0, per_batch)
