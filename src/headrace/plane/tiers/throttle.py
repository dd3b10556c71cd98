"""Throttle: keeps reads of a shared file system below a rate of bytes and of reads.

It holds requests back, in order, and lets each go when its buckets are not in debt; one thread sleeps
until then. Without a limit it passes requests straight on and has no thread. What comes out of the
page cache costs the file system nothing and is paid back. No more is let go than can be worked on: a
limit that is lowered holds from then on, not only for what is asked for later.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, VolumeTimeout
from headrace.plane.stage import StageStats
from headrace.plane.tiers.bucket import TokenBucket
from headrace.plane.tiers.reads_over import ReadsOver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from headrace import _native
    from headrace.plane.tiers.reads import PendingReads, Reads

    BytesOf = Callable[[NDArray[np.int64]], int]

__all__ = ["Throttle"]

_SIGNAL_CHECK_S = 0.2

_GIVEN_UP_CHECK_S = 0.05
"""Nobody says when a request that was let go is dropped and not taken."""


class Throttle(ReadsOver):
    """Limits the rate of what is read below it.

    Args:
        below: what reads.
        bytes_of: bytes of the samples with these indices.
        bytes_per_s: limit; None for none.
        reads_per_s: limit of reads, one per sample unless they were read together; None for none.
        deadline_s: how long a request may be held back without any being let go.
        room: bytes that what reads can work on at a time; None: no end.
    """

    name = "throttle"

    def __init__(
        self,
        below: Reads,
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
        """Set both limits, from now on; None for none.

        Raises:
            ValueError: a limit is not positive.
        """
        for name, value in (("bytes_per_s", bytes_per_s), ("reads_per_s", reads_per_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, expected more than 0, or None for no limit")
        self._gate.limit(bytes_per_s, reads_per_s)

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
        return self._gate.stats()

    def knobs(self) -> Mapping[str, int]:
        """The limits that are set."""
        found = {"bytes_per_s": self._gate.bytes.rate, "reads_per_s": self._gate.reads.rate}
        return {name: int(rate) for name, rate in found.items() if rate is not None}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set `bytes_per_s` or `reads_per_s`; the other stays.

        Raises:
            ValueError: a value is not positive.
        """
        self.limit(
            bytes_per_s=knobs.get("bytes_per_s", self._gate.bytes.rate),
            reads_per_s=knobs.get("reads_per_s", self._gate.reads.rate),
        )


class _Held:
    """A request that waits for its turn, then for its bytes."""

    def __init__(self, gate: _Gate, indices: NDArray[np.int64], cost: tuple[int, int]) -> None:
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
    """Queue, buckets and thread; apart from `Throttle`, so that dropping that one ends this."""

    def __init__(
        self,
        below: Reads,
        bytes_of: BytesOf,
        deadline_s: float,
        room: Callable[[], int] | None,
    ) -> None:
        now = time.monotonic()
        self.bytes = TokenBucket(None, now)
        self.reads = TokenBucket(None, now)
        self._below = below
        self._bytes_of = bytes_of
        self._deadline_s = deadline_s
        self._room = room
        self._held: deque[_Held] = deque()
        self._let_go: deque[tuple[weakref.ref[_Held], int]] = deque()
        self._let_go_bytes = 0
        self._awaited = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()
        self._let_go_at = now
        self._samples = self._passed_bytes = self._passed_reads = 0
        self.busy_s = self._held_s = 0.0

    def limit(self, bytes_per_s: float | None, reads_per_s: float | None) -> None:
        now = time.monotonic()
        with self._changed:
            self.bytes.set_rate(bytes_per_s, now)
            self.reads.set_rate(reads_per_s, now)
            self._changed.notify_all()

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        if self.bytes.rate is None and self.reads.rate is None and not self._held:
            return self._below.submit(indices)
        held = _Held(self, indices, (self._bytes_of(indices), len(indices)))
        with self._changed:
            self._stopping = False
            if self._thread is None:
                self._let_go_at = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="headrace-throttle")
                self._thread.daemon = True
                self._thread.start()
            self._held.append(held)
            self._changed.notify_all()
        return held

    def stop(self) -> None:
        if os.getpid() != self._pid:
            return  # a thread that does not exist here may hold the lock
        with self._changed:
            self._stopping = True
            while self._held:
                self._refuse(self._held.popleft())
            self._changed.notify_all()

    def await_one(self, held: _Held) -> None:
        """Wait until it is let go. Whoever waits is not kept waiting for want of room."""
        with self._changed:
            self._awaited += 1
            self._changed.notify_all()
        try:
            while not held.began.wait(_SIGNAL_CHECK_S):
                self.check_deadline()
        finally:
            with self._changed:
                self._awaited -= 1

    def check_deadline(self) -> None:
        idle_s = time.monotonic() - self._let_go_at
        if idle_s > self._deadline_s:
            raise VolumeTimeout(
                f"a batch was held back for {idle_s:.0f} s by the limits {self.bytes.rate} bytes "
                f"and {self.reads.rate} reads per second.",
                next_step="Give larger limits, or a larger deadline_s.",
            )

    def settle(self, cost: tuple[int, int], batch: _native.Batch) -> None:
        """Pay back what did not have to be read."""
        stats = batch.stats
        read = stats["direct_reads"] + stats["buffered_reads"] + stats["opened_files"]
        with self._changed:
            self.bytes.spend(min(0, stats["bytes_read"] - cost[0]))
            self.reads.spend(min(0, read - cost[1]))
            self._passed_bytes += int(batch.lengths.sum())
            self._passed_reads += read
            self._changed.notify_all()

    def stats(self) -> StageStats:
        with self._changed:
            return StageStats(
                name="throttle",
                busy_s=self.busy_s,
                samples=self._samples,
                bytes=self._passed_bytes,
                reads=self._passed_reads,
                in_flight=len(self._held),
            )

    @staticmethod
    def _refuse(held: _Held) -> None:
        held.error = VolumeTimeout("the loader was closed while a batch was held back.")
        held.began.set()

    def _wait_s(self) -> float:
        now = time.monotonic()
        return max(self.bytes.wait_s(now), self.reads.wait_s(now))

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
        with self._changed:
            while not self._stopping:
                if not self._held:
                    self._changed.wait()
                    continue
                wait_s = self._wait_s()
                if wait_s > 0.0:
                    began = time.monotonic()
                    self._changed.wait(wait_s)
                    self.busy_s += time.monotonic() - began
                elif not self._awaited and not self._has_room():
                    self._changed.wait(_GIVEN_UP_CHECK_S)
                else:
                    return self._first()
            self._thread = None
            return None

    def _first(self) -> _Held:
        held = self._held.popleft()
        self.bytes.spend(held.cost[0])
        self.reads.spend(held.cost[1])
        self._samples += len(held.indices)
        self._let_go_at = time.monotonic()
        held.held_s, self._held_s = self.busy_s - self._held_s, self.busy_s
        self._let_go.append((weakref.ref(held), held.cost[0]))
        self._let_go_bytes += held.cost[0]
        return held

    def _has_room(self) -> bool:
        """Whether what was let go and not taken yet is less than can be worked on."""
        while self._let_go:
            first, cost = self._let_go[0]
            held = first()
            if held is not None and not held.taken:
                break
            self._let_go.popleft()
            self._let_go_bytes -= cost
        return self._room is None or self._let_go_bytes < self._room()
