"""Rate limits: token buckets, a job's limit on a file system, and the stage that holds reads back.

What is asked for passes as soon as its bucket is not in debt, however large it is, and the debt is paid
off before the next: a batch larger than the bucket cannot wait for ever, and the mean rate is exact.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.errors import HeadraceError, VolumeTimeout
from headrace.plane.stage import ReadStage, StageStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace import _native
    from headrace.plane.stage import BatchReads, PendingReads

    BytesOf = Callable[[NDArray[np.int64]], int]


class TokenBucket:
    """Lets `rate` units a second through; None: everything at once. `now` is the caller's clock.

    While idle it saves up `burst_s` seconds of its rate: that hides a hiccup, not more.
    """

    def __init__(self, rate: float | None, now: float, burst_s: float = 0.25) -> None:
        self._burst_s = burst_s
        self._rate = rate
        self._tokens = 0.0
        self._at = now

    @property
    def rate(self) -> float | None:
        """Units per second."""
        return self._rate

    def set_rate(self, rate: float | None, now: float) -> None:
        """Change the rate from now on. A debt stays, in units."""
        self._fill(now)
        self._rate = rate

    def wait_s(self, now: float) -> float:
        """Seconds until something may pass; 0.0: now."""
        self._fill(now)
        if self._rate is None or self._tokens >= 0.0:
            return 0.0
        return -self._tokens / self._rate

    def spend(self, units: float) -> None:
        """Count what was let through; negative: what was paid for and then not needed."""
        if self._rate is not None:
            self._tokens -= units

    def _fill(self, now: float) -> None:
        if self._rate is None:
            self._tokens = 0.0
        else:
            earned = max(0.0, now - self._at) * self._rate
            self._tokens = min(self._rate * self._burst_s, self._tokens + earned)
        self._at = now


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
class LimitUsage:
    """What a limit has counted in an interval, each in the order of `LIMITED`."""

    used: tuple[float, float, float]  # what was let through
    waiting: tuple[float, float, float]  # what is held back now, by the limit that holds it
    held_s: tuple[float, float, float]  # how long something was held back, likewise

    @property
    def idle(self) -> bool:
        """Whether there is nothing to tell."""
        return not (any(self.used) or any(self.waiting) or any(self.held_s))


class Limit:
    """Buckets, counters, and who waits.

    Attributes:
        total: everything that was let through, in the order of `LIMITED`.
    """

    def __init__(self, now: float, burst_s: float = BURST_S) -> None:
        self._buckets = [TokenBucket(None, now, burst_s) for _ in LIMITED]
        self._lock = threading.Lock()
        self._used = [0.0] * len(LIMITED)
        self.total = [0.0] * len(LIMITED)
        self.held_s = 0.0  # seconds for which something was held back
        self._held: dict[object, Cost] = {}
        self._held_by: int | None = None
        self._held_since = now
        self._held_for = [0.0] * len(LIMITED)

    @property
    def rates(self) -> tuple[float | None, float | None, float | None]:
        """Per second; None: no limit."""
        bytes_per_s, reads_per_s, metadata_per_s = (bucket.rate for bucket in self._buckets)
        return bytes_per_s, reads_per_s, metadata_per_s

    @property
    def limited(self) -> bool:
        """Whether anything is limited now."""
        return any(bucket.rate is not None for bucket in self._buckets)

    def set_rates(self, rates: Sequence[float | None], now: float) -> None:
        """Limit to these from now on; None: no limit. What was overdrawn stays so.

        Raises ValueError if a rate is not positive.
        """
        for name, rate in zip(LIMITED, rates, strict=True):
            if rate is not None and not rate > 0:
                raise ValueError(
                    f"{name}_per_s is {rate}, expected more than 0, or None for no limit"
                )
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

    def take_usage(self, now: float) -> LimitUsage:
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
            usage = LimitUsage(_three(used), _three(waiting), _three(self._held_for))
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


_SIGNAL_CHECK_S = 0.2

_GIVEN_UP_CHECK_S = 0.05  # nobody says when a request that was let go is dropped and not taken

_THROTTLE_BURST_S = 0.25
"""A throttle saves up more than a job's limit: it hides a hiccup of the one loader that it is for."""


