"""Trees: nested dicts, lists and tuples of arrays and plain values, taken apart (`resharding` builds them).

Taking apart gives a list of arrays with names, and an outline in JSON that says where they belong. Nothing
is pickled: what is neither a container, an array nor a plain value is refused with its place.

torch's tensors are arrays, too, without torch being imported here before it is needed: their bytes are
taken, and they are made again when they are loaded. Tensors that share memory (tied weights) are kept once.
"""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16",
    "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64",
    "I64": "int64", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""Names of element types in files, and what numpy and torch call them."""

_NAMES = {name: short for short, name in DTYPES.items()}
_PLAIN = (bool, int, float, str, type(None))
_DEPTH_MAX = 100
_CHUNKS = "__create_chunk_list__"


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array of a tree."""

    name: str
    dtype: str  # as in DTYPES' keys
    shape: tuple[int, ...]
    nbytes: int
    source: Any  # a numpy array or a torch tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """This rank's part of an array that is cut among ranks.

    Raises:
        ValueError: the part does not lie in the whole.
    """

    local: Any
    """The part: a numpy array or a torch tensor."""
    shape: tuple[int, ...]
    """Of the whole."""
    offsets: tuple[int, ...]
    """Where the part begins in the whole, in each dimension."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        object.__setattr__(self, "offsets", tuple(map(int, self.offsets)))
        places = list(zip(self.offsets, self.local.shape, self.shape, strict=False))
        whole = len(places) == len(self.shape) == len(self.offsets) == len(self.local.shape)
        if not whole or any(at < 0 or at + n > size for at, n, size in places):
            raise ValueError(
                f"a part of shape {list(self.local.shape)} at {list(self.offsets)} does not lie in an "
                f"array of shape {list(self.shape)}"
            )


def part_of(value: object) -> Sharded | None:
    """This rank's part, if the value is one of an array that is cut among ranks: a Sharded, or a DTensor."""
    if isinstance(value, Sharded):
        return value
    if not is_tensor(value) or not hasattr(value, "to_local") or not hasattr(value, _CHUNKS):
        return None
    tensor: Any = value
    # What torch.distributed.checkpoint asks a tensor, too.
    offsets = [chunk.offsets for chunk in getattr(tensor, _CHUNKS)()]
    at = offsets[0] if offsets else (0,) * tensor.dim()
    return Sharded(tensor.to_local(), tensor.shape, at)


def is_array(value: object) -> bool:
    """Whether it is a numpy array or a torch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor, without importing torch."""
    names = ((cls.__module__, cls.__name__) for cls in type(value).__mro__)
    return ("torch", "Tensor") in names


def take_apart(tree: Any) -> tuple[list[Leaf], Any]:
    """The arrays of a tree, and its outline.

    Raises TypeError if something in it cannot be kept; says where.
    """
    taker = _Taker()
    return taker.leaves, taker.outline(tree, (), 0)


