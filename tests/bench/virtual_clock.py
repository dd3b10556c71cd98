"""A virtual clock for the step loops: batches' arrivals are computed, and no busy machine disturbs them."""

import heapq
import itertools
from collections import deque

from headrace.bench.loop import Arrival


class VirtualClock:
    """A clock that only moves when everybody waits."""

    def __init__(self):
        self._now_s = 0.0
        self._coming, self._count = [], itertools.count()

    def now(self):
        return self._now_s

    def take(self, _inbox, wait_s):
        """The next arrival, with the clock moved to it, or to the end of the wait."""
        if self._coming and self._coming[0][0] <= self._now_s + wait_s:
            at_s, _, arrival = heapq.heappop(self._coming)
            self._now_s = max(self._now_s, at_s)
            return arrival
        self._now_s += wait_s
        return None

    def feeder(self, number, source, _inbox):
        return VirtualFeeder(self, number, source)

    def expect(self, arrival):
        heapq.heappush(self._coming, (arrival.at_s, next(self._count), arrival))


class VirtualFeeder:
    def __init__(self, clock, number, source):
        self._clock, self._number, self._source = clock, number, source

    def poll(self):
        return None

    def permit(self):
        asked_s = self._clock.now()
        at_s, batch = self._source.ready(asked_s)
        self._clock.expect(Arrival(self._number, asked_s, batch, None, at_s))

    def close(self, *, keep=False):
        pass


class ModelSource:
    """Batches of equal files on a simulated storage, read ahead as the native engine does."""

    def __init__(self, model, clock, *, batches, ahead, files, file_bytes, delivered):
        self._model, self._clock, self._left, self._ahead = model, clock, batches, ahead
        self._files, self._file_bytes, self._delivered = files, file_bytes, delivered
        self._ready = deque()

    def ask(self):
        if len(self._ready) == self._ahead or not self._left:
            return False
        now_ns = round(self._clock.now() * 1e9)
        done = [self._model.admit(now_ns, self._file_bytes)[0] for _ in range(self._files)]
        self._ready.append(max(done) / 1e9)
        self._left -= 1
        return True

    def ready(self, asked_s):
        while self.ask():
            pass
        return max(asked_s, self._ready.popleft()), self._delivered
