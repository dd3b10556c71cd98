"""Notes: a process tells the node daemon again and again how its consumers fare: so it knows who starves.

A thread for each loader, so that no batch waits for it. A note goes over the link on
which batches are asked for; where other processes ask for them (a DataLoader's workers), over one of
its own. While no daemon is there nothing is lost: the next note says it all, but a loader that ends
takes its last second with it. It reads counters only and never harms what it watches.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from headrace.base.job import job_name
from headrace.errors import NodeError
from headrace.node.link import Link, LinkLost
from headrace.node.reads import NodeReads
from headrace.node.wire import Note
from headrace.runtime import runtime_folder

if TYPE_CHECKING:
    from headrace.plane import LoaderStats
    from headrace.runtime import RuntimeFolder

_log = logging.getLogger("headrace")

PERIOD_S: Final = 0.2  # the daemon's tuner answers within a second what a consumer waits for
RETRY_S: Final = 5.0  # between attempts to get a link of its own
_SECONDS_MAX: Final = 86400.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """What had happened at a look."""

    waited_s: float = 0.0
    worked_s: float = 0.0
    batches: int = 0
    samples: int = 0
    bytes: int = 0
    asked_s: float | None = None
    """Of `waited_s`, for what the daemon was asked for; None: no one here asks."""
    direct: int = 0  # batches that were read directly


def note_of(before: _Seen, now: _Seen) -> Note | None:
    """What happened between two looks; None: nothing."""
    waited_s = min(_SECONDS_MAX, max(0.0, now.waited_s - before.waited_s))
    direct = int(_grown(before.direct, now.direct))
    asked_s = waited_s
    if now.asked_s is not None:
        asked_s = min(waited_s, _grown(before.asked_s or 0.0, now.asked_s))
    rest_s = waited_s - asked_s
    note = Note(
        waited_s=asked_s,
        direct_s=rest_s if direct else 0.0,
        decode_s=0.0 if direct else rest_s,
        worked_s=min(_SECONDS_MAX, max(0.0, now.worked_s - before.worked_s)),
        batches=max(0, now.batches - before.batches),
        samples=max(0, now.samples - before.samples),
        nbytes=max(0, now.bytes - before.bytes),
        direct_batches=direct,
    )
    return note if note.batches or note.worked_s or waited_s else None


def _grown(before: float, now: float) -> float:
    """Of a counter that begins anew with a new chain of stages."""
    return min(_SECONDS_MAX, now - before if now >= before else now)


@dataclass(slots=True, eq=False)
class _Watched:
    stats: weakref.ref[LoaderStats]
    folder: RuntimeFolder
    job: str
    seen: _Seen = field(default_factory=_Seen)
    asks: bool = False  # batches are asked for in this process
    link: Link | None = None
    retry_s: float = 0.0

    def run(self) -> None:
        """The thread: tell until the loader is gone."""
        pause = threading.Event()
        try:
            while not pause.wait(PERIOD_S) and self.tell():
                pass
        except Exception:  # noqa: BLE001 - whatever it is, training goes on
            _log.exception("the node daemon is told no more of a loader")
        with contextlib.suppress(Exception):
            self.close()

    def tell(self) -> bool:
        """Look once and tell it; False: the loader is gone."""
        stats = self.stats()
        if stats is None:
            return False
        consumer, reads = stats.consumer(), None
        seen = _Seen(
            consumer.waited_s, consumer.worked_s, consumer.batches, consumer.samples, consumer.bytes
        )
        for stage in stats.stages_now():
            if isinstance(stage, NodeReads):
                asked_s, direct = stage.stats().wait_input_s, stage.report().direct_batches
                reads, seen = stage, replace(seen, asked_s=asked_s, direct=direct)
                break
        self.asks = self.asks or reads is not None
        if reads is None and (self.asks or not seen.batches):
            return True  # it is closed, or has hardly begun: who asks is not known yet
        note = note_of(self.seen, seen)
        if note is None:
            self.close()
        elif self._send(note) if reads is None else reads.note(note):
            # A wait that is under way may turn out to be none; what was told stays told.
            waited_s = max(seen.waited_s, self.seen.waited_s)
            worked_s = max(seen.worked_s, self.seen.worked_s)
            self.seen = replace(seen, waited_s=waited_s, worked_s=worked_s)
        return True

    def _send(self, note: Note) -> bool:
        now = time.monotonic()
        try:
            if self.link is None and now >= self.retry_s:
                self.retry_s = now + RETRY_S
                self.link = Link(self.folder, self.job)
            if self.link is None:
                return False
            self.link.send(note)
        except (LinkLost, NodeError, OSError):
            self.close()
            return False
        return True

    def close(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()


def watch(stats: LoaderStats) -> None:
    """Tell the daemon of a loader's consumer for as long as the loader lives, in this process."""
    watched = _Watched(weakref.ref(stats), runtime_folder(), job_name())
    threading.Thread(target=watched.run, name="headrace-notes", daemon=True).start()
