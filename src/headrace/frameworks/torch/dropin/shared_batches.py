"""Shared batches: the memory in which a worker hands over its batches, and how they are packed into it.

`Arena` is an anonymous memfd, mapped by the worker that writes and by the process that takes: nothing has
a name, so nothing can be left behind. The worker alone gives regions out (`Regions`); the consumer alone
hands them back, by clearing the region's byte in a table at the arena's head when the last tensor or
array over the region is gone (`_Lease`). No lock, no message. The lowest free region is used first: what an
arena holds in memory is what was ever in flight at a time.

`pack` pickles a batch as torch would (protocol 4, multiprocessing's reducers), except that tensors and
arrays of ordinary kinds go beside the pickle, byte by byte, and that large `bytes` are written straight
from where they lie. All of it is copied once, into a region or, if it is little, into the message itself.
Whatever is not an ordinary tensor (sparse, nested, a view of part of a storage, with gradients, on a
device) is left to torch's own reducers, inside the same pickle. `unpack` gives tensors and arrays over the
region, writable and each with a storage of its own; `bytes` are made anew.

`ArenaCollate` lets torch's `default_collate` stack tensors in the arena: they are not copied at all.
"""

from __future__ import annotations

import copyreg
import mmap
import os
import pickle
import threading
from collections import ChainMap
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


SLOTS = 4096
"""Regions that can be out at a time; their table fills the first page."""

PAGE = 4096


