"""The daemon's memory as a client sees it: read-only mappings, leases of batches in them, the shared cache.

A batch's arrays keep its lease alive, and the lease its mapping. When the last array, view or tensor
over a batch is gone, its lease is put on a list that goes back to the daemon with the next request;
until then the daemon does not write there. Nothing here waits, sends or locks: a lease may end in the
middle of anything.

The daemon's cache of one data set is an index and slabs (`SharedCache`). A client gathers what is held there
by itself, without a message. The daemon sends descriptors of memory that came, and says what it has given
back; that is unmapped at once and answered, because until then it counts as the daemon's. Batches gathered
from it are copies, and stay valid whatever goes.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.errors import HeadraceError
from headrace.node.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.node.wire import Cache, Samples


class LeaseLedger:
    """Which leases live, and which have ended and wait to be given back."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.live: set[int] = set()
        self.ended: list[int] = []
        self._forked: set[int] = set()
        self._taking = threading.Lock()

    def end(self, ticket: int) -> None:
        """A lease's last user is gone; called wherever that happens."""
        if os.getpid() == self.pid:
            self.live.discard(ticket)
            self.ended.append(ticket)

    def fork(self) -> None:
        """A child will look at what lives now for as long as it likes."""
        if os.getpid() == self.pid:
            self._forked |= self.live.copy()

    def take_ended(self) -> tuple[list[int], list[int]]:
        """Leases that ended since: to be given back, and to be abandoned."""
        with self._taking:  # `end` may come meanwhile, from anywhere
            count = len(self.ended)
            ended, self.ended[:count] = self.ended[:count], []
        if not self._forked:
            return ended, []
        forked = [t for t in ended if t in self._forked]
        self._forked.difference_update(forked)
        return [t for t in ended if t not in set(forked)], forked


class _Lease:
    """Memory of one batch: what its arrays stand on."""

    __slots__ = ("__array_interface__", "__weakref__", "_end", "_memory", "_ticket")

    def __init__(
        self, memory: NDArray[np.uint8], nbytes: int, ticket: int, end: Callable[[int], None]
    ) -> None:
        self._memory = memory
        self._ticket = ticket
        self._end = end
        self.__array_interface__ = {**memory.__array_interface__, "shape": (nbytes,)}

    def __del__(self) -> None:
        self._end(self._ticket)


class Mappings:
    """The buffers that a client has mapped."""

    def __init__(self, ledger: LeaseLedger) -> None:
        self.ledger = ledger
        self._buffers: dict[int, NDArray[np.uint8]] = {}

    def add(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> None:
        """Map buffers that have come.

        Raises:
            WireError: descriptors are missing, or smaller than said.
            OSError: no more can be mapped.
        """
        if len(buffers) != len(fds):
            raise WireError(f"{len(buffers)} buffers came with {len(fds)} descriptors")
        for (number, size), fd in zip(buffers, fds, strict=True):
            if size < 1 or os.fstat(fd).st_size < size:
                raise WireError(f"buffer {number} is smaller than its {size} bytes")
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._buffers[number] = np.frombuffer(memory, np.uint8)

    def retire(self, buffers: Sequence[int]) -> None:
        """Let go of buffers; batches in them stay valid."""
        for number in buffers:
            self._buffers.pop(number, None)

    def batch(self, reply: Samples, indices: NDArray[np.int64], parts: int) -> _native.Batch:
        """The batch of a reply. The daemon is believed in nothing that could hurt.

        Raises WireError if it lies outside its buffer, or has other shapes than were asked for.
        """
        memory = self._buffers.get(reply.buffer)
        if memory is None or not 0 <= reply.nbytes <= memory.nbytes:
            raise WireError(f"batch {reply.ticket} lies in no buffer that has come")
        columns = (reply.offsets, reply.lengths, reply.labels)
        if any(len(column) % 8 for column in columns):
            raise WireError(f"batch {reply.ticket} has columns that are no numbers")
        offsets, lengths, labels = (np.frombuffer(column, np.int64) for column in columns)
        self.ledger.live.add(reply.ticket)
        lease: Any = _Lease(memory, reply.nbytes, reply.ticket, self.ledger.end)
        try:
            return _native.Batch.lent(
                data=np.asarray(lease), indices=indices, offsets=offsets, lengths=lengths,
                labels=labels, parts=parts, way=reply.way,
            )  # fmt: skip
        except ValueError as e:
            raise WireError(f"batch {reply.ticket}: {e}") from e


_log = logging.getLogger("headrace")

INDEX = 0  # the number that the index has among the slabs


class SharedCache:
    """One data set's cache.

    Attributes:
        view: looks samples up; None while nothing is held, or it cannot be mapped.
    """

    def __init__(self) -> None:
        self.view: _native.CacheView | None = None
        self._numbers: dict[int, int] = {}  # identity -> number
        self._unusable = False

    def add(self, message: Cache, fds: Sequence[int]) -> None:
        """Map memory that has come. Raises WireError if it is not what it should be."""
        if len(message.slabs) != len(fds):
            raise WireError(f"{len(message.slabs)} slabs came with {len(fds)} descriptors")
        if self._unusable:
            return
        try:
            for (identity, number, size), fd in zip(message.slabs, fds, strict=True):
                if number == INDEX:
                    self.view = _native.CacheView(
                        fd, size, samples=message.samples, parts=message.parts
                    )
                elif self.view is None:
                    raise WireError("a slab came before its index")
                else:
                    self.view.add_slab(number, fd, size)
                self._numbers[identity] = number
        except (ValueError, TypeError, OverflowError) as e:
            raise WireError(f"memory of the cache: {e}") from e
        except HeadraceError as e:  # the system maps no more: the daemon can still be asked
            _log.warning("the node daemon's cache cannot be mapped, and is asked instead: %s", e)
            self.clear()
            self._unusable = True

    def drop(self, identities: Sequence[int]) -> None:
        """Let go of memory that the daemon has given back."""
        for identity in identities:
            number = self._numbers.pop(identity, None)
            if number == INDEX:
                self.view = None
            elif number is not None and self.view is not None:
                self.view.drop_slab(number)

    def clear(self) -> None:
        """Let go of everything."""
        self.view = None
        self._numbers.clear()
