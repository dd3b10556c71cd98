"""Requests: what a client asked for and has no answer to, and the memory that answers take.

Batches wait in their order, or are read (`Requests`). All clients together hold no more than a part of the
machine's memory, or of the control group's (`WindowBudget`): what would not fit is not begun, and clients
read those batches directly. Which memory of caches a client may have mapped is kept too (`MappedSlabs`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.node.wire import FDS_MAX, Cache, Gone, WireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace.node.limits import Charge
    from headrace.node.served import ServedData
    from headrace.node.session import Send

__all__ = ["REQUESTS_MAX", "Asked", "MappedSlabs", "Requests", "WindowBudget"]

REQUESTS_MAX: Final = 4096
"""Requests of one client without an answer. A client that keeps to it needs no more memory than their
indices take."""

WAITING_BYTES_MAX: Final = 64 << 20
"""Bytes of the indices of those that wait."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request for a batch that has no answer yet."""

    ticket: int
    data: ServedData
    indices: NDArray[np.int64]
    size_bytes: int
    asked_s: float
    reserved_bytes: int = 0
    """0: it waits."""
    charge: Charge | None = None
    """What was paid for it."""
    begun_s: float = 0.0


class Requests:
    """A client's requests without an answer.

    Attributes:
        waiting: those that are not begun, the oldest first.
        waiting_bytes: of their indices.
    """

    def __init__(self) -> None:
        self._asked: dict[int, Asked] = {}
        self.waiting: deque[Asked] = deque()
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[Asked]:
        return iter(self._asked.values())

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._asked

    def get(self, ticket: int) -> Asked | None:
        """The request with a ticket; None: it has its answer, or never was."""
        return self._asked.get(ticket)

    def admit(self, nbytes: int) -> None:
        """See that there is room for one more, whose indices have so many bytes.

        Raises:
            WireError: there is not.
        """
        if len(self) >= REQUESTS_MAX or self.waiting_bytes + nbytes > WAITING_BYTES_MAX:
            raise WireError(f"more than {REQUESTS_MAX} requests wait")

    def add(self, asked: Asked) -> None:
        """Have one wait behind all others."""
        self._asked[asked.ticket] = asked
        self.waiting.append(asked)
        self.waiting_bytes += asked.indices.nbytes

    def begin(self) -> None:
        """The oldest does not wait any more."""
        self.waiting_bytes -= self.waiting.popleft().indices.nbytes

    def end(self, asked: Asked) -> None:
        """One that does not wait has its answer."""
        del self._asked[asked.ticket]

    def withdraw(self, asked: Asked) -> None:
        """One that waits is not to be begun any more."""
        self.waiting.remove(asked)
        self.waiting_bytes -= asked.indices.nbytes
        self.end(asked)

    def clear(self) -> None:
        """Nobody waits for an answer any more."""
        self._asked.clear()
        self.waiting.clear()
        self.waiting_bytes = 0


ALL_SHARE = 4
"""A quarter of the memory: samples that are kept have half of it."""

WINDOW_MIN = 1 << 20


@dataclass(slots=True)
class WindowBudget:
    """What all clients hold together.

    Attributes:
        starved: somebody waits for what clients of other jobs hold.
    """

    bytes_max: int
    held_bytes: int = 0
    starved: bool = False

    @classmethod
    def within(cls, available_bytes: int) -> WindowBudget:
        """A part of the memory that is available when the daemon starts."""
        return cls(max(WINDOW_MIN, available_bytes // ALL_SHARE))

    def window(self, given_bytes: int) -> int:
        """A client's or a job's window: as given, but no more than half of all."""
        return max(WINDOW_MIN, min(given_bytes, self.bytes_max // 2))

    def fits(self, size_bytes: int) -> bool:
        """Whether so much more may be held; something always may where nothing is."""
        if not self.held_bytes or self.held_bytes + size_bytes <= self.bytes_max:
            return True
        self.starved = True
        return False


class MappedSlabs:
    """What a client has of the daemon's caches.

    Args:
        send: queues a message for the client.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._told: dict[int, set[int]] = {}  # identities, by data set

    def announce(self, data: ServedData) -> None:
        """Tell the client of memory that came or went since it was last told."""
        announced = self._told.setdefault(data.number, set())
        slabs = data.slabs()
        gone = announced - {slab.identity for slab in slabs}
        if gone:
            announced -= gone
            self._send(Gone(data.number, sorted(gone)))
        new = [slab for slab in slabs if slab.identity not in announced]
        for at in range(0, len(new), FDS_MAX):
            some = new[at : at + FDS_MAX]
            for slab in some:
                announced.add(slab.identity)
                data.mapped_by(self, slab)
            named = [(slab.identity, slab.number, slab.bytes) for slab in some]
            message = Cache(data.number, data.samples_count, len(data.part_names), named)
            self._send(message, [slab.fd for slab in some], some)

    def dropped(self, data: ServedData, identities: Sequence[int]) -> None:
        """The client has these no more."""
        for identity in identities:
            data.dropped_by(self, identity)

    def close(self, data: ServedData) -> None:
        """The client is gone, and its mappings with it."""
        data.forget(self)