class _Taker:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._names: set[str] = set()
        self._seen: dict[Any, str] = {}

    def outline(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise TypeError(f"the tree is deeper than {_DEPTH_MAX} at {'.'.join(path[:5])}...")
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return {"value": value}
        if isinstance(value, dict):
            items = []
            for key, part in value.items():
                if type(key) not in (str, int):
                    where = ".".join(path) or "the tree"
                    raise TypeError(f"{where} has the key {key!r}, expected str or int")
                items.append([key, self.outline(part, (*path, str(key)), depth + 1)])
            return {"dict": items}
        if type(value) in (list, tuple):
            parts = [self.outline(p, (*path, str(i)), depth + 1) for i, p in enumerate(value)]
            return {type(value).__name__: parts}
        if (part := part_of(value)) is not None:
            local = self._array(part.local, path)
            return {"sharded": {"part": local, "shape": part.shape, "offsets": part.offsets}}
        return self._array(value, path)

    def _array(self, value: Any, path: tuple[str, ...]) -> dict[str, str]:
        if is_tensor(value):
            return {"tensor": self._leaf(value, path, _tensor_key(value, path))}
        if isinstance(value, np.generic):
            return {"scalar": self._leaf(np.asarray(value), path, None)}
        if isinstance(value, np.ndarray):
            return {"array": self._leaf(value, path, id(value))}
        raise TypeError(
            f"{'.'.join(path) or 'the tree'} is a {type(value).__name__}, expected a dict, list, tuple, "
            "array, tensor, number, string or None"
        )

    def _leaf(self, source: Any, path: tuple[str, ...], key: Any) -> str:
        if key is not None and key in self._seen:
            return self._seen[key]
        kind = str(source.dtype).removeprefix("torch.")
        foreign = isinstance(source, np.ndarray) and source.dtype.byteorder not in "=|<"
        if kind not in _NAMES or foreign:
            raise TypeError(
                f"{'.'.join(path)} has elements of type {source.dtype}, expected one of {sorted(_NAMES)}"
            )
        base = name = ".".join(path) or "tree"
        count = 1
        while name in self._names or name == "__metadata__":
            count += 1
            name = f"{base}#{count}"
        self._names.add(name)
        if key is not None:
            self._seen[key] = name
        nbytes = int(source.nbytes)
        self.leaves.append(Leaf(name, _NAMES[kind], tuple(source.shape), nbytes, source))
        return name


def _tensor_key(tensor: Any, path: tuple[str, ...]) -> Any:
    """What is equal for tensors that are the same memory; refuses what has no memory of its own here."""
    if hasattr(tensor, "to_local") or tensor.layout.__repr__() != "torch.strided":
        raise TypeError(
            f"{'.'.join(path)} is a {type(tensor).__name__} with layout {tensor.layout}, expected a plain "
            "tensor or a DTensor: of others save to_local() as headrace.checkpoint.Sharded"
        )
    if tensor.device.type == "meta":
        raise TypeError(f"{'.'.join(path)} is a meta tensor: it has no values")
    if not tensor.numel():
        return None
    return (
        str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    )  # fmt: skip


def leaf_bytes(leaf: Leaf) -> NDArray[np.uint8]:
    """The bytes of an array, in C order; a view where it can be one."""
    if isinstance(leaf.source, np.ndarray):
        return np.ascontiguousarray(leaf.source).reshape(-1).view(np.uint8)
    torch = importlib.import_module("torch")
    tensor = leaf.source.detach().cpu().contiguous().reshape(-1)
    flat: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return flat


def array_of(kind: str, data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Any:
    """The array, tensor or scalar (`kind`) over some bytes, whose memory it shares."""
    if kind == "tensor":
        torch = importlib.import_module("torch")
        element = getattr(torch, DTYPES[dtype])
        if not data.size:
            return torch.empty(shape, dtype=element)
        return torch.from_numpy(data).view(element).reshape(shape)
    array = data.view(DTYPES[dtype]).reshape(shape)
    return array[()] if kind == "scalar" else array


_ALIGNMENT = 64
_THREADS = 4  # that copy: one core does not reach the memory's bandwidth
_ALONE_BYTES = 32 << 20  # smaller trees are copied by one


class TreeSnapshot:
    """Memory for one copy of a tree's arrays."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Copies the arrays; what it returned before is overwritten."""
        starts, end = [], 0
        for leaf in leaves:
            starts.append(end)
            end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory.size < end:
            self._memory = np.empty(0, np.uint8)  # not both at once
            self._memory = np.empty(end, np.uint8)
        places = [self._memory[s : s + leaf.nbytes] for s, leaf in zip(starts, leaves, strict=True)]
        if end < _ALONE_BYTES:
            return list(map(_copied, leaves, places))
        with ThreadPoolExecutor(_THREADS, "snapshot") as pool:
            return list(pool.map(_copied, leaves, places))


def _copied(leaf: Leaf, place: NDArray[np.uint8]) -> Leaf:
    """Copies a leaf's bytes into the snapshot. Of types that numpy lacks the bytes are enough."""
    place[:] = leaf_bytes(leaf)
    kind = DTYPES[leaf.dtype]
    known = kind != "bfloat16" and not kind.startswith("float8")
    return replace(leaf, source=place.view(kind) if known else place)
