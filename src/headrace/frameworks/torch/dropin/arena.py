"""Arena: the memory in which one worker hands over its batches.

An anonymous memfd, mapped by the worker that writes and by the process that takes: nothing has a
name, so nothing can be left behind. It is cut into regions. The worker alone gives regions out
(`Regions`), the consumer alone hands them back: it clears the region's byte in a table at the
arena's head when the last tensor or array over the region is gone (`Lease`). No lock, no message.

Pages are touched only when they are first used, and the lowest free region is used first: what an
arena holds in memory is what was ever in flight at a time.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing import reduction
from typing import Any

import numpy as np

__all__ = ["Arena", "Lease", "Region", "Regions"]

SLOTS = 4096
"""Regions that can be out at a time; their table fills the first page."""

PAGE = 4096


class Arena:
    """Shared memory of one worker. Inherited over a fork, or sent while a process is started.

    Args:
        nbytes: room for batches, in bytes.

    Raises:
        OSError: no descriptor or no memory is left.
    """

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("headrace-batches", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, SLOTS + nbytes)
            self._map(fd)
        except BaseException:
            os.close(fd)
            raise

    def _map(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, 0)
        self._fd: int | None = fd
        self.nbytes = len(self._memory) - SLOTS
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._owner = os.getpid()
        self._leases = 0
        self._retired = False

    def keep_mapping_only(self) -> None:
        """Close the descriptor: the process that it was for has started."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def view(self, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return uint8, shape (nbytes,), writable: the bytes from `offset` on."""
        return self._bytes[SLOTS + offset : SLOTS + offset + nbytes]

    def mark(self, slot: int) -> None:
        """Say that a region is the consumer's."""
        self._memory[slot] = 1

    def is_marked(self, slot: int) -> bool:
        """Whether a region is still the consumer's."""
        return self._memory[slot] != 0

    def lease(self, slot: int, offset: int, nbytes: int) -> Any:
        """Take a region that the worker marked.

        Returns:
            uint8, shape (nbytes,), writable. The region is handed back when this array and all that
            lies over it are gone.
        """
        self._leases += 1
        return np.asarray(Lease(self, slot, self.view(offset, nbytes)))

    def hand_back(self, slot: int) -> None:
        """Say that nobody here looks at a region any more."""
        if os.getpid() != self._owner:
            return  # a child's copy of a tensor: the region is its parent's
        self._memory[slot] = 0
        self._leases -= 1
        if self._retired and self._leases <= 0:
            self._empty()

    def retire(self) -> None:
        """Free the memory as soon as no batch lies in it; the worker has ended."""
        if os.getpid() == self._owner and not self._retired:
            self._retired = True
            if self._leases <= 0:
                self._empty()

    def _empty(self, advice: int = mmap.MADV_REMOVE) -> None:
        # Another loader's workers may have inherited the mapping: unmapping it here would not free it. The
        # advice is bound early: a loader that a script keeps to its end outlives what modules hold.
        self._memory.madvise(advice)

    def __del__(self) -> None:
        self.keep_mapping_only()

    def __reduce__(self) -> Any:
        # Allowed only while a process is started, which gets the descriptor itself.
        assert self._fd is not None, "an arena is sent before its processes have started"
        return _received, (reduction.DupFd(self._fd),)


def _received(sent: Any) -> Arena:
    arena = Arena.__new__(Arena)
    arena._map(sent.detach())  # noqa: SLF001 - the other constructor
    return arena


class Lease:
    """Keeps a region the consumer's for as long as an array over it lives."""

    def __init__(self, arena: Arena, slot: int, view: np.ndarray[Any, Any]) -> None:
        self._arena = arena
        self._slot = slot
        self.__array_interface__ = view.__array_interface__

    def __del__(self) -> None:
        self._arena.hand_back(self._slot)


class Region:
    """Some bytes of an arena.

    Args:
        slot: its number.
        offset: where it begins in the arena.
        nbytes: its length.
    """

    __slots__ = ("nbytes", "offset", "slot")

    def __init__(self, slot: int, offset: int, nbytes: int) -> None:
        self.slot = slot
        self.offset = offset
        self.nbytes = nbytes


class Regions:
    """Gives out the regions of an arena. Lives in the worker.

    A region is taken, filled, and then sent or dropped; it is free again when whoever holds it, here
    or there, has let go.

    Args:
        arena: the memory.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._free: list[tuple[int, int]] = [(0, arena.nbytes)]  # (offset, bytes), by offset
        self._slots = list(range(SLOTS - 1, -1, -1))
        self._taken: dict[int, Region] = {}
        self._held: dict[int, Region] = {}  # by address: tensors of this process lie over them

    def take(self, nbytes: int) -> Region | None:
        """Return a region, or None: the arena is full, because batches are kept or too large."""
        need = max(PAGE, -(-nbytes // PAGE) * PAGE)
        # Collected each time: memory that was just handed back is in the cache, the rest is untouched.
        self._collect()
        return self._fit(need, nbytes)

    def view(self, region: Region) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return uint8, shape (bytes of the region,), to be filled now and not kept."""
        return self.arena.view(region.offset, region.nbytes)

    def hold(self, region: Region) -> Any:
        """Return the region as an array that may be kept: the region is not reused before it is gone."""
        array = np.asarray(_Hold(self, region))
        self._held[array.ctypes.data] = region
        return array

    def held_at(self, address: int, nbytes: int) -> Region | None:
        """Return the region that is held, has this address and length, and was not sent, if any."""
        region = self._held.get(address)
        if region is None or region.nbytes != nbytes or self.arena.is_marked(region.slot):
            return None
        return region

    def send(self, region: Region) -> None:
        """The region goes to the consumer."""
        self.arena.mark(region.slot)

    def let_go(self, address: int) -> None:
        """The tensors of this process over a region are gone."""
        self._held.pop(address, None)

    def _fit(self, need: int, nbytes: int) -> Region | None:
        if not self._slots:
            return None
        for i, (offset, room) in enumerate(self._free):
            if room >= need:
                if room == need:
                    del self._free[i]
                else:
                    self._free[i] = (offset + need, room - need)
                region = Region(self._slots.pop(), offset, nbytes)
                self._taken[region.slot] = region
                return region
        return None

    def _collect(self) -> None:
        """Find out what was handed back, and join neighbours."""
        held = {region.slot for region in self._held.values()}
        gone = [
            region
            for slot, region in self._taken.items()
            if slot not in held and not self.arena.is_marked(slot)
        ]
        if not gone:
            return
        for region in gone:
            del self._taken[region.slot]
            self._slots.append(region.slot)
            need = max(PAGE, -(-region.nbytes // PAGE) * PAGE)
            self._free.append((region.offset, need))
        self._free.sort()
        joined: list[tuple[int, int]] = []
        for offset, room in self._free:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((offset, room))
        self._free = joined


class _Hold:
    """Keeps a region from being reused while a tensor of this process lies over it."""

    def __init__(self, regions: Regions, region: Region) -> None:
        self._regions = regions
        self.__array_interface__ = regions.view(region).__array_interface__

    def __del__(self) -> None:
        self._regions.let_go(self.__array_interface__["data"][0])
