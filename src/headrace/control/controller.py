"""Controller: one thread per process that looks at every plane and turns its knobs.

It holds planes weakly: a plane whose stages are gone is dropped, and the thread ends when none is
left. It decides nothing: `propose` does. A forked child has none of its parent's threads; there the
first `tune` or `wake` starts another. It must never harm a training run: what goes wrong in a look at a plane
is logged once and ends the tuning of that plane, whose knobs stay where they are.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from headrace.control.limits import read_limits
from headrace.control.plane import Plane
from headrace.control.publishing import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.control.limits import Limits
    from headrace.plane.stage import ConsumerStats, Stage

__all__ = ["TuningHandle", "planes", "tune"]

LOG = logging.getLogger("headrace.control")

PERIOD_S: Final = 0.1
"""Between two looks: several happen within the second in which a change should have been answered."""

LIMITS_EVERY_S: Final = 1.0
"""Memory pressure builds up over seconds; reading the limits costs half a millisecond."""

CALM_TICKS: Final = 3
"""A plane at which nothing has had to be done for a while is looked at every third time."""

IDLE_TICKS: Final = 10
"""A plane whose consumer has not shown up for a while is looked at once a second."""

CLOSED_KEPT: Final = 8
"""Planes that are gone and still can be explained."""


class TuningHandle:
    """The tuning of one plane. Keep it as long as the plane; the planes' owner drops both together."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    @property
    def plane(self) -> Plane:
        """What is known about the plane."""
        return self._plane

    def wake(self) -> None:
        """Make sure that somebody looks, in this process."""
        _controller.watch(self._plane)

    def rested(self) -> None:
        """A pass has ended: what is known of it may be gone soon."""
        _controller.rested(self._plane)

    def close(self) -> None:
        """Look no more; the knobs stay where they are, and `explain` still knows the plane."""
        _controller.forget(self._plane)


class _Controller:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: in a forked child neither the thread nor the lock's owner exists."""
        # The collector may drop a loader, and close its plane, in the midst of what is locked here.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._planes: list[Plane] = []
        self._closed: list[Plane] = []
        # None: nobody is told, because that failed or is not wanted. A child tells only of what it does.
        tell = os.environ.get("HEADRACE_TELL", "1") != "0"
        self._publisher = Publisher(forked=hasattr(self, "_publisher")) if tell else None

    def watch(self, plane: Plane) -> None:
        with self._lock:
            if plane not in self._planes:
                self._planes.append(plane)
                if plane in self._closed:
                    self._closed.remove(plane)
            if self._thread is None:
                self._ending.clear()
                self._thread = threading.Thread(
                    target=self._run, name="headrace-control", daemon=True
                )
                self._thread.start()

    def forget(self, plane: Plane) -> None:
        with self._lock:
            self._drop(plane)

    def _drop(self, plane: Plane) -> None:
        if plane in self._planes:
            self._planes.remove(plane)
            plane.end()
            self.tell([plane])
            self._closed = [*self._closed[-(CLOSED_KEPT - 1) :], plane]

    def stop(self) -> None:
        """End the thread before the interpreter does."""
        self._ending.set()
        thread = self._thread
        if thread is not None:
            thread.join(1.0)
        self.tell([*self._planes, *self._closed], ended=True)

    def tell(self, planes: Sequence[Plane], *, ended: bool = False) -> None:
        """Tell the node's agents how planes fare, now."""
        self._publish(lambda publisher: publisher.tell(planes, ended=ended))

    def rested(self, plane: Plane) -> None:
        """Tell the node's agents of a pass that has ended, now or soon."""
        self._publish(lambda publisher: publisher.rested(plane))

    def _publish(self, act: Callable[[Publisher], None]) -> None:
        publisher = self._publisher
        try:
            if publisher is not None:
                act(publisher)
        except Exception:
            LOG.exception("agents are told no more how this process fares")
            self._publisher = None

    def _tell_in_time(self, planes: Sequence[Plane], now: float) -> None:
        publisher = self._publisher
        if publisher is not None and publisher.due(now):
            self.tell(planes)

    def all(self) -> tuple[list[Plane], list[Plane]]:
        with self._lock:
            return list(self._planes), list(self._closed)

    def _run(self) -> None:
        limits_at, ticks = 0.0, 0
        while not self._ending.wait(PERIOD_S):
            with self._lock:
                for plane in [each for each in self._planes if each.gone]:
                    self._drop(plane)
                if not self._planes:
                    self._thread = None
                    return
                planes = list(self._planes)
            now = time.monotonic()
            look_at_limits = now - limits_at >= LIMITS_EVERY_S
            if look_at_limits:
                limits_at = now
            ticks += 1
            for plane in planes:
                if ticks % (IDLE_TICKS if plane.idle else CALM_TICKS if plane.calm else 1):
                    continue
                self._look(plane, len(planes), look_at_limits=look_at_limits)
            self._tell_in_time(planes, now)

    def _look(self, plane: Plane, count: int, *, look_at_limits: bool) -> None:
        try:
            if look_at_limits:
                plane.refresh_limits(count)
            plane.step()
        except Exception:
            LOG.exception("%s: tuning ends, the knobs stay where they are", plane.name)
            self.forget(plane)


_controller = _Controller()
os.register_at_fork(after_in_child=_controller.reset)
atexit.register(_controller.stop)


def tune(
    name: str,
    stages: Sequence[Stage] | Callable[[], Sequence[Stage]],
    consumer: Callable[[], ConsumerStats],
    limits: Callable[[int], Limits] | None = None,
    frozen: Iterable[str] = (),
    *,
    memory_bytes: int | None = None,
    enabled: bool = True,
    source: str = "",
) -> TuningHandle:
    """Watch a plane and turn its knobs as its consumer needs.

    Args:
        name: what logs and `explain` call it.
        stages: its stages, or what gives those there are now. Held weakly, as is what a bound
            method belongs to: who owns them keeps them, and the handle.
        consumer: gives what its consumer did so far.
        limits: gives the limits, from the bytes that the plane holds; by default `read_limits`.
        frozen: knobs that somebody set on purpose: they stay.
        memory_bytes: what all buffers may take together, see `read_limits`.
        enabled: False: only watch, so that `explain` can tell.
        source: path or URL of what is read, for those who ask which file system that is.

    Returns:
        The handle: tuning goes on until it is closed or the stages are gone.
    """

    def found(held_bytes: int) -> Limits:
        return read_limits(memory_bytes=memory_bytes, held_bytes=held_bytes)

    plane = Plane(name, stages, consumer, limits or found, frozen, enabled=enabled, source=source)
    return TuningHandle(plane)


def planes() -> tuple[list[Plane], list[Plane]]:
    """The planes of this process: those at work, and some that have ended."""
    return _controller.all()
