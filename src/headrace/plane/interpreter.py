"""Interpreter: how contended this process's interpreter lock is while batches are delivered.

A thread looks fifty times a second: it sleeps without the lock, asks for it, and counts how long that took.
It starts with the first delivery, and ends when whoever delivered is gone or there were none for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import threading
import time
import weakref
from typing import Final, NamedTuple

from headrace import _native

PERIOD_S: Final = 0.02

QUIET_S: Final = 2.0  # after so long without a delivery it looks no more
PAUSE_NS: Final = 2_000_000
"""Long enough for another thread to take the lock, if one wants it, on busy processors too."""

RECENT_S: Final = 0.5

CONTENDED_NS: Final = 300_000
"""Whoever waited so long waited for code that does not let go of the lock by itself."""


class Contention(NamedTuple):
    """What was seen so far; only grows."""

    looks: int = 0
    contended: int = 0  # looks at which somebody else held the lock, and kept it
    waited_s: float = 0.0  # for the lock, over all looks
    others_s: float = 0.0
    """Processor time of Python threads that are not headrace's, while the lock was contended."""

    def since(self, before: Contention) -> Contention:
        """What was seen between two moments; nothing if it began anew."""
        if self.looks < before.looks:
            return self
        return Contention(
            self.looks - before.looks,
            max(0, self.contended - before.contended),
            max(0.0, self.waited_s - before.waited_s),
            max(0.0, self.others_s - before.others_s),
        )

    @property
    def share(self) -> float:
        """Of the looks, those at which the lock was held; 0.0 before there were any."""
        return self.contended / self.looks if self.looks else 0.0


class _Watch:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: in a forked child there is no thread."""
        self.seen = Contention()
        self.delivered_s = 0.0
        self.maker = 0
        self.thread: threading.Thread | None = None
        self._owners: weakref.WeakSet[object] = weakref.WeakSet()
        self._computed: tuple[float, dict[int, float]] = (0.0, {})
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def begin(self, owner: object) -> None:
        with self._lock:
            self._owners.add(owner)
            if self.thread is None and not self._ending.is_set():
                self.thread = threading.Thread(
                    target=self._run, name="headrace-interpreter", daemon=True
                )
                self.thread.start()

    def stop(self) -> None:
        """End the thread before the interpreter does."""
        self._ending.set()
        thread = self.thread
        if thread is not None:
            thread.join(1.0)

    def _run(self) -> None:
        while not self._ending.wait(PERIOD_S):
            if not self._owners or time.perf_counter() - self.delivered_s > QUIET_S:
                break
            waited_ns = _native.lock_wait_ns(PAUSE_NS)
            looks, contended, waited_s, others_s = self.seen
            if waited_ns > CONTENDED_NS:
                contended += 1
                others_s += self._others_s()
            self.seen = Contention(looks + 1, contended, waited_s + waited_ns * 1e-9, others_s)
        with self._lock:
            self.thread = None

    def _others_s(self) -> float:
        """What others have computed since the last look like this one, if that was not long ago."""
        now_s = time.perf_counter()
        then_s, before = self._computed
        computed: dict[int, float] = {}
        for thread in threading.enumerate():
            number = thread.native_id
            if number in {None, self.maker} or thread.name.startswith("headrace"):
                continue
            # By its number: the clock of a thread that has just ended must not be asked for by its handle.
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                io.open_code(f"/proc/self/task/{number}/schedstat") as f,
            ):
                computed[number] = int(f.read().split()[0]) * 1e-9
        self._computed = now_s, computed
        if now_s - then_s > RECENT_S:
            return 0.0
        return sum(max(0.0, s - before[each]) for each, s in computed.items() if each in before)


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.reset)
atexit.register(_watch.stop)


def delivered(now_s: float, owner: object, *, made_here: bool = False) -> None:
    """A batch was delivered at `now_s` (monotonic): it is worth while to look.

    Whoever counts deliveries is held weakly, and nobody looks for its sake when it is gone. A thread that makes
    its batches itself is none of the others.
    """
    _watch.delivered_s = now_s
    _watch.maker = threading.get_native_id() if made_here else 0
    if _watch.thread is None:
        _watch.begin(owner)


def contention() -> Contention:
    """What was seen in this process so far."""
    return _watch.seen
