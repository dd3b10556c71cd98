"""Requests: what a client asked for and has no answer to: batches that wait, in their order, or are read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.node.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from headrace.node.allowances import Charge
    from headrace.node.served import ServedData

__all__ = ["REQUESTS_MAX", "Asked", "Requests"]

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
