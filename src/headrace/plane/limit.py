"""Limit: what one job may take from one file system, by token buckets for bytes and operations.

A limit counts as well: what was used, what waits, and for how long, which is what a controller shares
out by. It never sleeps: whoever asks is told how long to wait, and waits in its own way (the node
daemon's loop until then, a thread, not at all). Thread-safe. The caller brings a monotonic clock.

What counts is what comes from the file system. What a cache above it has, is free.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.plane.tiers.bucket import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LIMITED", "Cost", "Limit", "Usage"]

LIMITED: Final = ("bytes", "reads", "metadata")
"""What is counted: bytes, reads of data, and metadata operations (open, stat, list)."""

BURST_S: Final = 0.05
"""How much an idle bucket saves up, in seconds of its rate: with one batch, what a cap may be passed
by within any stretch of time. 1 % of 5 s."""


class Cost(NamedTuple):
    """What something takes from a file system."""

    bytes: float = 0.0
    reads: float = 0.0
    metadata: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a limit has counted in an interval, each in the order of `LIMITED`.

    Attributes:
        used: what was let through.
        waiting: what is held back now, by the limit that holds it.
        held_s: how long something was held back, likewise.
    """

    used: tuple[float, float, float]
    waiting: tuple[float, float, float]
    held_s: tuple[float, float, float]

    @property
    def idle(self) -> bool:
        """Whether there is nothing to tell."""
        return not (any(self.used) or any(self.waiting) or any(self.held_s))


class Limit:
    """Buckets, counters, and who waits.

    Args:
        now: seconds on the caller's monotonic clock.

    Attributes:
        total: everything that was let through, in the order of `LIMITED`.
        held_s: seconds for which something was held back.
    """

    def __init__(self, now: float) -> None:
        self._buckets = [TokenBucket(None, now, BURST_S) for _ in LIMITED]
        self._lock = threading.Lock()
        self._used = [0.0] * len(LIMITED)
        self.total = [0.0] * len(LIMITED)
        self.held_s = 0.0
        self._held: dict[object, Cost] = {}
        self._held_by: int | None = None
        self._held_since = now
        self._held_for = [0.0] * len(LIMITED)

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Per second; None: no limit."""
        return tuple(bucket.rate for bucket in self._buckets)

    @property
    def limited(self) -> bool:
        """Whether anything is limited now."""
        return any(bucket.rate is not None for bucket in self._buckets)

    def set_rates(self, rates: Sequence[float | None], now: float) -> None:
        """Limit to these from now on; None: no limit. What was overdrawn stays so.

        Raises:
            ValueError: a rate is not positive.
        """
        for name, rate in zip(LIMITED, rates, strict=True):
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} is {rate} per second, expected more than 0, or None")
        with self._lock:
            for bucket, rate in zip(self._buckets, rates, strict=True):
                if bucket.rate != rate:
                    bucket.set_rate(rate, now)

    def wait_s(self, cost: Cost, now: float) -> float:
        """Seconds until something of this cost may pass; 0.0: now."""
        with self._lock:
            return self._longest(cost, now)[0]

    def spend(self, cost: Cost) -> None:
        """Count what was let through. Negative: it was not needed after all."""
        with self._lock:
            for i, units in enumerate(cost):
                self._buckets[i].spend(units)
                self._used[i] += units
                self.total[i] += units

    def hold(self, who: object, cost: Cost, now: float) -> None:
        """Somebody waits, with this."""
        with self._lock:
            self._settle(now)
            self._held[who] = cost
            self._held_by = self._longest(cost, now)[1]

    def let_go(self, who: object, now: float) -> None:
        """Whoever waited does so no more."""
        with self._lock:
            self._settle(now)
            self._held.pop(who, None)
            if not self._held:
                self._held_by = None

    def take_usage(self, now: float) -> Usage:
        """What was counted since this was last asked."""
        with self._lock:
            self._settle(now)
            waiting = [0.0] * len(LIMITED)
            if self._held_by is not None:
                cost = next(iter(self._held.values()))
                self._held_by = self._longest(cost, now)[1]
                waiting[self._held_by] = sum(c[self._held_by] for c in self._held.values())
            # What was paid back may belong to the interval before.
            used = [max(0.0, units) for units in self._used]
            usage = Usage(_three(used), _three(waiting), _three(self._held_for))
            self._used = [min(0.0, units) for units in self._used]
            self._held_for = [0.0] * len(LIMITED)
            return usage

    def _longest(self, cost: Cost, now: float) -> tuple[float, int]:
        """How long to wait, and for which bucket; those that the cost does not touch are left out."""
        waits = [
            bucket.wait_s(now) if units else 0.0
            for bucket, units in zip(self._buckets, cost, strict=True)
        ]
        longest = max(range(len(waits)), key=waits.__getitem__)
        return waits[longest], longest

    def _settle(self, now: float) -> None:
        """Count how long something was held back until now."""
        if self._held_by is not None:
            seconds = max(0.0, now - self._held_since)
            self._held_for[self._held_by] += seconds
            self.held_s += seconds
        self._held_since = now


def _three(values: list[float]) -> tuple[float, float, float]:
    return values[0], values[1], values[2]
