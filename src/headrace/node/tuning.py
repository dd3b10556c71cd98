"""Tuning: the pipeline of one data set in the daemon, and all its consumers, as the one plane that they are.

The tuner is a process's (`headrace.control`): its controller looks at each data set ten times a second and
turns its reads in flight and its buffer. The buffer is what all clients together may have asked for and not
consumed: it is shared out evenly, first among jobs, then among a job's clients, and each client is told how far
ahead it may ask. A client brings what a process of its own would begin with; from the first decision on the
tuner has the word.

Clients say a few times a second how their consumers fare. The tuner looks more often, so what a note says is
spread over as long as it was about. Of several consumers the mean waits, and the sum is delivered.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import Cause
from headrace.config import ReaderOptions
from headrace.control.controller import Plane
from headrace.control.history import STALL_BAD
from headrace.control.knob_limits import Bounds, Limits, read_limits
from headrace.node.wire import Ahead
from headrace.plane.stage import ConsumerStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.node.session import Session
    from headrace.node.wire import Note
    from headrace.plane.pipeline import Pipeline
    from headrace.plane.stage import Stage, StageStats

SPAN_MAX_S: Final = 2.0
"""What a note says is spread over no longer; who said nothing for so long neither waits nor works."""

_SPAN_MIN_S: Final = 0.02

CLOSE: Final = 0.06
"""A client is told of a share that differs by more than this from what it was told last."""

PINNED: Final = 0.9
"""Share of the allowed reads in flight from which on the number allowed is what bounds them."""


@dataclass(slots=True)
class _Consumer:
    """What one client's consumer did."""

    job: str
    asks: bool
    """Whether it has the data set open; else its workers have, and it only says how it fares."""
    told_bytes: int = 0  # how far ahead the client was told to ask; 0: nothing yet
    at_s: float = 0.0  # when its last note came; 0.0: never
    span_s: float = 1.0  # how long that was about
    before: tuple[float, ...] = (0.0,) * 5
    last: tuple[float, ...] = (0.0,) * 5
    """Waited, worked, batches, samples and bytes: of the last note, and of all before it."""

    def so_far(self, now: float) -> tuple[float, ...]:
        """These, so much of the last note as its time is over."""
        share = min(1.0, (now - self.at_s) / self.span_s)
        return tuple(b + share * m for b, m in zip(self.before, self.last, strict=True))

    def add(self, now: float, span_s: float, amounts: tuple[float, ...]) -> None:
        """A note has come."""
        self.before = self.so_far(now + SPAN_MAX_S)
        self.span_s = max(_SPAN_MIN_S, min(SPAN_MAX_S, span_s))
        self.at_s, self.last = now, amounts


@dataclass(slots=True)
class _Windows:
    """What the clients' windows let the buffer be. The controller may keep it when all else is gone."""

    most_bytes: int = 1 << 60

    def limits(self, held_bytes: int) -> Limits:
        """A process's limits, and the windows."""
        limits = read_limits(held_bytes=held_bytes)
        if self.most_bytes >= limits.buffer_bytes.high:
            return limits
        bounds = Bounds(min(limits.buffer_bytes.low, self.most_bytes), self.most_bytes)
        origins = {
            **limits.origins,
            "buffer_bytes": "the node daemon's windows (--window, --job-window)",
        }
        return replace(limits, buffer_bytes=bounds, origins=origins)