class Throttle(ReadStage):
    """Limits the rate of what is read below it: bytes, and reads (one per sample, unless read together).

    A request may be held back for `deadline_s` without any being let go. `room` says how many bytes what reads
    can work on at a time; None: no end.
    """

    name = "throttle"

    def __init__(
        self,
        below: BatchReads,
        bytes_of: BytesOf,
        *,
        bytes_per_s: float | None = None,
        reads_per_s: float | None = None,
        deadline_s: float = 300.0,
        room: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(below)
        self._gate = _Gate(below, bytes_of, deadline_s, room)
        self.limit(bytes_per_s=bytes_per_s, reads_per_s=reads_per_s)

    def limit(self, *, bytes_per_s: float | None, reads_per_s: float | None) -> None:
        """Set both limits, from now on; None for none. Raises ValueError if a limit is not positive."""
        gate = self._gate
        with gate.changed:
            gate.rates.set_rates((bytes_per_s, reads_per_s, None), time.monotonic())
            gate.changed.notify_all()

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        """Ask for one batch; it is read when the limits allow."""
        return self._gate.submit(indices)

    def close(self) -> None:
        """Let go of what is held back, and close what is below."""
        self._gate.stop()
        self._below.close()

    def __del__(self) -> None:
        self._gate.stop()

    def stats(self) -> StageStats:
        """What passed, and for how long requests were held back."""
        gate = self._gate
        with gate.changed:
            return replace(gate.passed, busy_s=gate.busy_s, in_flight=len(gate.held))

    def knobs(self) -> Mapping[str, int]:
        """The limits that are set."""
        rates = zip(LIMITED, self._gate.rates.rates, strict=True)
        return {f"{name}_per_s": int(rate) for name, rate in rates if rate is not None}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set `bytes_per_s` or `reads_per_s`; the other stays."""
        bytes_per_s, reads_per_s, _ = self._gate.rates.rates
        self.limit(
            bytes_per_s=knobs.get("bytes_per_s", bytes_per_s),
            reads_per_s=knobs.get("reads_per_s", reads_per_s),
        )


class _Held:
    """A request that waits for its turn, then for its bytes."""

    def __init__(self, gate: _Gate, indices: NDArray[np.int64], cost: Cost) -> None:
        self.indices = indices
        self.cost = cost
        self.job: PendingReads | None = None
        self.error: HeadraceError | None = None
        self.began = threading.Event()
        self.taken = False
        self.held_s = 0.0  # longer than the one before it
        self._gate = gate

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        return self.error is not None or (self.job is not None and self.job.done)

    @property
    def waits_for(self) -> str:
        """What it waits for now, for messages."""
        return (
            "the limits of bytes and reads per second" if self.job is None else self.job.waits_for
        )

    def take(self) -> _native.Batch:
        """Wait for the batch."""
        if not self.began.is_set():
            self._gate.await_one(self)
        self.taken = True
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # its traceback holds this frame
        assert self.job is not None
        batch = self.job.take()
        batch.held(int(self.held_s * 1e9))
        self._gate.settle(self.cost, batch)
        return batch


class _Gate:
    """Queue, limit and thread; apart from `Throttle`, so that dropping that one ends this."""

    def __init__(
        self,
        below: BatchReads,
        bytes_of: BytesOf,
        deadline_s: float,
        room: Callable[[], int] | None,
    ) -> None:
        now = time.monotonic()
        self.rates = Limit(now, _THROTTLE_BURST_S)
        self.held: deque[_Held] = deque()
        self.changed = threading.Condition()
        self.passed = StageStats(name=Throttle.name)
        self.busy_s = self._held_s = 0.0
        self._below = below
        self._bytes_of = bytes_of
        self._deadline_s = deadline_s
        self._room = room
        self._let_go: deque[tuple[weakref.ref[_Held], float]] = deque()
        self._let_go_bytes = 0.0
        self._let_go_at = now
        self._awaited = 0
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        if not self.rates.limited and not self.held:
            return self._below.submit(indices)
        held = _Held(self, indices, Cost(self._bytes_of(indices), len(indices)))
        with self.changed:
            self._stopping = False
            if self._thread is None:
                self._let_go_at = time.monotonic()
                self._thread = threading.Thread(
                    target=self._run, name="headrace-throttle", daemon=True
                )
                self._thread.start()
            self.held.append(held)
            self.changed.notify_all()
        return held

    def stop(self) -> None:
        if os.getpid() != self._pid:
            return  # a thread that does not exist here may hold the lock
        with self.changed:
            self._stopping = True
            while self.held:
                held = self.held.popleft()
                held.error = VolumeTimeout("the loader was closed while a batch was held back.")
                held.began.set()
            self.changed.notify_all()

    def await_one(self, held: _Held) -> None:
        """Wait until it is let go. Whoever waits is not kept waiting for want of room."""
        with self.changed:
            self._awaited += 1
            self.changed.notify_all()
        try:
            while not held.began.wait(_SIGNAL_CHECK_S):
                idle_s = time.monotonic() - self._let_go_at
                if idle_s > self._deadline_s:
                    bytes_per_s, reads_per_s, _ = self.rates.rates
                    raise VolumeTimeout(
                        f"a batch was held back for {idle_s:.0f} s by the limits {bytes_per_s} "
                        f"bytes and {reads_per_s} reads per second.",
                        next_step="Give larger limits, or a larger deadline_s.",
                    )
        finally:
            with self.changed:
                self._awaited -= 1

    def settle(self, cost: Cost, batch: _native.Batch) -> None:
        """Pay back what did not have to be read."""
        stats, nbytes = batch.stats, int(batch.lengths.sum())
        read = stats["direct_reads"] + stats["buffered_reads"] + stats["opened_files"]
        back = Cost(min(0, stats["bytes_read"] - cost.bytes), min(0, read - cost.reads))
        with self.changed:
            self.rates.spend(back)
            passed = self.passed
            self.passed = replace(passed, bytes=passed.bytes + nbytes, reads=passed.reads + read)
            self.changed.notify_all()

    def _run(self) -> None:
        while (held := self._next()) is not None:
            try:
                held.job = self._below.submit(held.indices)
            except HeadraceError as e:
                held.error = e
            except Exception as e:  # noqa: BLE001 - whatever it is belongs to whoever waits
                held.error = HeadraceError(str(e))
            held.began.set()

    def _next(self) -> _Held | None:
        """Wait until the first request may go; None at the end."""
        with self.changed:
            while not self._stopping:
                if not self.held:
                    self.changed.wait()
                    continue
                now = time.monotonic()
                wait_s = self.rates.wait_s(self.held[0].cost, now)
                if wait_s > 0.0:
                    self.changed.wait(wait_s)
                    self.busy_s += time.monotonic() - now
                elif not self._awaited and not self._has_room():
                    self.changed.wait(_GIVEN_UP_CHECK_S)
                else:
                    return self._first()
            self._thread = None
            return None

    def _first(self) -> _Held:
        held = self.held.popleft()
        self.rates.spend(held.cost)
        self.passed = replace(self.passed, samples=self.passed.samples + len(held.indices))
        self._let_go_at = time.monotonic()
        held.held_s, self._held_s = self.busy_s - self._held_s, self.busy_s
        self._let_go.append((weakref.ref(held), held.cost.bytes))
        self._let_go_bytes += held.cost.bytes
        return held

    def _has_room(self) -> bool:
        """Whether what was let go and not taken yet is less than can be worked on."""
        while self._let_go:
            first, nbytes = self._let_go[0]
            held = first()
            if held is not None and not held.taken:
                break
            self._let_go.popleft()
            self._let_go_bytes -= nbytes
        return self._room is None or self._let_go_bytes < self._room()
