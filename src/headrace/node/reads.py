"""NodeReads: asks the node daemon for batches, and reads directly where it cannot have them.

Stands on top of a chain that can read by itself. While a daemon is attached, what its cache holds is
gathered from there without a word (`shared`), and the rest is asked for as soon as it is submitted, so
that the daemon reads ahead. When it dies, falls silent or has no memory to spare, the chain below
reads instead, at once, and nothing of what is delivered changes. Attaching is the business of a
thread of its own (`Attaching`), so that no batch waits for a daemon that is not there.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace import _native
from headrace.base.job import job_name
from headrace.errors import CorruptStore
from headrace.node.link import ALIVE_S, Attaching, LinkLost
from headrace.node.wire import (
    INDICES_MAX,
    Ask,
    Hurry,
    ReplyStatus,
    Samples,
    WireError,
    Working,
)
from headrace.plane.stage import ReadStage, StageStats
from headrace.runtime import runtime_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace.node.link import Link
    from headrace.node.wire import Note
    from headrace.plane.images import Images
    from headrace.plane.pipeline import Stages
    from headrace.plane.stage import BatchReads, PendingReads
    from headrace.runtime import RuntimeFolder
    from headrace.store import Store


class Pending:
    """A batch that was submitted.

    Attributes:
        hits: what is held of it, where only the rest was asked for.
    """

    def __init__(self, taker: NodeReads, link: Link, indices: NDArray[np.int64]) -> None:
        self.link = link
        self.begun = False  # it is gathered or was asked for; a ticket is a request's
        self.ticket = 0
        self.indices = indices
        self.hits: _native.Hits | None = None
        self._taker = taker
        self.job: _native.GatherJob | None = None  # gathers it: all of it is held
        self.reply: Samples | None = None  # the daemon's answer
        self.direct: PendingReads | None = None  # reads it, since the daemon is lost

    @property
    def asked(self) -> NDArray[np.int64]:
        """The samples that the daemon is asked for."""
        return self.indices if self.hits is None else self.indices[self.hits.missing]

    @property
    def waiting(self) -> bool:
        """Whether nobody has answered, nor gathers or reads it."""
        return self.reply is None and self.direct is None and self.job is None

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        if self.job is not None:
            return self.job.done
        if self.waiting:
            self._taker.drain(self.link)
        return self.direct.done if self.direct is not None else self.reply is not None

    @property
    def waits_for(self) -> str:
        """What it waits for now, for messages."""
        return "the node daemon" if self.direct is None else self.direct.waits_for

    def take(self) -> _native.Batch:
        """Wait for the batch."""
        if self.waiting:
            self._taker.wait(self, self.link)
        if self.job is not None:
            job, self.job = self.job, None
            return self._taker.gathered(self, job)
        if self.direct is not None:
            return self.direct.take()
        assert self.reply is not None
        reply, self.reply = self.reply, None
        return self._taker.finish(self, reply)

    def __del__(self) -> None:
        if self.reply is not None and self.reply.status is ReplyStatus.OK:  # it was never taken
            self.link.ledger.end(self.ticket)


_log = logging.getLogger("headrace")

HURRY_AFTER_S = 0.02  # a consumer that has waited so long asks what is the matter
HURRY_AGAIN_S = 0.5

FIRST_S = 5.0  # the first batch waits so long for a daemon that is there to open the data set
AHEAD_FIRST = 4  # batches asked for before the first one has said how large they are
AHEAD_MIN = 2

BUSY_MAX = 4  # after so many refusals in a row, requests go round the daemon for `BUSY_S`
BUSY_S = 1.0

GATHERERS = 2  # threads that gather ahead: as many as read from the page cache without a daemon


def over_node(
    chain: Stages, source: Any, part_names: Sequence[str], images: Images | None, /
) -> Stages:
    """A chain that asks the daemon of this user first: where pictures are kept decoded, for these."""
    budget_bytes = int(chain.source.stats()["buffer_bytes"])
    kept = None if images is None or images.keep is None else images.kept(part_names)
    reads = NodeReads(
        chain.top, source, part_names, runtime_folder(), job_name(),
        budget_bytes=budget_bytes, kept=kept,
    )  # fmt: skip
    return replace(chain, top=reads, stages=(*chain.stages, reads))


@dataclass(frozen=True, slots=True)
class NodeReport:
    """How a loader fares with the daemon."""

    attached: bool  # whether it has one now
    attachments: int  # how often it was attached
    node_batches: int  # batches that came from the daemon or its cache
    gathered_batches: int  # those of them that took no message
    direct_batches: int  # batches that were read directly
    busy_batches: int  # those of them for which the daemon had no memory
    why: str  # why there is no daemon now, or why the last batch was read directly


class NodeReads(ReadStage):
    """Batches from the daemon, or from below."""

    name = "node"

    def __init__(
        self,
        below: BatchReads,
        store: Store,
        part_names: Sequence[str],
        folder: RuntimeFolder,
        job: str,
        *,
        budget_bytes: int = 64 << 20,
        kept: Images | None = None,
    ) -> None:
        super().__init__(below)
        self._samples_count = len(store)
        self._parts = len(part_names)
        self._pid = os.getpid()
        # Who does not take a batch any more must not hold up others: all references are weak.
        self._unsent: deque[weakref.ref[Pending]] = deque()
        self._under_way: weakref.WeakSet[Pending] = weakref.WeakSet()  # begun, and not taken
        self._asked: dict[int, weakref.ref[Pending]] = {}  # by ticket: not answered
        self._gatherer = _native.Gatherer(budget_bytes, GATHERERS)
        self._budget_bytes = budget_bytes
        self._batch_bytes = 0.0  # of a batch, lately
        self._busy = 0
        self._around_until = 0.0
        self._link: Link | None = None
        self._attaching = Attaching(store, part_names, folder, job, kept)
        self._first = True
        self._batches = self._gathered = self._direct = self._refused = 0
        self._samples = self._bytes = self._ram_bytes = 0
        self._waited_s = 0.0
        self._waits_since: float | None = None
        self._why = ""

    @property
    def usable(self) -> bool:
        """False in a forked child of the process that made it."""
        return os.getpid() == self._pid and super().usable

    @property
    def attached(self) -> bool:
        """Whether a daemon serves it now."""
        return self._link is not None

    @property
    def ahead_bytes(self) -> int:
        """How far the daemon lets this client ask ahead; without one, as far as is read directly."""
        link = self._link
        return self._budget_bytes if link is None or not link.ahead_bytes else link.ahead_bytes

    def _own_bytes(self) -> int:
        return self._gatherer.mapped_bytes

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        """Ask for one batch; returns at once."""
        link = self._link or self._attach()
        if link is not None and link.lost:  # its thread has noticed
            self.lose(link, link.lost)
            link = None
        askable = bool(
            0 < len(indices) * self._parts <= INDICES_MAX
            and time.monotonic() >= self._around_until
            # Of others, those below say what is wrong.
            and 0 <= indices.min() <= indices.max() < self._samples_count
        )
        if link is None or not askable:
            self._direct += 1
            return self._below.submit(indices)
        pending = Pending(self, link, indices)
        self._unsent.append(weakref.ref(pending))
        self._begin(link)
        return pending

    def _begin(self, link: Link) -> None:
        """Begin what may be under way."""
        ahead = AHEAD_FIRST
        if self._batch_bytes > 0.0:
            ahead = max(AHEAD_MIN, 1 + int(self.ahead_bytes / self._batch_bytes))
        ahead = min(ahead, link.requests_max)
        try:
            while self._unsent and len(self._under_way) < ahead:
                pending = self._unsent.popleft()()
                if pending is not None and not pending.begun:
                    self._begin_one(link, pending)
        except LinkLost as e:
            self.lose(link, str(e))

    def _begin_one(self, link: Link, pending: Pending) -> None:
        """Gather what is held, or ask for what is not."""
        pending.begun = True
        self._under_way.add(pending)
        view = link.cache.view
        if view is not None and view.samples == self._samples_count and view.parts == self._parts:
            hits = view.look_up(pending.indices)
            if not hits.missing_count:
                pending.job = self._gatherer.submit(hits)
                return
            if hits.missing_count < len(pending.indices):
                pending.hits = hits
        pending.ticket = link.new_ticket()
        self._asked[pending.ticket] = weakref.ref(pending)
        released = link.take_released()
        link.send(Ask(pending.ticket, link.dataset, pending.asked.tobytes(), released))

    def _attach(self) -> Link | None:
        """Take over what the thread has attached; at first, wait a little for a daemon that is there."""
        wait_s, self._first = (FIRST_S if self._first else 0.0), False
        self._waits_since = time.monotonic()
        self._link = link = self._attaching.take(wait_s)
        self._count_wait()
        if link is not None:
            link.on_reply = self._on_reply
            link.tend()
            self._busy, self._around_until = 0, 0.0
        return link

    # -- answers ----------------------------------------------------------------------------------

    def _on_reply(self, message: Any) -> None:
        if isinstance(message, Samples):
            ref = self._asked.pop(message.ticket, None)
            if ref is None:
                raise WireError(f"batch {message.ticket} was not asked for")
            pending = ref()
            if pending is not None:
                pending.reply = message
            elif message.status is ReplyStatus.OK and self._link is not None:
                # Nobody takes it any more.
                self._link.ledger.end(message.ticket)
        elif not isinstance(message, Working):
            raise WireError(f"a {type(message).__name__} that was not asked for")

    def drain(self, link: Link) -> None:
        """Take in answers that have come."""
        try:
            while link is self._link and link.receive(0.0):
                pass
        except LinkLost as e:
            self.lose(link, str(e))

    def wait(self, pending: Pending, link: Link) -> None:
        """Take in answers until this one has come, or the daemon is lost."""
        began = hurried_s = self._waits_since = time.monotonic()
        pause_s = HURRY_AFTER_S
        try:
            if not pending.begun:  # others that were submitted before it are not taken yet
                self._begin_one(link, pending)
            link.give_back()  # it may wait for what we hold
            while pending.waiting and not link.lost:
                link.receive(pause_s, lambda: pending.waiting)
                now = time.monotonic()
                if not pending.waiting or now - hurried_s < pause_s:
                    continue
                if now - max(link.answered_s, began) > ALIVE_S:
                    raise LinkLost(f"the daemon said nothing for {ALIVE_S:g} s")  # noqa: TRY301
                link.give_back()
                link.send(Hurry(pending.ticket))
                hurried_s, pause_s = now, HURRY_AGAIN_S
        except LinkLost as e:
            self.lose(link, str(e))
        finally:
            self._count_wait()
        if pending.waiting:  # another thread has lost it
            self.lose(link, link.lost)

    def lose(self, link: Link, reason: str) -> None:
        """The daemon is lost: what it has not answered is read below, in order, from now on."""
        if link is self._link:
            self._link = None
            self._why = reason
            _log.warning("the node daemon is lost (%s): reading directly.", reason)
        begun = [ref() for ref in (*self._asked.values(), *self._unsent)]
        self._asked.clear()
        self._unsent.clear()
        for pending in begun:
            if pending is not None and pending.waiting:
                self._direct += 1
                pending.hits = None
                pending.direct = self._below.submit(pending.indices)
        link.close(reason)
        self._attaching.again()

    def finish(self, pending: Pending, reply: Samples) -> _native.Batch:
        """The batch of an answer; read below if the answer is not one."""
        self._taken(pending)
        if reply.status is ReplyStatus.OK:
            try:
                batch = pending.link.mappings.batch(reply, pending.asked, self._parts)
            except WireError as e:
                self.lose(pending.link, str(e))
            else:
                self._busy = 0
                self._ram_bytes += reply.ram_bytes
                return self._joined(pending, batch)
        self._direct += 1
        if reply.status is ReplyStatus.BUSY:
            self._refused += 1
            self._busy += 1
            if self._busy >= BUSY_MAX:
                self._busy, self._around_until = 0, time.monotonic() + BUSY_S
        self._why = reply.message
        return self._below.submit(pending.indices).take()

    def _joined(self, pending: Pending, batch: _native.Batch) -> _native.Batch:
        """What came, and what was held of the same batch. What came is given back at once then."""
        size, hits = int(batch.lengths.sum()), pending.hits
        if hits is None:
            self._count(batch.samples, size)
            return batch
        try:
            joined = self._gatherer.gather(
                hits, batch.data, batch.offsets, batch.lengths, batch.labels
            )
        except CorruptStore as e:
            return self._distrust(pending, e)
        held = len(hits.indices) - hits.missing_count
        pending.link.gathered(0, held, hits.bytes)
        self._ram_bytes += hits.bytes
        self._count(joined.samples, size + hits.bytes)
        return joined

    def gathered(self, pending: Pending, job: _native.GatherJob) -> _native.Batch:
        """The batch that was gathered."""
        try:
            batch = job.take()
        except CorruptStore as e:
            return self._distrust(pending, e)
        pending.link.gathered(1, batch.samples, job.bytes)
        self._gathered += 1
        self._ram_bytes += job.bytes
        self._count(batch.samples, job.bytes)
        self._taken(pending)
        return batch

    def _distrust(self, pending: Pending, error: CorruptStore) -> _native.Batch:
        """The daemon's memory is not what it should be: nothing more is believed."""
        self.lose(pending.link, error.message)
        self._direct += 1
        return self._below.submit(pending.indices).take()

    def _taken(self, pending: Pending) -> None:
        """A batch is taken: others may be begun."""
        self._under_way.discard(pending)
        if self._link is pending.link:
            self._begin(pending.link)

    def _count(self, samples: int, nbytes: int) -> None:
        self._batches += 1
        self._samples += samples
        self._bytes += nbytes
        self._batch_bytes += (nbytes - self._batch_bytes) * (0.1 if self._batch_bytes else 1.0)

    # -- the rest of what a stage does ------------------------------------------------------------

    def close(self) -> None:
        """Let go of the daemon, and close what is below. Batches that were taken stay valid."""
        self._attaching.close()
        link, self._link = self._link, None
        if link is not None and os.getpid() == self._pid:
            link.close()
        self._asked.clear()
        self._unsent.clear()
        self._gatherer.close()
        self._below.close()

    def _count_wait(self) -> None:
        since, self._waits_since = self._waits_since, None
        if since is not None:
            self._waited_s += time.monotonic() - since

    def stats(self) -> StageStats:
        """What came from the daemon."""
        waited_s, since = self._waited_s, self._waits_since
        if since is not None:  # a wait under way
            waited_s += time.monotonic() - since
        return StageStats(
            name=self.name,
            wait_input_s=waited_s,
            samples=self._samples,
            bytes=self._bytes,
            reads=self._batches,
            in_flight=len(self._under_way),
            bytes_by_tier={"ram": self._ram_bytes},
        )

    def knobs(self) -> Mapping[str, int]:
        """None: the daemon has its own."""
        return {}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Nothing to turn."""

    def note(self, note: Note) -> bool:
        """Tell the daemon how the consumer fares; whether there was one to tell. Thread-safe."""
        link = self._link
        if link is None or not self.usable:
            return False
        try:
            link.send(note)
        except LinkLost:  # the next batch finds it out too, and what to do
            return False
        return True

    def report(self) -> NodeReport:
        """How this loader fares with the daemon."""
        return NodeReport(
            self._link is not None, self._attaching.attachments, self._batches,
            self._gathered, self._direct, self._refused, self._why or self._attaching.why,
        )  # fmt: skip
