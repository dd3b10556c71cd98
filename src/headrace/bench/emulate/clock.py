"""Clocks: the machine's, on which batches come when they come, and a virtual one, on which they are computed.

On a virtual clock a run takes no time and says the same on every machine: what a storage model would allow,
and a test of the loops that no busy machine can disturb.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from queue import Empty
from typing import TYPE_CHECKING, Any, Protocol

from headrace.bench.emulate.feeder import Arrival, Feeder

if TYPE_CHECKING:
    from queue import SimpleQueue

    from headrace._native import SlowModel
    from headrace.bench.emulate.engines.base import Delivered, Source

__all__ = ["Clock", "Feeding", "ModelSource", "RealClock", "TimedSource", "VirtualClock"]


class Feeding(Protocol):
    """What a loop asks of a feeder."""

    def poll(self) -> Arrival | None:
        """The next batch if it is there."""
        ...

    def permit(self) -> None:
        """Let it wait for one more batch."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Clock(Protocol):
    """What a loop asks of a clock."""

    def now(self) -> float:
        """Seconds."""
        ...

    def take(self, inbox: SimpleQueue[Arrival], wait_s: float) -> Arrival | None:
        """The next arrival within `wait_s`."""
        ...

    def feeder(self, number: int, source: Any, inbox: SimpleQueue[Arrival]) -> Feeding:
        """Begin to feed an accelerator."""
        ...


class RealClock:
    """The machine's clock; feeders are threads."""

    now = staticmethod(time.perf_counter)

    def take(self, inbox: SimpleQueue[Arrival], wait_s: float) -> Arrival | None:
        """Wait for the next arrival."""
        try:
            return inbox.get(timeout=wait_s) if wait_s > 0 else inbox.get_nowait()
        except Empty:
            return None

    def feeder(self, number: int, source: Source, inbox: SimpleQueue[Arrival]) -> Feeder:
        """A thread that waits for the source."""
        return Feeder(number, source, inbox)


class TimedSource(Protocol):
    """Batches whose arrival is computed."""

    def ready(self, asked_s: float) -> tuple[float, Delivered]:
        """When the next batch is there if it is asked for at `asked_s`."""
        ...


class VirtualClock:
    """A clock that only moves when everybody waits."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._coming: list[tuple[float, int, Arrival]] = []
        self._count = 0

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s

    def take(self, inbox: SimpleQueue[Arrival], wait_s: float) -> Arrival | None:  # noqa: ARG002
        """The next arrival, with the clock moved to it, or to the end of the wait."""
        if self._coming and self._coming[0][0] <= self._now_s + wait_s:
            at_s, _, arrival = heapq.heappop(self._coming)
            self._now_s = max(self._now_s, at_s)
            return arrival
        self._now_s += wait_s
        return None

    def feeder(
        self,
        number: int,
        source: TimedSource,
        inbox: SimpleQueue[Arrival],  # noqa: ARG002
    ) -> _VirtualFeeder:
        """A feeder that computes."""
        return _VirtualFeeder(self, number, source)

    def expect(self, arrival: Arrival) -> None:
        """Let an arrival come at its time."""
        self._count += 1
        heapq.heappush(self._coming, (arrival.at_s, self._count, arrival))


class _VirtualFeeder:
    def __init__(self, clock: VirtualClock, number: int, source: TimedSource) -> None:
        self._clock = clock
        self._number = number
        self._source = source

    def poll(self) -> None:
        return None

    def permit(self) -> None:
        asked_s = self._clock.now()
        at_s, batch = self._source.ready(asked_s)
        self._clock.expect(Arrival(self._number, asked_s, batch, None, at_s))

    def close(self) -> None:
        pass


class ModelSource:
    """Batches of equal files on a simulated storage, read ahead as the native engine does.

    Args:
        model: the storage, which all accelerators share.
        clock: says when batches are asked for.
        batches: of the epoch.
        ahead: how many are read ahead.
        files: of a batch, each of `file_bytes`.
        delivered: what is told of each batch.
    """

    def __init__(
        self,
        model: SlowModel,
        clock: VirtualClock,
        *,
        batches: int,
        ahead: int,
        files: int,
        file_bytes: int,
        delivered: Delivered,
    ) -> None:
        self._model = model
        self._left = batches
        self._ahead = ahead
        self._files = files
        self._file_bytes = file_bytes
        self._delivered = delivered
        self._clock = clock
        self._ready: deque[float] = deque()

    def ask(self) -> bool:
        """Ask for one batch more of those that are read ahead; False when all are asked for."""
        if len(self._ready) == self._ahead or not self._left:
            return False
        now_ns = round(self._clock.now() * 1e9)
        done = [self._model.admit(now_ns, self._file_bytes)[0] for _ in range(self._files)]
        self._ready.append(max(done) / 1e9)
        self._left -= 1
        return True

    def ready(self, asked_s: float) -> tuple[float, Delivered]:
        """When the oldest batch that was asked for is there; one more is asked for."""
        while self.ask():
            pass
        return max(asked_s, self._ready.popleft()), self._delivered
