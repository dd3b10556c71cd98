"""Packing: a batch on its way from a worker, in one piece of memory.

The batch is pickled as torch would pickle it (protocol 4, multiprocessing's reducers), except that
tensors and arrays of ordinary kinds go beside the pickle, byte by byte, and that large `bytes` are
written straight from where they lie. All of it is then copied once, into a region of the worker's
arena; or, if it is little, into the message itself. What lies in an arena already (a batch that
was collated there) is not copied at all.

Whatever is not an ordinary tensor (sparse, nested, a view of part of a storage, with gradients, on
a device) is left to torch's own reducers, inside the same pickle.

On the other side tensors and arrays lie over the region, writable and each with a storage of its
own; `bytes` are made anew, as bytes.
"""

from __future__ import annotations

import copyreg
import pickle
import threading
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.frameworks.torch.dropin.arena import Arena, Region, Regions

__all__ = ["Packed", "pack", "unpack"]

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


class _Pickler(pickle.Pickler):
    """Pickles a batch, and puts tensors aside."""

    dispatch_table: Any = _REDUCERS

    def __init__(self, file: _Pieces, regions: Regions | None) -> None:
        super().__init__(file, PROTOCOL)
        self._regions = regions
        self._places: dict[int, _Place] = {}
        self.beside: list[tuple[_Place, Any]] = []
        self.beside_bytes = 0
        self.sent: list[Region] = []
        self.kept: list[Any] = []  # what the keys of `_places` are addresses of

    def reducer_override(self, obj: Any) -> Any:
        """Reduce ordinary tensors and arrays; leave the rest to their own reducers."""
        kind = type(obj)
        if kind is torch.Tensor:
            return self._tensor(obj)
        if kind is np.ndarray and not obj.dtype.hasobject and obj.nbytes >= ARRAY_BYTES_MIN:
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
        if nbytes == 0 or tensor.numel() * tensor.element_size() != nbytes:
            return NotImplemented
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
        place = self._places.get(address)
        if place is not None and place.nbytes == nbytes:
            return place
        region = None if self._regions is None else self._regions.held_at(address, nbytes)
        if region is not None:
            self.sent.append(region)
            place = _Place(len(self.sent), 0, nbytes)
        else:
            over = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
            place = self._aside(over.numpy(), nbytes)
        self._places[address] = place
        self.kept.append(storage)
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

    Args:
        batch: what `collate_fn` returned.
        regions: of the worker's arena; None if there is none.

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
    region = None if regions is None else regions.take(total)
    if regions is None or region is None:
        return None
    _fill(regions.view(region).data, pickler, pieces, pickle_at)
    return Packed(_send(regions, [region, *pickler.sent]), None, pickle_at)


def _send(regions: Regions | None, sent: Sequence[Region]) -> tuple[tuple[int, int, int], ...]:
    if regions is None:
        return ()
    for region in sent:
        regions.send(region)
    return tuple((region.slot, region.offset, region.nbytes) for region in sent)


def _fill(target: memoryview, pickler: _Pickler, pieces: _Pieces, at: int) -> None:
    for place, content in pickler.beside:
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

    Args:
        packed: what the worker sent.
        arena: that worker's.

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