class ServedPlane:
    """One data set's pipeline and consumers. Towards the controller it is the stage `prefetch`.

    All methods are for the daemon's loop, but those of a stage, `stages` and `consumer`: any thread.

    Attributes:
        held_back: what of the daemon's own kept reads from being in flight lately, if anything: the reads that
            are allowed, though more may help, or the windows.
    """

    name = "prefetch"

    def __init__(
        self,
        number: int,
        name: str,
        pipeline: Pipeline,
        options: ReaderOptions,
        call_soon: Callable[[Callable[[], None]], None],
        *,
        source: str = "",
    ) -> None:
        self.leased_bytes = 0  # of batches that clients have and may look at
        self._windows = _Windows()
        self.held_back: Cause | None = None
        self._number = number
        self._pipeline = pipeline
        self._call_soon = call_soon
        self._consumers: dict[Session, _Consumer] = {}
        self._changing = threading.Lock()  # of consumers: the controller's thread looks at them
        self._gone: tuple[float, ...] = (0.0,) * 5
        self._begin = dict(pipeline.knobs())
        frozen = [] if options.reads_in_flight is None else ["reads_in_flight"]
        if options.budget_bytes != ReaderOptions().budget_bytes:
            frozen.append("buffer_bytes")
        self.plane = Plane(
            f"data set {name}", self.stages, self.consumer, self._windows.limits, frozen,
            source=source, published=False,
        )  # fmt: skip

    # -- the stage ---------------------------------------------------------------------------------

    def stats(self) -> StageStats:
        """The reader's; what clients have and did not consume is ready, too."""
        stats, leased = self._pipeline.stats(), self.leased_bytes
        return replace(
            stats,
            buffered_bytes=stats.buffered_bytes + leased,
            ready_bytes=stats.ready_bytes + leased,
        )

    def knobs(self) -> Mapping[str, int]:
        """As they were turned last."""
        return self._pipeline.knobs()

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set some."""
        self._pipeline.turn(knobs)
        if "buffer_bytes" in knobs:
            self._call_soon(self.share)

    def stages(self) -> Sequence[Stage]:
        """This one, and the tiers and limits."""
        return (self, *self._pipeline.stages)

    # -- consumers ---------------------------------------------------------------------------------

    def consumer(self) -> ConsumerStats:
        """What all consumers did: the mean of their waits and work, the sum of what they got."""
        with self._changing:
            now = time.monotonic()
            each = [self._gone, *(consumer.so_far(now) for consumer in self._consumers.values())]
        waited_s, worked_s, *counts = (sum(column) for column in zip(*each, strict=True))
        batches, samples, nbytes = map(int, counts)
        return ConsumerStats(
            waited_s=waited_s, worked_s=worked_s, batches=batches, samples=samples, bytes=nbytes
        )

    def join(self, session: Session) -> None:
        """A client has opened the data set: it brings what a process would begin with."""
        with self._changing:
            self._consumers[session] = _Consumer(_job_of(session), asks=True)
        if not self.plane.changes:
            count = len(self._consumers)
            begin = {
                knob: value * count
                for knob, value in self._begin.items()
                if knob not in self.plane.frozen
            }
            allowed = self.plane.limits.clamped(replace(self.plane.knobs, **begin))
            self._pipeline.turn({knob: getattr(allowed, knob) for knob in begin})
        self.plane.wake()
        self.share()

    def leave(self, session: Session) -> None:
        """A client is gone."""
        with self._changing:
            consumer = self._consumers.pop(session, None)
            if consumer is None:
                return
            last = consumer.so_far(time.monotonic() + SPAN_MAX_S)
            self._gone = tuple(a + b for a, b in zip(self._gone, last, strict=True))
        self.share()

    def note(self, session: Session, note: Note) -> None:
        """How the consumer of a client fared, or that of a job whose clients only ask."""
        worked_s = note.worked_s + note.decode_s + note.direct_s
        counts = note.batches, note.samples, note.nbytes
        with self._changing:
            now = time.monotonic()
            consumer = self._consumers.get(session)
            if consumer is None:  # the process that consumes asks for nothing: its workers do
                consumer = self._consumers[session] = _Consumer(_job_of(session), asks=False)
            others = (c for c in self._consumers.values() if c is not consumer)
            count = 1 + sum(c.at_s > now - SPAN_MAX_S for c in others)
            amounts = note.waited_s / count, worked_s / count, *counts
            consumer.add(now, note.waited_s + worked_s, amounts)

    # -- the buffer --------------------------------------------------------------------------------

    def look(self, most_bytes: int) -> None:
        """Once a second: share anew, within what the windows let the buffer be."""
        self._windows.most_bytes = most_bytes
        self.held_back = self._held_back()
        self.share()

    def _held_back(self) -> Cause | None:
        plane, window = self.plane, self.plane.window(1.0)
        knobs, high = plane.knobs, plane.limits.buffer_bytes.high
        if window.stall <= STALL_BAD:
            return None
        if window.in_flight >= PINNED * knobs.reads_in_flight:
            memory, now_s = plane.history.memory, plane.history.now_s
            in_vain = memory is not None and memory.capped("reads_in_flight", now_s)
            return None if in_vain else Cause.PREFETCH
        full = knobs.buffer_bytes >= PINNED * high and self._windows.most_bytes <= high
        return Cause.WINDOW if full else None

    def share(self) -> None:
        """Tell clients how far ahead they may ask: those that were idle for a while get none of the others'."""
        late_s = time.monotonic() - SPAN_MAX_S
        asking = [(s, c) for s, c in self._consumers.items() if c.asks]
        busy = [(s, c) for s, c in asking if c.at_s > late_s or not c.at_s] or asking
        jobs = Counter(consumer.job for _, consumer in busy)
        buffer_bytes = self._pipeline.knobs()["buffer_bytes"]
        for session, consumer in busy:
            share = max(1, buffer_bytes // len(jobs) // jobs[consumer.job])
            if abs(share - consumer.told_bytes) > CLOSE * share:
                consumer.told_bytes = share
                session.say(Ahead(self._number, share))

    def report(self) -> dict[str, Any]:
        """What the tuner does, for `headrace node status`."""
        from headrace.control.explain import plane_report

        return plane_report(self.plane, changes=12)

    def close(self) -> None:
        """Tune no more."""
        self.plane.close()


def _job_of(session: Session) -> str:
    return "" if session.job is None else session.job.name
