"""Pending: a batch of a client that was submitted and not taken: gathered here, asked for, or read below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace.node.mapped import NodeBatch
from headrace.node.wire import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.node.attaching import Attached
    from headrace.node.wire import Samples
    from headrace.plane.stage import PendingReads, Reads

__all__ = ["Pending", "Taker", "join_pieces"]


class Taker(Protocol):
    """What a batch needs of those who submitted it."""

    def drain(self, attached: Attached) -> None:
        """Take in answers that have come."""

    def wait(self, pending: Pending, attached: Attached) -> None:
        """Take in answers until this batch is not waiting."""

    def finish(self, pending: Pending, reply: Samples) -> _native.Batch:
        """The batch of an answer."""

    def gathered(self, pending: Pending, job: _native.GatherJob) -> _native.Batch:
        """The batch that was gathered."""


class Pending:
    """A batch that was submitted.

    Attributes:
        attached: who was asked.
        indices: what was submitted.
        begun: it is gathered or was asked for; a ticket is a request's.
        hits: what is held of it, where only the rest was asked for.
    """

    def __init__(self, taker: Taker, attached: Attached, indices: NDArray[np.int64]) -> None:
        self.attached = attached
        self.begun = False
        self.ticket = 0
        self.indices = indices
        self.hits: _native.Hits | None = None
        self._taker = taker
        self._job: _native.GatherJob | None = None
        self._reply: Samples | None = None
        self._below: PendingReads | None = None

    @property
    def asked(self) -> NDArray[np.int64]:
        """The samples that the daemon is asked for."""
        return self.indices if self.hits is None else self.indices[self.hits.missing]

    @property
    def waiting(self) -> bool:
        """Whether nobody has answered, nor gathers or reads it."""
        return self._reply is None and self._below is None and self._job is None

    def gather(self, job: _native.GatherJob) -> None:
        """All of it is held."""
        self._job = job

    def answer(self, reply: Samples) -> None:
        """The daemon has answered."""
        self._reply = reply

    def go_below(self, below: Reads) -> None:
        """The daemon is lost."""
        if self.waiting:
            self.hits = None
            self._below = below.submit(self.indices)

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        if self._job is not None:
            return self._job.done
        if self.waiting:
            self._taker.drain(self.attached)
        return self._below.done if self._below is not None else self._reply is not None

    def take(self) -> _native.Batch:
        """Wait for the batch."""
        if self.waiting:
            self._taker.wait(self, self.attached)
        if self._job is not None:
            job, self._job = self._job, None
            return self._taker.gathered(self, job)
        if self._below is not None:
            return self._below.take()
        assert self._reply is not None
        reply, self._reply = self._reply, None
        return self._taker.finish(self, reply)

    def __del__(self) -> None:
        if self._reply is not None and self._reply.status is Status.OK:  # it was never taken
            self.attached.link.ledger.end(self.ticket)


def join_pieces(pieces: Sequence[tuple[Any, int, int]]) -> NodeBatch:
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