class Arena:
    """Shared memory of one worker. Inherited over a fork, or sent while a process is started.

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
        return np.asarray(_Lease(self.view(offset, nbytes), self.hand_back, slot))

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


class _Lease:
    """Memory that is let go of when the last array over it is gone."""

    def __init__(self, view: np.ndarray[Any, Any], let_go: Callable[[int], None], key: int) -> None:
        self._let_go = let_go
        self._key = key
        self.__array_interface__ = view.__array_interface__

    def __del__(self) -> None:
        self._let_go(self._key)


class Region(NamedTuple):
    """Some bytes of an arena."""

    slot: int
    offset: int
    nbytes: int


class Regions:
    """Gives out the regions of an arena. Lives in the worker.

    A region is taken, filled, and then sent or dropped; it is free again when whoever holds it, here
    or there, has let go.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._free: list[tuple[int, int]] = [(0, arena.nbytes)]  # (offset, bytes), by offset
        self._slots = list(range(SLOTS - 1, -1, -1))
        self._taken: dict[int, Region] = {}
        self._held: dict[int, Region] = {}  # by address: tensors of this process lie over them

    def take(self, nbytes: int, keep: Sequence[Region] = ()) -> Region | None:
        """Return a region, or None: the arena is full, because batches are kept or too large.

        Args:
            nbytes: how large.
            keep: regions that are about to be sent, whatever has become of the tensors over them.
        """
        need = max(PAGE, -(-nbytes // PAGE) * PAGE)
        # Collected each time: memory that was just handed back is in the cache, the rest is untouched.
        self._collect(keep)
        return self._fit(need, nbytes)

    def hold(self, region: Region) -> Any:
        """Return the region as an array that may be kept: the region is not reused before it is gone."""
        view = self.arena.view(region.offset, region.nbytes)
        address = view.ctypes.data
        self._held[address] = region
        return np.asarray(_Lease(view, self._let_go, address))

    def held_at(self, address: int, nbytes: int) -> Region | None:
        """Return the region that is held, has this address and length, and was not sent, if any."""
        region = self._held.get(address)
        if region is None or region.nbytes != nbytes or self.arena.is_marked(region.slot):
            return None
        return region

    def _let_go(self, address: int) -> None:
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

    def _collect(self, keep: Sequence[Region]) -> None:
        """Find out what was handed back, and join neighbours."""
        held = {region.slot for region in (*self._held.values(), *keep)}
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


ALIGNMENT = 64
"""Tensors begin on a cache line, as torch's allocator has it."""

INLINE_BYTES = 3 << 10
"""Less goes into the message itself, which then still fits into a pipe at once (see `sending`)."""

ARRAY_BYTES_MIN = 1024
"""Smaller arrays are pickled as ever."""

PROTOCOL = 4
"""What multiprocessing's queues use: objects pickle themselves as they would for torch."""


# What ForkingPickler puts together for each pickle; both parts may still grow.
_REDUCERS: Any = ChainMap(ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined] # noqa: SLF001


class Packed(NamedTuple):
    """What goes through the pipe in a batch's place."""

    places: tuple[tuple[int, int, int], ...]
    """Regions of the worker's arena: (slot, offset, bytes). The payload's is the first, if it has one."""

    payload: bytes | None
    """The payload, if it is not in a region: tensors' bytes, then the pickle."""

    pickle_at: int
    """Where in the payload the pickle begins."""


class _Place(NamedTuple):
    """Where a tensor's bytes lie: number of the region (0: the payload), offset, length."""

    region: int
    offset: int
    nbytes: int


class _Pieces:
    """A file that keeps what is written, uncopied."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.nbytes = 0

    def write(self, piece: bytes) -> int:
        """Keep a piece; pickle writes large bytes as they are."""
        self.pieces.append(piece)
        self.nbytes += len(piece)
        return len(piece)


def _is_plain_type(dtype: np.dtype[Any]) -> bool:
    """Whether bytes are all there is; numpy's own pickles come back in this machine's order of bytes."""
    return not dtype.hasobject and dtype.isnative


class _Pickler(pickle.Pickler):
    """Pickles a batch, and puts tensors aside."""

    dispatch_table: Any = _REDUCERS

    def __init__(self, file: _Pieces, regions: Regions | None) -> None:
        super().__init__(file, PROTOCOL)
        self._regions = regions
        self._places: dict[int, tuple[_Place, torch.UntypedStorage]] = {}
        self.beside: list[tuple[_Place, Any]] = []
        self.beside_bytes = 0
        self.sent: list[Region] = []
        self._left: list[torch.UntypedStorage] = []  # to torch's reducers

    def reducer_override(self, obj: Any) -> Any:
        """Reduce ordinary tensors and arrays; leave the rest to their own reducers."""
        kind = type(obj)
        if kind is torch.Tensor:
            return self._tensor(obj)
        if kind is np.ndarray and obj.nbytes >= ARRAY_BYTES_MIN and _is_plain_type(obj.dtype):
            return self._array(obj)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if (
            tensor.layout is not torch.strided
            or tensor.device.type != "cpu"
            or tensor.requires_grad
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor._backward_hooks  # noqa: SLF001 - torch warns about them
        ):
            return NotImplemented
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        address, whole = storage.data_ptr(), tensor.numel() * tensor.element_size() == nbytes
        if nbytes == 0 or not (whole or self._placed(address, nbytes)):
            self._left.append(storage)  # torch's reducer moves it into shared memory of its own
            return NotImplemented
        if any(address == left.data_ptr() for left in self._left):
            return NotImplemented  # it lies where a view of it went
        place = self._place_of(storage, nbytes)
        return _tensor_at, (
            place,
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
        )

    def _place_of(self, storage: torch.UntypedStorage, nbytes: int) -> _Place:
        address = storage.data_ptr()
        place = self._placed(address, nbytes)
        if place is not None:
            return place
        region = None if self._regions is None else self._regions.held_at(address, nbytes)
        if region is not None:
            self.sent.append(region)
            place = _Place(len(self.sent), 0, nbytes)
        else:
            place = self._aside(storage, nbytes)
        self._places[address] = place, storage
        return place

    def _placed(self, address: int, nbytes: int) -> _Place | None:
        """Where a storage was put, if it was and has not moved since."""
        place, storage = self._places.get(address, (None, None))
        if (
            place is None
            or storage is None
            or (storage.data_ptr(), place.nbytes) != (address, nbytes)
        ):
            return None
        return place

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        order = "F" if array.flags.fnc else "C"
        flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
        place = self._aside(flat.view(np.uint8), array.nbytes)
        return _array_at, (place, array.dtype, array.shape, order)

    def _aside(self, content: Any, nbytes: int) -> _Place:
        place = _Place(0, -(-self.beside_bytes // ALIGNMENT) * ALIGNMENT, nbytes)
        self.beside_bytes = place.offset + nbytes
        self.beside.append((place, content))
        return place


def pack(batch: Any, regions: Regions | None) -> Packed | None:
    """Pack a batch.

    Returns:
        What to send, or None: it does not fit, and torch has to send it.

    Raises:
        Exception: the batch cannot be pickled.
    """
    pieces = _Pieces()
    pickler = _Pickler(pieces, regions)
    pickler.dump(batch)
    pickle_at = -(-pickler.beside_bytes // ALIGNMENT) * ALIGNMENT
    total = pickle_at + pieces.nbytes
    if total <= INLINE_BYTES and not pickler.beside:
        return Packed(_send(regions, pickler.sent), b"".join(pieces.pieces), 0)
    if total <= INLINE_BYTES:
        payload = bytearray(total)
        _fill(memoryview(payload), pickler, pieces, pickle_at)
        return Packed(_send(regions, pickler.sent), bytes(payload), pickle_at)
    region = None if regions is None else regions.take(total, pickler.sent)
    if regions is None or region is None:
        return None
    _fill(regions.arena.view(region.offset, region.nbytes).data, pickler, pieces, pickle_at)
    return Packed(_send(regions, [region, *pickler.sent]), None, pickle_at)


def _send(regions: Regions | None, sent: Sequence[Region]) -> tuple[tuple[int, int, int], ...]:
    if regions is None:
        return ()
    for region in sent:
        regions.arena.mark(region.slot)  # it is the consumer's now
    return tuple((region.slot, region.offset, region.nbytes) for region in sent)


def _fill(target: memoryview, pickler: _Pickler, pieces: _Pieces, at: int) -> None:
    for place, content in pickler.beside:
        if isinstance(content, torch.UntypedStorage):
            # Not before: torch's reducers move a storage, of which something else in the batch is a view.
            over = torch.empty(0, dtype=torch.uint8).set_(content, 0, (place.nbytes,), (1,))
            target[place.offset : place.offset + place.nbytes] = over.numpy().data
        else:
            target[place.offset : place.offset + place.nbytes] = content
    for piece in pieces.pieces:
        target[at : at + len(piece)] = piece
        at += len(piece)


class _Unpacking(threading.local):
    """The regions of the batch that this thread unpacks."""

    regions: Sequence[Any] = ()
    storages: dict[_Place, torch.UntypedStorage]


_unpacking = _Unpacking()


def unpack(packed: Packed, arena: Arena | None) -> Any:
    """Return the batch.

    Raises:
        Exception: something in the batch cannot be unpickled here.
    """
    if not packed.places and not packed.pickle_at:
        assert packed.payload is not None
        return pickle.loads(packed.payload)  # noqa: S301 - our own worker's
    regions = [] if arena is None else [arena.lease(*place) for place in packed.places]
    if packed.payload is None:
        payload = regions[0]
    else:
        # A copy that tensors may lie over and that may be written.
        payload = np.frombuffer(
            bytearray(packed.payload) if packed.pickle_at else packed.payload, np.uint8
        )
        regions.insert(0, payload)
    _unpacking.regions, _unpacking.storages = regions, {}
    try:
        return pickle.loads(payload.data[packed.pickle_at :])  # noqa: S301 - our own worker's
    finally:
        _unpacking.regions, _unpacking.storages = (), {}


def _bytes_at(place: _Place) -> Any:
    return _unpacking.regions[place.region][place.offset : place.offset + place.nbytes]


def _tensor_at(
    place: _Place,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    storage = _unpacking.storages.get(place)
    if storage is None:
        storage = torch.from_numpy(_bytes_at(place)).untyped_storage()
        _unpacking.storages[place] = storage
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _array_at(
    place: _Place, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, buffer=_bytes_at(place), order=order)


class ArenaCollate:
    """Stacks tensors into regions of a worker's arena."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def install(self) -> None:
        """Let `default_collate` stack into the arena, in this process."""
        registry = torch_collate.default_collate_fn_map
        theirs = registry.get(torch.Tensor)
        if theirs is torch_collate.collate_tensor_fn:  # else the user's own: left alone
            registry[torch.Tensor] = self.stack

    def stack(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """Stack as torch does, in the arena."""
        first = batch[0]
        nbytes = len(batch) * first.numel() * first.element_size()
        out = self._empty(batch, first, nbytes) if nbytes > INLINE_BYTES else None
        if out is None and nbytes <= INLINE_BYTES and self._is_plain(batch, first):
            return torch.stack(tuple(batch), 0)  # goes inline: no need of a shared-memory file
        if out is None:
            theirs: torch.Tensor = torch_collate.collate_tensor_fn(
                batch, collate_fn_map=collate_fn_map
            )
            return theirs
        return torch.stack(tuple(batch), 0, out=out)

    @staticmethod
    def _is_plain(batch: Sequence[torch.Tensor], first: torch.Tensor) -> bool:
        shape, dtype = first.shape, first.dtype
        return all(
            type(one) is torch.Tensor
            and one.layout is torch.strided
            and one.shape == shape
            and one.dtype is dtype
            and one.device.type == "cpu"
            and not one.requires_grad
            and not one.is_quantized
            and not one.is_conj()
            and not one.is_neg()
            for one in batch
        )

    def _empty(
        self, batch: Sequence[torch.Tensor], first: torch.Tensor, nbytes: int
    ) -> torch.Tensor | None:
        if not self._is_plain(batch, first):
            return None
        region = self._regions.take(nbytes)
        if region is None:
            return None
        memory = torch.from_numpy(self._regions.hold(region))
        return memory.view(first.dtype).view(len(batch), *first.shape)
