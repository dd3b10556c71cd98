"""Controller: one thread per process that watches every plane and turns its knobs.

It reads the stages' statistics every tenth of a second, makes intervals of them, and asks `propose`
where the knobs should stand; it decides nothing itself. Planes are held weakly: a plane whose stages
are gone is dropped, and the thread ends when none is left. A forked child has none of its parent's
threads; there the first `tune` or `wake` starts another. It must never harm a training run: an error
is logged once and ends the tuning of that plane, whose knobs stay where they are.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import ismethod
from typing import TYPE_CHECKING, Any, Final

from headrace.control.history import Knobs, PlaneHistory, PlaneInterval, PlaneReading, PlaneWindow
from headrace.control.knob_limits import read_limits
from headrace.plane.stage import KNOBS, LATENCY_BUCKETS, ConsumerStats, StageStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.control.knob_limits import Limits
    from headrace.control.publishing import Publisher
    from headrace.control.tuner import KnobDecision
    from headrace.plane.loader import Loader
    from headrace.plane.stage import Stage

LOG = logging.getLogger("headrace.control")

CHANGES_KEPT = 200
CALM_AFTER = 50
IDLE_AFTER = 20
INTERVAL_MIN_S = 0.02
INTERVAL_MAX_S = 5.0
"""After a longer silence (a suspended process, an epoch's end) a reading is a new beginning."""


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that turned knobs, or kept or took back what was turned."""

    at_s: float  # seconds since the plane was first watched
    action: str
    before: Knobs
    after: Knobs
    reason: str
    evidence: str

    def turned(self) -> str:
        """What was turned, in words; ''."""
        return ", ".join(
            f"{name} {getattr(self.before, name)} -> {value}"
            for name, value in self.after.changes_from(self.before).items()
        )


EPOCH_LOG = logging.getLogger("headrace.epoch")


def wants_epochs() -> tuple[bool, bool]:
    """Whether somebody wants a line about each epoch: on standard error, in the log."""
    on_stderr = os.environ.get("HEADRACE_VERDICT", "0") not in ("", "0")
    return on_stderr, EPOCH_LOG.isEnabledFor(logging.INFO)


class PassEnded:
    """Called when a pass of a loader has ended: tells whoever tunes it, and people who want to know."""

    def __init__(self, tuning: Plane, loader: Loader) -> None:
        self._tuning = tuning
        self._loader = weakref.ref(loader)
        self._seen = 0
        # Its own: an iterator may rest after all names of this module are gone.
        self._is_finalizing = sys.is_finalizing

    def __call__(self) -> None:
        """A pass has ended. At the interpreter's end, all has been said."""
        if self._is_finalizing():
            return
        self._tuning.rested()
        loader = self._loader()
        if loader is not None and any(wants_epochs()):
            from headrace.control.stalls.live import tell_epoch

            self._seen = tell_epoch(loader, self._seen, self._tuning.changes)


def _weakly(function: Callable[[], Any]) -> Callable[[], Callable[[], Any] | None]:
    """The function, without keeping alive what it is bound to."""
    return weakref.WeakMethod(function) if ismethod(function) else lambda: function


def _alive(refs: Sequence[weakref.ref[Stage]]) -> Sequence[Stage] | None:
    stages = [stage for ref in refs if (stage := ref()) is not None]
    return stages if len(stages) == len(refs) else None


class Plane:
    """A plane under watch, whose knobs are turned as its consumer needs.

    Its owner keeps it, and drops both together. Once it is woken, tuning goes on until it is closed or the
    stages are gone.

    Args:
        name: what logs and `explain` call it.
        stages: its stages, or what gives those there are now. Held weakly, as is what a bound
            method belongs to: who owns them keeps them, and the plane.
        consumer: gives what its consumer did so far.
        limits: gives the limits, from the bytes that the plane holds; by default `read_limits`.
        frozen: knobs that somebody set on purpose: they stay.
        memory_bytes: what all buffers may take together, see `read_limits`.
        enabled: False, as HEADRACE_TUNE=0 is in the environment: only watch, so that `explain` can tell.
        source: path or URL of what is read, for those who ask which file system that is.
        published: False: agents are told of its consumers by somebody else.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage] | Callable[[], Sequence[Stage]],
        consumer: Callable[[], ConsumerStats],
        limits: Callable[[int], Limits] | None = None,
        frozen: Iterable[str] = (),
        *,
        memory_bytes: int | None = None,
        enabled: bool = True,
        source: str = "",
        published: bool = True,
    ) -> None:
        self.published = published
        self.name = name
        self.source = source
        self.enabled = enabled and os.environ.get("HEADRACE_TUNE", "1") != "0"
        self.ended = False
        self.frozen = tuple(frozen)
        self.changes: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self.history = PlaneHistory()
        self.action = self.reason = ""
        self._held = 0  # decisions in a row that changed nothing
        self._silent = 0  # looks in a row at which nothing had happened
        if callable(stages):
            self._find_stages = _weakly(stages)
        else:
            self._find_stages = _weakly(partial(_alive, [weakref.ref(stage) for stage in stages]))
        self._find_consumer = _weakly(consumer)
        self._find_limits = limits or (
            lambda held: read_limits(memory_bytes=memory_bytes, held_bytes=held)
        )
        self.started = time.monotonic()
        self._reading = self._read()
        self.knobs = self._current()
        self.refresh_limits(1)

    @property
    def gone(self) -> bool:
        """Whether a stage or the consumer exists no more."""
        return self._find_consumer() is None or self._stages_now() is None

    @property
    def calm(self) -> bool:
        """Whether nothing has had to be done for some seconds."""
        return self._held >= CALM_AFTER

    @property
    def idle(self) -> bool:
        """Whether nothing was read or delivered for some seconds: an epoch's end, or validation."""
        return self._silent >= IDLE_AFTER

    @property
    def stages(self) -> Sequence[StageStats]:
        """What the stages published at the last look."""
        return self._reading.stages if self._reading else ()

    @property
    def consumer(self) -> ConsumerStats:
        """What the consumer had done at the last look."""
        return self._reading.consumer if self._reading else ConsumerStats()

    def now(self) -> PlaneReading | None:
        """What consumer and stages have done so far, asked now, and the steps; None: they are gone."""
        reading = self._read()
        steps = getattr(getattr(self._find_consumer(), "__self__", None), "steps", None)
        return None if reading is None else replace(reading, steps=steps)

    def window(self, seconds: float = 5.0) -> PlaneWindow:
        """The last seconds taken together."""
        return PlaneWindow.over(self.history.since(self.history.now_s - seconds))

    def wake(self) -> None:
        """Make sure that somebody looks, in this process."""
        _controller.watch(self)

    def rested(self) -> None:
        """A pass has ended: what is known of it may be gone soon."""
        _controller.publish(lambda publisher: publisher.rested(self))

    def close(self) -> None:
        """Look no more; the knobs stay where they are, and `explain` still knows the plane."""
        _controller.forget(self)

    def refresh_limits(self, planes: int) -> None:
        """Look again at what may be used, as one of several planes."""
        held = sum(stage.buffered_bytes for stage in self.stages)
        self.limits = self._find_limits(held).shared(planes).frozen(self.knobs, self.frozen)

    def end(self) -> None:
        """Remember the last figures."""
        self.ended = True
        with suppress(Exception):  # a stage that fails is perhaps why it ends
            self._look()

    def step(self) -> None:
        """Look once, and turn the knobs if the tuner says so."""
        interval = self._look()
        moved = interval is not None and (interval.reads or interval.batches)
        self._silent = 0 if moved else self._silent + 1
        if interval is None:
            return
        self.history = self.history.after(interval)
        if not self.enabled:
            return
        with _importing:
            from headrace.control.tuner import propose
        decision = propose(self.history, self.knobs, self.limits)
        self.history = self.history.remembering(decision.memory)
        self.action, self.reason = decision.action, decision.reason
        self._held = self._held + 1 if decision.reason == "steady" else 0
        if decision.action != "hold":
            self._record(decision)
        if turned := decision.knobs.changes_from(self.knobs):
            for stage in self._stages_now() or ():
                mine = {name: value for name, value in turned.items() if name in stage.knobs()}
                if mine:
                    stage.turn(mine)
            self.knobs = decision.knobs

    def _stages_now(self) -> Sequence[Stage] | None:
        """The stages; None when they are gone."""
        find = self._find_stages()
        return find() if find is not None else None

    def _record(self, decision: KnobDecision) -> None:
        at_s = time.monotonic() - self.started
        change = Change(
            at_s, decision.action, self.knobs, decision.knobs, decision.reason, decision.evidence
        )
        self.changes.append(change)
        action = f"{change.action} {change.turned()}".rstrip()
        LOG.info("%s: %s: %s (%s)", self.name, action, change.reason, change.evidence)

    def _look(self) -> PlaneInterval | None:
        """What happened since the last look; None when that was nothing, or no comparison."""
        before, now = self._reading, self._read()
        if now is None or before is None:
            return None
        seconds = now.at - before.at
        if seconds < INTERVAL_MIN_S:
            return None
        self._reading, self.knobs = now, self._current()  # somebody else may turn them
        return None if seconds > INTERVAL_MAX_S else _difference(before, now, self.knobs)

    def _read(self) -> PlaneReading | None:
        """The same without the steps, which live no longer than their loader."""
        consumer, stages = self._find_consumer(), self._stages_now()
        if consumer is None or stages is None:
            return None
        # Tiers read too, from what the first one has brought; only that one is tuned.
        readers = frozenset(stage.name for stage in stages if "reads_in_flight" in stage.knobs())
        published = tuple(stage.stats() for stage in stages)
        return PlaneReading(time.monotonic(), consumer(), published, readers)

    def _current(self) -> Knobs:
        values = dict[str, int]()
        for stage in self._stages_now() or ():
            values = {k: v for k, v in stage.knobs().items() if k in KNOBS} | values
        return Knobs(**values)


def _difference(before: PlaneReading, now: PlaneReading, knobs: Knobs) -> PlaneInterval | None:
    """The interval between two readings; None when nothing happened or a stage began anew."""
    seconds = now.at - before.at
    waited_s = now.consumer.waited_s - before.consumer.waited_s
    worked_s = now.consumer.worked_s - before.consumer.worked_s
    batches = now.consumer.batches - before.consumer.batches
    if batches == 0 and waited_s <= 0.0 and worked_s <= 0.0:
        return None  # between epochs
    old = {stage.name: stage for stage in before.stages}
    reading = [stage for stage in now.stages if stage.name in now.readers]
    if any(s.name not in old or s.reads < old[s.name].reads for s in reading):
        return None
    counts = [0] * LATENCY_BUCKETS
    for stage in reading:
        if stage.reads > old[stage.name].reads:
            pairs = zip(stage.latency_us, old[stage.name].latency_us, strict=True)
            counts = [n + new - past for n, (new, past) in zip(counts, pairs, strict=True)]
    decoding = [stage for stage in now.stages if stage.name == "decode"]

    def in_flight(stage: StageStats) -> float:
        """Mean reads in flight: exact where the stage integrates, else as seen now."""
        held_s = stage.in_flight_s - old[stage.name].in_flight_s
        return held_s / seconds if held_s > 0.0 else float(stage.in_flight)

    return PlaneInterval(
        seconds=seconds,
        waited_s=max(0.0, waited_s),
        worked_s=max(0.0, worked_s),
        batches=batches,
        samples=now.consumer.samples - before.consumer.samples,
        bytes=now.consumer.bytes - before.consumer.bytes,
        reads=sum(stage.reads - old[stage.name].reads for stage in reading),
        in_flight=sum(in_flight(stage) for stage in reading),
        buffered_bytes=sum(stage.buffered_bytes for stage in reading),
        ready_bytes=sum(stage.ready_bytes for stage in reading),
        latency_us=tuple(counts),
        decode_busy_s=sum(stage.busy_s - old[stage.name].busy_s for stage in decoding),
        decode_wait_s=sum(stage.wait_input_s - old[stage.name].wait_input_s for stage in decoding),
        knobs=knobs,
    )


PERIOD_S: Final = 0.1
"""Between two looks: several happen within the second in which a change should have been answered."""

LIMITS_EVERY_S: Final = 1.0
"""Memory pressure builds up over seconds; reading the limits costs half a millisecond."""

CALM_TICKS: Final = 3
"""A plane at which nothing has had to be done for a while is looked at every third time."""

IDLE_TICKS: Final = 10
"""A plane whose consumer has not shown up for a while is looked at once a second."""

CLOSED_KEPT: Final = 8  # planes that are gone and still can be explained


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
        # A child tells only of what it does.
        self._forked_s = time.monotonic() if hasattr(self, "_publisher") else None
        self._publisher: Publisher | None = None
        self._tells = os.environ.get("HEADRACE_TELL", "1") != "0"

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

    def tell(
        self, planes: Sequence[Plane], *, ended: bool = False, due_at: float | None = None
    ) -> None:
        """Tell the node's agents how planes fare, now; or at this moment only if it is time to."""
        planes = [plane for plane in planes if plane.published]

        def tell(publisher: Publisher) -> None:
            if due_at is None or publisher.due(due_at):
                publisher.tell(planes, ended=ended)

        if planes or self._publisher is not None:  # else there was nothing to tell, ever
            self.publish(tell)

    def publish(self, act: Callable[[Publisher], object]) -> None:
        """Have something told, if anything is; what fails once is not tried again."""
        if self._publisher is None and not self._tells:
            return
        try:
            if self._publisher is None:
                with _importing:
                    from headrace.control.publishing import Publisher
                self._publisher = Publisher(forked_s=self._forked_s)
            act(self._publisher)
        except Exception:
            LOG.exception("agents are told no more how this process fares")
            self._publisher, self._tells = None, False

    def all(self) -> tuple[list[Plane], list[Plane]]:
        with self._lock:
            return list(self._planes), list(self._closed)

    def _run(self) -> None:
        limits_at, ticks = 0.0, 0
        while not self._ending.wait(PERIOD_S):
            with self._lock:
                for plane in [each for each in self._planes if each.gone]:
                    self.forget(plane)
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
            self.tell(planes, due_at=now)

    def _look(self, plane: Plane, count: int, *, look_at_limits: bool) -> None:
        try:
            if look_at_limits:
                plane.refresh_limits(count)
            plane.step()
        except Exception:
            LOG.exception("%s: tuning ends, the knobs stay where they are", plane.name)
            self.forget(plane)


_importing = threading.RLock()
"""The first batch waits for no module that only the thread needs; no fork must come in the midst of
importing it, since the child would wait for ever for whoever imports."""

_controller = _Controller()


def _in_child() -> None:
    _importing.release()
    _controller.reset()


os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_in_child,
)
atexit.register(_controller.stop)


def planes() -> tuple[list[Plane], list[Plane]]:
    """The planes of this process: those at work, and some that have ended."""
    return _controller.all()
