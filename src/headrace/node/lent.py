"""Lent: the memory of caches that one client has been told of, and may have mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.node.wire import FDS_MAX, Cache, Gone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.node.served import ServedData
    from headrace.node.session import Send

__all__ = ["Lent"]


class Lent:
    """What a client has of the daemon's caches.

    Args:
        send: queues a message for the client.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._told: dict[int, set[int]] = {}  # identities, by data set

    def announce(self, data: ServedData) -> None:
        """Tell the client of memory that came or went since it was last told."""
        told = self._told.setdefault(data.number, set())
        slabs = data.slabs()
        gone = told - {slab.identity for slab in slabs}
        if gone:
            told -= gone
            self._send(Gone(data.number, sorted(gone)))
        new = [slab for slab in slabs if slab.identity not in told]
        for at in range(0, len(new), FDS_MAX):
            some = new[at : at + FDS_MAX]
            for slab in some:
                told.add(slab.identity)
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
