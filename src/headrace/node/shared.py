"""Shared: the daemon's cache of one data set as a client sees it: an index and slabs, mapped read-only.

A client gathers what is held there by itself, without a message. The daemon sends descriptors of memory
that came, and says what it has given back; that is unmapped at once and answered, because until then
it counts as the daemon's. Batches are copies, and stay valid whatever goes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace import _native
from headrace.errors import HeadraceError
from headrace.node.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.node.wire import Cache

__all__ = ["SharedCache"]

_log = logging.getLogger("headrace")

INDEX = 0
"""The number that the index has among the slabs."""


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
        """Map memory that has come.

        Raises:
            WireError: it is not what it should be.
        """
        if len(message.slabs) != len(fds):
            raise WireError(f"{len(message.slabs)} slabs came with {len(fds)} descriptors")
        if self._unusable:
            return
        try:
            for (identity, number, size), fd in zip(message.slabs, fds, strict=True):
                self._add(message, identity, number, size, fd)
        except (ValueError, TypeError, OverflowError) as e:
            raise WireError(f"memory of the cache: {e}") from e
        except HeadraceError as e:  # the system maps no more: the daemon can still be asked
            _log.warning("the node daemon's cache cannot be mapped, and is asked instead: %s", e)
            self.clear()
            self._unusable = True

    def _add(self, message: Cache, identity: int, number: int, size: int, fd: int) -> None:
        if number == INDEX:
            self.view = _native.CacheView(fd, size, samples=message.samples, parts=message.parts)
        elif self.view is None:
            raise WireError("a slab came before its index")
        else:
            self.view.add_slab(number, fd, size)
        self._numbers[identity] = number

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
