"""What an engine did: counters for the tuner, for `headrace explain`, and for tests.

The latency histogram has 64 buckets; bucket i counts reads of [2^(i/2), 2^((i+1)/2)) microseconds.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from dataclasses import dataclass

BUCKETS = 64


@dataclass(frozen=True, slots=True)
class ObjectStats:
    """Cumulative since the engine's start unless said otherwise.

    Attributes:
        reads: finished reads, failed ones included.
        requests: requests sent, retries and hedges included.
        bytes: bytes delivered.
        retries: requests repeated after a fault.
        hedges: requests sent a second time because the first was slow.
        refreshes: times the credentials were fetched anew.
        failures: reads given up.
        faults: faults met, by reason's first words (`status 503`, `truncated`, ...).
        in_flight: requests in flight now.
        waiting: reads that wait for their turn now.
        latency_us: the histogram of whole reads.
    """

    reads: int
    requests: int
    bytes: int
    retries: int
    hedges: int
    refreshes: int
    failures: int
    faults: dict[str, int]
    in_flight: int
    waiting: int
    latency_us: tuple[int, ...]


class Tally:
    """Counts; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._latency = [0] * BUCKETS

    def add(self, name: str, number: int = 1) -> None:
        """Adds to one of `ObjectStats`' counters."""
        with self._lock:
            self._counts[name] += number

    def fault(self, reason: str) -> None:
        """Counts a fault by what its reason says before the first colon or bracket."""
        with self._lock:
            self._faults[re.split("[:;(]", reason, maxsplit=1)[0].strip()[:40]] += 1

    def read(self, seconds: float, size: int, *, failed: bool = False) -> None:
        """Counts a finished read; `size` bytes of it were delivered."""
        micros = seconds * 1e6
        bucket = 0 if micros < 1 else min(BUCKETS - 1, int(2 * math.log2(micros)))
        with self._lock:
            self._counts["reads"] += 1
            self._counts["bytes"] += size
            self._counts["failures"] += failed
            self._latency[bucket] += 1

    def stats(self, *, in_flight: int, waiting: int) -> ObjectStats:
        """The numbers as they are now."""
        with self._lock:
            c = self._counts
            return ObjectStats(
                c["reads"], c["requests"], c["bytes"], c["retries"], c["hedges"], c["refreshes"],
                c["failures"], dict(self._faults), in_flight, waiting, tuple(self._latency),
            )  # fmt: skip
