"""NodeReads: asks the node daemon for batches, and reads directly where it cannot have them.

Stands on top of a chain that can read by itself. While a daemon is attached, requests go there as soon
as they are submitted, so that it reads ahead; when it dies, falls silent or has no memory to spare,
the chain below reads instead, at once, and nothing of what is delivered changes. Attaching is the
business of a thread of its own (`attaching`), so that no batch waits for a daemon that is not there.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast
from weakref import ReferenceType, WeakValueDictionary, ref

import numpy as np

from headrace.node.attaching import Attached, Attaching
from headrace.node.link import ALIVE_S, LinkLost
from headrace.node.mapped import NodeBatch
from headrace.node.runtime import runtime_folder
from headrace.node.wire import INDICES_MAX, Ask, Hurry, Samples, Status, WireError, Working
from headrace.plane.stage import StageStats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.node.runtime import RuntimeFolder
    from headrace.plane.tiers import Chain, PendingReads, Reads
    from headrace.store import Store

__all__ = ["NodeReads", "NodeReport", "job_name", "over_node"]

_log = logging.getLogger("headrace")

HURRY_AFTER_S = 0.02
"""A consumer that has waited so long asks what is the matter."""

HURRY_AGAIN_S = 0.5

FIRST_S = 5.0
"""The first batch waits so long for a daemon that is there to open the data set."""

AHEAD_FIRST = 4
"""Batches asked for before the first one has said how large they are."""
AHEAD_MIN = 2

BUSY_MAX = 4
"""After so many refusals in a row, requests go round the daemon for `BUSY_S`."""
BUSY_S = 1.0


def over_node(chain: Chain, source: Any, part_names: Sequence[str], /) -> Chain:
    """A chain that asks the daemon of this user first."""
    budget_bytes = int(chain.source.stats()["buffer_bytes"])
    reads = NodeReads(
        chain.top, source, part_names, runtime_folder(), job_name(), budget_bytes=budget_bytes
    )
    return replace(chain, top=reads, stages=(*chain.stages, reads))


def job_name(environment: Mapping[str, str] | None = None) -> str:
    """What this process is a part of: clients of one job share a quota.

    Args:
        environment: defaults to `os.environ`. HEADRACE_JOB says it, or Slurm, or torchrun; else
            the processes that one shell command started are a job.
    """
    environment = os.environ if environment is None else environment
    for variable in ("HEADRACE_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        if environment.get(variable):
            return environment[variable][:256]
    return f"group-{os.getpgid(0)}"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """How a loader fares with the daemon.

    Attributes:
        attached: whether it has one now.
        attachments: how often it was attached.
        node_batches: batches that came from the daemon.
        direct_batches: batches that were read directly.
        busy_batches: those of them for which the daemon had no memory.
        why: why there is no daemon now, or why the last batch was read directly.
    """

    attached: bool
    attachments: int
    node_batches: int
    direct_batches: int
    busy_batches: int
    why: str


class NodeReads:
    """Batches from the daemon, or from below.

    Args:
        below: reads directly.
        store: the data set.
        part_names: the parts that are read.
        folder: where the daemon is.
        job: clients of one job share a quota.
        budget_bytes: batches that may be read ahead.
    """

    name = "node"

    def __init__(
        self,
        below: Reads,
        store: Store,
        part_names: Sequence[str],
        folder: RuntimeFolder,
        job: str,
        *,
        budget_bytes: int = 64 << 20,
    ) -> None:
        self._below = below
        self._samples_count = len(store)
        self._parts = len(part_names)
        self._pid = os.getpid()
        # A consumer that leaves an epoch takes no more of it: nothing here keeps batches alive.
        self._pending: WeakValueDictionary[int, _Pending] = (
            WeakValueDictionary()
        )  # asked, not taken
        self._asked: set[int] = set()  # not answered
        self._unsent: deque[ReferenceType[_Pending]] = deque()
        self._budget_bytes = budget_bytes
        self._batch_bytes = 0.0  # of a batch, lately
        self._busy = 0
        self._around_until = 0.0
        self._attached: Attached | None = None
        self._attaching = Attaching(store, part_names, folder, job)
        self._first = True
        self._batches = self._direct = self._refused = 0
        self._samples = self._bytes = self._ram_bytes = 0
        self._waited_s = 0.0
        self._why = ""

    @property
    def usable(self) -> bool:
        """False in a forked child of the process that made it."""
        return os.getpid() == self._pid and self._below.usable

    @property
    def engine(self) -> tuple[str, str]:
        """As below."""
        return self._below.engine

    @property
    def mapped_bytes(self) -> int:
        """Memory of this process; the daemon's is not counted."""
        return self._below.mapped_bytes

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        """Ask for one batch; returns at once."""
        attached = self._attached or self._attach()
        if attached is None or not self._askable(indices):
            self._direct += 1
            return self._below.submit(indices)
        pending = _Pending(self, attached, indices)
        self._unsent.append(ref(pending))
        self._send(attached)
        return pending

    def _send(self, attached: Attached) -> None:
        """Ask for what may be under way: as many bytes ahead of the consumer as without a daemon."""
        link = attached.link
        ahead = AHEAD_FIRST
        if self._batch_bytes > 0.0:
            ahead = max(AHEAD_MIN, 1 + int(self._budget_bytes / self._batch_bytes))
        try:
            while self._unsent and len(self._pending) < min(ahead, link.requests_max):
                pending = self._unsent.popleft()()
                if pending is None:
                    continue
                pending.ticket = link.new_ticket()
                self._pending[pending.ticket] = pending
                self._asked.add(pending.ticket)
                released = link.take_released()
                indices = pending.indices.tobytes()
                link.send(Ask(pending.ticket, attached.dataset, indices, released))
        except LinkLost as e:
            self.lose(attached, str(e))

    def _askable(self, indices: NDArray[np.int64]) -> bool:
        if not len(indices) or len(indices) * self._parts > INDICES_MAX:
            return False
        if self._around_until and time.monotonic() < self._around_until:
            return False
        # Of others, those below say what is wrong.
        return bool(0 <= indices.min() <= indices.max() < self._samples_count)

    def _attach(self) -> Attached | None:
        """Take over what the thread has attached; at first, wait a little for a daemon that is there."""
        wait_s, self._first = (FIRST_S if self._first else 0.0), False
        self._attached = attached = self._attaching.take(wait_s)
        if attached is not None:
            attached.link.on_reply = self._on_reply
            self._busy, self._around_until = 0, 0.0
        return attached

    # -- answers ----------------------------------------------------------------------------------

    def _on_reply(self, message: Any) -> None:
        if isinstance(message, Samples):
            if message.ticket not in self._asked:
                raise WireError(f"batch {message.ticket} was not asked for")
            self._asked.discard(message.ticket)
            pending = self._pending.get(message.ticket)
            if pending is not None:
                pending.answer(message)
            elif message.status is Status.OK and self._attached is not None:
                self._attached.link.ledger.end(message.ticket)  # nobody takes it any more
        elif not isinstance(message, Working):
            raise WireError(f"a {type(message).__name__} that was not asked for")

    def drain(self, attached: Attached) -> None:
        """Take in answers that have come."""
        try:
            while attached is self._attached and attached.link.receive(0.0):
                pass
        except LinkLost as e:
            self.lose(attached, str(e))

    def wait(self, pending: _Pending, attached: Attached) -> None:
        """Take in answers until this one has come, or the daemon is lost."""
        began = hurried_s = time.monotonic()
        pause_s = HURRY_AFTER_S
        link = attached.link
        try:
            link.give_back()  # it may wait for what we hold
            while pending.waiting and not link.lost:
                link.receive(pause_s)
                now = time.monotonic()
                if not pending.waiting or now - hurried_s < pause_s:
                    continue
                if now - max(link.heard_s, began) > ALIVE_S:
                    raise LinkLost(f"the daemon said nothing for {ALIVE_S:g} s")  # noqa: TRY301
                link.give_back()
                link.send(Hurry(pending.ticket))
                hurried_s, pause_s = now, HURRY_AGAIN_S
        except LinkLost as e:
            self.lose(attached, str(e))
        finally:
            self._waited_s += time.monotonic() - began
        if pending.waiting:  # another thread has lost it
            self.lose(attached, link.lost)

    def lose(self, attached: Attached, reason: str) -> None:
        """The daemon is lost: what it has not answered is read below, in order, from now on."""
        if attached is self._attached:
            self._attached = None
            self._why = reason
            _log.warning("the node daemon is lost (%s): reading directly.", reason)
        submitted = [*self._pending.values(), *(unsent() for unsent in self._unsent)]
        unanswered = [p for p in submitted if p is not None and p.waiting]
        self._unsent.clear()
        self._asked.clear()
        for pending in unanswered:
            self._pending.pop(pending.ticket, None)
            self._direct += 1
            pending.go_below(self._below)
        attached.link.close(reason)
        self._attaching.again()

    def finish(self, pending: _Pending, reply: Samples) -> _native.Batch:
        """The batch of an answer; read below if the answer is not one."""
        self._pending.pop(pending.ticket, None)
        if self._attached is pending.attached:
            self._send(pending.attached)
        if reply.status is Status.OK:
            try:
                batch = pending.attached.link.mappings.batch(reply, pending.indices, self._parts)
            except WireError as e:
                self.lose(pending.attached, str(e))
            else:
                self._count(batch, reply)
                return cast("_native.Batch", batch)
        self._direct += 1
        if reply.status is Status.BUSY:
            self._refused += 1
            self._busy += 1
            if self._busy >= BUSY_MAX:
                self._busy, self._around_until = 0, time.monotonic() + BUSY_S
        self._why = reply.message
        return self._below.submit(pending.indices).take()

    def _count(self, batch: NodeBatch, reply: Samples) -> None:
        self._busy = 0
        self._batches += 1
        self._samples += batch.samples
        size = int(batch.lengths.sum())
        self._bytes += size
        self._batch_bytes += (size - self._batch_bytes) * (0.1 if self._batch_bytes else 1.0)
        self._ram_bytes += reply.ram_bytes

    # -- the rest of what a stage does ------------------------------------------------------------

    def gather(self, pieces: list[tuple[_native.Batch, int, int]]) -> _native.Batch:
        """Copy samples start to stop - 1 of each (batch, start, stop) into one new batch."""
        if not any(isinstance(batch, NodeBatch) for batch, _, _ in pieces):
            return self._below.gather(pieces)
        return cast("_native.Batch", _gathered(pieces))

    def close(self) -> None:
        """Let go of the daemon, and close what is below. Batches that were taken stay valid."""
        self._attaching.close()
        attached, self._attached = self._attached, None
        if attached is not None and os.getpid() == self._pid:
            attached.link.close()
        self._pending.clear()
        self._asked.clear()
        self._unsent.clear()
        self._below.close()

    def stats(self) -> StageStats:
        """What came from the daemon."""
        return StageStats(
            name=self.name,
            wait_input_s=self._waited_s,
            samples=self._samples,
            bytes=self._bytes,
            reads=self._batches,
            in_flight=len(self._pending),
            bytes_by_tier={"ram": self._ram_bytes},
        )

    def knobs(self) -> Mapping[str, int]:
        """None: the daemon has its own."""
        return {}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Nothing to turn."""

    def report(self) -> NodeReport:
        """How this loader fares with the daemon."""
        return NodeReport(
            self._attached is not None, self._attaching.attachments, self._batches,
            self._direct, self._refused, self._why or self._attaching.why,
        )  # fmt: skip


class _Pending:
    """A batch that the daemon was asked for."""

    def __init__(self, reads: NodeReads, attached: Attached, indices: NDArray[np.int64]) -> None:
        self.attached = attached
        self.ticket = 0  # it is not sent
        self.indices = indices
        self._reads = reads
        self._reply: Samples | None = None
        self._below: PendingReads | None = None

    @property
    def waiting(self) -> bool:
        """Whether nobody has answered, nor reads it directly."""
        return self._reply is None and self._below is None

    def answer(self, reply: Samples) -> None:
        """The daemon has answered."""
        self._reply = reply

    def go_below(self, below: Reads) -> None:
        """The daemon is lost."""
        if self.waiting:
            self._below = below.submit(self.indices)

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        if self.waiting:
            self._reads.drain(self.attached)
        return self._below.done if self._below is not None else self._reply is not None

    def take(self) -> _native.Batch:
        """Wait for the batch."""
        if self.waiting:
            self._reads.wait(self, self.attached)
        if self._below is not None:
            return self._below.take()
        assert self._reply is not None
        reply, self._reply = self._reply, None
        return self._reads.finish(self, reply)

    def __del__(self) -> None:
        if self._reply is not None and self._reply.status is Status.OK:  # it was never taken
            self.attached.link.ledger.end(self.ticket)


def _gathered(pieces: Sequence[tuple[Any, int, int]]) -> NodeBatch:
    """One dense batch of pieces of others, in memory of this process."""
    parts = max(batch.parts for batch, _, _ in pieces)

    def joined(name: str, width: int) -> NDArray[np.int64]:
        cut = [getattr(b, name)[start * width : stop * width] for b, start, stop in pieces]
        return np.concatenate([np.empty(0, np.int64), *cut])

    lengths = joined("lengths", parts)
    offsets = np.cumsum(lengths) - lengths
    data = np.empty(int(lengths.sum()), np.uint8)
    at = 0
    for batch, start, stop in pieces:
        for slot in range(start * parts, stop * parts):
            begin, size = int(batch.offsets[slot]), int(batch.lengths[slot])
            data[at : at + size] = batch.data[begin : begin + size]
            at += size
    data.flags.writeable = False
    return NodeBatch(data, joined("indices", 1), offsets, lengths, joined("labels", 1))
