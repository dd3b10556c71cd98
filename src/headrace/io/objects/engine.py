"""ObjectEngine: reads ranges of objects for the native reader and for everybody else.

Owns one thread with an event loop, made when first needed and per process: a forked child makes its
own. It decides no depth: `turn` does. Registered objects are compared with what the store says at each
read (size, etag or modification time), so an object that was replaced is never taken for the old one.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import re
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from headrace.io.objects.faults import BUCKETS, Failure, RemoteStats
from headrace.io.objects.location import join
from headrace.io.objects.options import split_options
from headrace.io.objects.reading import Reading, RemoteObject, Wanted
from headrace.io.objects.transport import RangeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace._native import RemoteRequests
    from headrace.io.objects.transport import Found

_FAILURES_KEPT = 256
_CLOSE_S = 5.0
_FRESH_S = 5.0
"""A range that failed so short a time ago fails again without being asked for."""

# Loops inherited over a fork: their threads do not exist in the child, and destroying them there could
# touch what the parent still uses.
_inherited: list[Any] = []


class ObjectEngine(RangeEngine):
    """Reads ranges of objects.

    Args:
        storage_options: see docs/howto/object-stores.md.

    Attributes:
        policy: our part of the options.
        client_options: the client's part.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self.policy, self.client_options = split_options(self.storage_options)
        self._depth = self.policy.reads_in_flight
        self._tally = Tally()
        self._failures: deque[tuple[float, Failure]] = deque(maxlen=_FAILURES_KEPT)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._loop: _Loop | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.storage_options, list(self._known.values()), self.looked_at)

    def joined_with(self, others: Iterable[ObjectEngine]) -> ObjectEngine:
        """A new engine with the same options that knows what all of these know."""
        engines = [self, *others]
        known = [each for engine in engines for each in engine._known.values()]  # noqa: SLF001 - its own kind
        return _rebuild(self.storage_options, known, set().union(*(e.looked_at for e in engines)))

    @property
    def native(self) -> object:
        """What the native reader reads with: this engine itself."""
        return self

    @staticmethod
    def place(folder: str, name: str) -> str:
        """The URL of the file `name` of the store at `folder`."""
        return join(folder, name)

    def read(self, requests: RemoteRequests) -> None:
        """Begins a batch of reads for the native reader and returns."""
        if self._closed:
            for i in range(requests.count):  # a reader that outlives its store
                requests.finish(i, 0, errno.ECANCELED)
            return
        offsets = requests.offsets.tolist()
        wanted = [_wanted(self, requests, i, at) for i, at in enumerate(offsets)]
        self._running().submit([w for w in wanted if not self._failed_just_now(w)])

    def turn(self, reads_in_flight: int) -> None:
        """Sets how many requests are in flight at once, from now on.

        Raises:
            ValueError: it is less than 1.
        """
        if reads_in_flight < 1:
            raise ValueError(f"reads_in_flight is {reads_in_flight}, expected 1 or more")
        self._depth = reads_in_flight
        with self._lock:
            loop = self._loop if self._pid == os.getpid() else None
        if loop is not None:
            loop.turn(reads_in_flight)

    @property
    def reads_in_flight(self) -> int:
        """The depth that is set."""
        return self._depth

    def fetch_many(
        self, ranges: list[tuple[str, int, memoryview]], *, exact: bool = True
    ) -> list[Found | Failure]:
        """Reads many ranges at once and waits for all of them; failures are returned."""
        return [future.result() for future in self.start(ranges, exact=exact)]

    def start(
        self, ranges: list[tuple[str, int, memoryview]], *, exact: bool = True
    ) -> list[Future[Found | Failure]]:
        """Begins to read many ranges; each ends by its deadline, once its turn has come."""
        waiting: list[Future[Found | Failure]] = []
        wanted = []
        for url, offset, dest in ranges:
            future: Future[Found | Failure] = Future()
            waiting.append(future)
            wanted.append(Wanted(url, offset, dest, self._noting(future.set_result), exact))
        self._running().submit(wanted)
        return waiting

    def reason_of(self, failure: Mapping[str, Any]) -> Failure | None:
        """More about a read that the native reader could not do, as it reports it."""
        return self.why(os.fsdecode(failure["path"]), int(failure["offset"]))

    def why(self, url: str, offset: int) -> Failure | None:
        """The last failure of a read that covered this byte."""
        found = self._last_failure(url, offset)
        return None if found is None else found[1]

    def _last_failure(self, url: str, offset: int) -> tuple[float, Failure] | None:
        for at_s, failure in reversed(tuple(self._failures)):
            if failure.url == url and failure.offset <= offset < failure.offset + failure.length:
                return at_s, failure
        return None

    def _failed_just_now(self, wanted: Wanted) -> bool:
        """Finishes a read of what has just been given up.

        The native reader tries each sample of a failed range once more. Our range was tried until its
        deadline already: to do that again for every sample would multiply the deadline by their number.
        """
        found = self._last_failure(wanted.url, wanted.offset)
        if found is None or time.monotonic() - found[0] > _FRESH_S:
            return False
        wanted.done(found[1])
        return True

    def stats(self) -> RemoteStats:
        """What this engine did in this process."""
        with self._lock:
            reading = None if self._loop is None or self._pid != os.getpid() else self._loop.reading
        if reading is None:
            return self._tally.stats(in_flight=0, waiting=0)
        return self._tally.stats(in_flight=reading.in_flight, waiting=reading.waiting)

    def close(self) -> None:
        """Ends the thread; reads that are not done fail, and so do the native reader's later ones."""
        self._closed = True
        with self._lock:
            loop, self._loop = self._loop, None
            if self._pid != os.getpid():
                _inherited.append(loop)
                loop = None
        if loop is not None:
            loop.close()

    def __del__(self) -> None:
        # A half-made engine has no lock, one in a forked child no thread to end, and when the interpreter
        # ends its threads have stood still before.
        if getattr(self, "_loop", None) is not None and not sys.is_finalizing():
            self.close()

    def _running(self) -> _Loop:
        if self._pid != os.getpid():
            _inherited.append((self._loop, self._lock))
            self._lock, self._loop, self._pid = threading.Lock(), None, os.getpid()
            self._tally = Tally()
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._loop = _Loop(
                    loop,
                    Reading(self.policy, self.client_options, self._known, self._tally, loop),
                )
                self._loop.turn(self._depth)
            return self._loop

    def _noting(self, done: Callable[[Found | Failure], None]) -> Callable[[Found | Failure], None]:
        def note(outcome: Found | Failure) -> None:
            # What is told a second time (`_failed_just_now`) is no newer for it.
            again = any(outcome is failure for _, failure in tuple(self._failures))
            if isinstance(outcome, Failure) and not again:
                self._failures.append((time.monotonic(), outcome))
            done(outcome)

        return note


def _wanted(engine: ObjectEngine, requests: RemoteRequests, i: int, offset: int) -> Wanted:
    def finish(outcome: Found | Failure) -> None:
        if isinstance(outcome, Failure):
            requests.finish(i, 0, outcome.errno)
        else:
            requests.finish(i, outcome.count, 0)

    url = os.fsdecode(requests.path(i))
    return Wanted(url, offset, requests.dest(i), engine._noting(finish))  # noqa: SLF001 - its own other half


def _rebuild(
    options: dict[str, Any], objects: list[RemoteObject], looked_at: set[str]
) -> ObjectEngine:
    engine = ObjectEngine(options)
    engine.register(objects)
    engine.looked_at |= looked_at
    return engine


class _Loop:
    """The thread and its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reading: Reading) -> None:
        self.reading = reading
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="headrace-objects", daemon=True)
        self._thread.start()

    def submit(self, wanted: list[Wanted]) -> None:
        self._loop.call_soon_threadsafe(self.reading.add, wanted)

    def turn(self, depth: int) -> None:
        def set_depth() -> None:
            self.reading.depth = depth
            self.reading.pump()

        self._loop.call_soon_threadsafe(set_depth)

    def close(self) -> None:
        if self._thread is threading.current_thread():
            self._loop.stop()  # the last reference went on our own thread
            return
        try:
            asyncio.run_coroutine_threadsafe(self.reading.close(), self._loop).result(_CLOSE_S)
        except TimeoutError:
            _inherited.append(self)  # a blocked transport: left behind rather than waited for
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


class Tally:
    """Counts; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._latency = [0] * BUCKETS

    def add(self, name: str, number: int = 1) -> None:
        """Adds to one of `RemoteStats`' counters."""
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

    def stats(self, *, in_flight: int, waiting: int) -> RemoteStats:
        """The numbers as they are now."""
        with self._lock:
            return RemoteStats(
                **self._counts, faults=dict(self._faults), in_flight=in_flight, waiting=waiting,
                latency_us=tuple(self._latency),
            )  # fmt: skip
