"""Resharding: the tree of one rank, out of a checkpoint that as many ranks or another number of them saved.

What a tree holds says what becomes of it:

* numbers, strings, arrays and tensors are replicated: equal on all ranks that saved them, and loaded once
* the state of a loader is one for all ranks; what the ranks had hashed of the epoch is added up
* `Sharded` parts, and DTensors, are cut anew: as `like` has them, else in equal parts along the same dimension

What differs between ranks and is none of these is refused: nobody could say whose it is. With as many ranks
as saved it, each rank gets its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.checkpoint.folder import read_headers, read_shard
from headrace.checkpoint.tree import Sharded, array_of, is_array, part_of
from headrace.errors import CheckpointError
from headrace.order import OrderState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.checkpoint.folder import RankRecord, ShardArray


_THREADS_MAX = 16  # shards that are read side by side


class _Box(NamedTuple):
    """A part of an array: where it begins in the whole, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def common(self, other: _Box) -> _Box:
        """What lies in both."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        return _Box(starts, tuple(max(0, e - s) for s, e in zip(starts, ends, strict=True)))

    def within(self, outer: _Box) -> tuple[slice, ...]:
        """Its place in a larger box."""
        return tuple(
            slice(a - b, a - b + n)
            for a, n, b in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )


class PartsElsewhereError(Exception):
    """What a rank wants lies in the records of others, which were not given."""


class Resharding:
    """The tree of one rank of `ranks` that load it, under way, out of the records of all that saved it.

    It is walked twice: to learn which arrays it needs, and to put them together. `own` is the key of this
    rank's own record, if as many saved it: what is not cut is taken from it; that record may be given alone.
    """

    def __init__(
        self,
        place: str,
        records: Mapping[int, RankRecord],
        rank: int,
        ranks: int,
        *,
        own: int | None,
    ) -> None:
        self._place = place
        self._records = records
        self._rank, self._ranks, self._own = rank, ranks, own
        self._headers = {
            r: {name: kind for shard in record.shards for name, kind in read_headers(place, shard)}
            for r, record in records.items()
        }
        self._wanted: dict[int, set[str]] = {r: set() for r in records}
        self._arrays: dict[tuple[int, str], ShardArray] | None = None
        self._built: dict[str, Any] = {}

    def tree(self, like: Any) -> tuple[Any, int]:
        """The tree, and how many bytes were read for it.

        Raises CheckpointError if something differs between the ranks, or is not there as a whole;
        CorruptCheckpoint if its bytes are not what was saved; PartsElsewhereError if only the own record was
        given, and does not suffice.
        """
        outlines = {r: record.outline for r, record in self._records.items()}
        self._build(outlines, like, ())
        self._arrays = {}
        jobs = [
            (r, shard, names)
            for r, record in self._records.items()
            for shard in record.shards
            if (names := self._wanted[r] & set(shard.crc32c))
        ]
        with ThreadPoolExecutor(min(len(jobs), _THREADS_MAX) or 1, "restore") as pool:
            read = pool.map(lambda job: read_shard(self._place, job[1], job[2]), jobs)
            for (r, _, _), arrays in zip(jobs, read, strict=True):
                self._arrays |= {(r, name): array for name, array in arrays.items()}
        nbytes = sum(array[0].nbytes for array in self._arrays.values())
        return self._build(outlines, like, ()), nbytes

    # -- the tree ----------------------------------------------------------------------------------

    def _build(self, nodes: Mapping[int, Any], like: Any, path: tuple[str, ...]) -> Any:
        kinds = {next(iter(node)) for node in self._voices(nodes)}
        if len(kinds) != 1:
            raise self._differs(path)
        (kind,) = kinds
        values = {r: node[kind] for r, node in nodes.items() if kind in node}
        first = next(self._voices(values))
        match kind:
            case "value":
                if len({repr(value) for value in self._voices(values)}) != 1:  # NaN is like NaN
                    raise self._differs(path)
                return first
            case "dict":
                dicts = {r: dict(map(tuple, items)) for r, items in values.items()}
                return self._dict(dicts, like, path)
            case "list" | "tuple":
                if any(len(value) != len(first) for value in self._voices(values)):
                    raise self._differs(path)
                parts = [
                    self._build(
                        {r: v[i] for r, v in values.items() if i < len(v)},
                        like[i] if isinstance(like, (list, tuple)) and i < len(like) else None,
                        (*path, str(i)),
                    )
                    for i in range(len(first))
                ]
                return tuple(parts) if kind == "tuple" else parts
            case "sharded":
                return self._part(values, like, path)
        return self._replicated(kind, values, like, path)

    def _voices(self, values: Mapping[int, Any]) -> Iterator[Any]:
        """Those that have a say: this rank's own alone, or all ranks', which must agree."""
        return iter(values.values() if self._own is None else [values[self._own]])

    def _dict(self, dicts: Mapping[int, dict[Any, Any]], like: Any, path: tuple[str, ...]) -> Any:
        keys = next(self._voices(dicts)).keys()
        if any(items.keys() != keys for items in self._voices(dicts)):
            raise self._differs(path)
        if self._own is None and keys == OrderState.keys(keys):
            states = [
                {key: node.get("value") for key, node in items.items()} for items in dicts.values()
            ]
            try:
                return OrderState.share_out(states, self._rank)
            except ValueError:
                raise self._differs(path) from None
        return {
            key: self._build(
                {r: items[key] for r, items in dicts.items() if key in items},
                like.get(key) if isinstance(like, Mapping) else None,
                (*path, str(key)),
            )
            for key in keys
        }

    def _differs(self, path: Sequence[str]) -> CheckpointError:
        saved = len(self._records)
        return CheckpointError(
            f"{self._place}: {'.'.join(path) or 'the tree'} differs between the {saved} ranks that saved it, "
            f"and is loaded by {self._ranks}.",
            path=self._place,
            next_step=f"Load it with {saved} ranks, or save what each rank has for itself as "
            "headrace.checkpoint.Sharded.",
        )

    # -- arrays ------------------------------------------------------------------------------------

    def _replicated(
        self, kind: str, names: Mapping[int, str], like: Any, path: tuple[str, ...]
    ) -> Any:
        facts = {}
        for r, name in names.items():
            shards = self._records[r].shards
            crc = next(shard.crc32c[name] for shard in shards if name in shard.crc32c)
            facts[r] = (self._headers[r][name], crc)
        if len(set(self._voices(facts))) != 1:
            raise self._differs(path)
        # Ranks that load read from several that saved.
        source = self._rank % len(self._records) if self._own is None else self._own
        name = names[source]
        dtype, shape = self._headers[source][name]
        whole = _Box((0,) * len(shape), shape)
        if part_of(like) is not None:
            return self._cut(kind, [(source, name, whole)], shape, like, path)
        key = f"{kind} {name}"
        data = self._array(source, name)
        if data is not None and key not in self._built:
            self._built[key] = array_of(kind, data, dtype, shape)
        return self._built.get(key)

    def _array(self, rank: int, name: str) -> NDArray[np.uint8] | None:
        if self._arrays is None:
            self._wanted[rank].add(name)
            return None
        return self._arrays[rank, name][0]

    def _part(self, values: Mapping[int, Any], like: Any, path: tuple[str, ...]) -> Any:
        shapes = {tuple(value["shape"]) for value in values.values()}
        kinds = {next(iter(value["part"])) for value in values.values()}
        if len(shapes) != 1 or len(kinds) != 1:
            raise self._differs(path)
        (shape,), (kind,) = shapes, kinds
        parts = []
        for r, value in values.items():
            name = value["part"][kind]
            parts.append((r, name, _Box(tuple(value["offsets"]), self._headers[r][name][1])))
        return self._cut(kind, parts, shape, like, path)

    def _cut(
        self, kind: str, parts: Sequence[tuple[int, str, _Box]], shape: tuple[int, ...], like: Any,
        path: tuple[str, ...],
    ) -> Any:  # fmt: skip
        """The part that is wanted, out of those that are there."""
        wanted = self._wanted_box([box for _, _, box in parts], shape, like, path)
        overlaps: dict[_Box, tuple[int, str, _Box]] = {}
        for r, name, box in parts:
            if box.common(wanted).volume:
                overlaps.setdefault(box, (r, name, box))
        inside = [box.common(wanted) for box in overlaps]
        clash = any(a.common(b).volume for a, b in itertools.combinations(inside, 2))
        if clash or sum(box.volume for box in inside) != wanted.volume:
            if len(self._records) == 1 and self._ranks > 1:
                raise PartsElsewhereError
            raise CheckpointError(
                f"{self._place}: the parts of {'.'.join(path)} {'overlap' if clash else 'leave a gap'}.",
                path=self._place,
                next_step="See the shape and offsets that each rank gave when it was saved.",
            )
        dtypes = {self._headers[r][name][0] for r, name, _ in parts}
        if len(dtypes) != 1:
            raise self._differs(path)
        data = [(box, self._array(r, name)) for r, name, box in overlaps.values()]
        (dtype,) = dtypes
        pieces = [(box, array) for box, array in data if array is not None]
        local = None
        if len(pieces) == len(data):
            local = array_of(kind, _joined(pieces, wanted), dtype, wanted.shape)
        if local is None or (part_of(like) is None and is_array(like)):
            return local
        if isinstance(like, Sharded) or part_of(like) is None:
            return Sharded(local, shape, wanted.offsets)
        return type(like).from_local(
            local.to(like.device), like.device_mesh, like.placements, shape=like.shape,
            stride=like.stride(),
        )  # fmt: skip

    def _wanted_box(
        self, boxes: Sequence[_Box], shape: tuple[int, ...], like: Any, path: tuple[str, ...]
    ) -> _Box:
        part = part_of(like)
        expected = part.shape if part else tuple(like.shape) if is_array(like) else shape
        if expected != shape:
            raise CheckpointError(
                f"{self._place}: {'.'.join(path)} has shape {list(shape)}, expected {list(expected)}.",
                path=self._place,
                next_step="Load it into the model that it was saved of.",
            )
        if part is not None:
            return _Box(part.offsets, tuple(part.local.shape))
        if is_array(like):
            return _Box((0,) * len(shape), shape)
        if self._own is not None:
            return boxes[0] if len(boxes) == 1 else boxes[self._own]
        places = [{(b.offsets[d], b.shape[d]) for b in boxes} for d in range(len(shape))]
        cut = [d for d, size in enumerate(shape) if places[d] != {(0, size)}]
        if len(cut) > 1:
            raise CheckpointError(
                f"{self._place}: {'.'.join(path)} is cut along {len(cut)} dimensions; which part of it "
                f"rank {self._rank} of {self._ranks} wants is not known.",
                path=self._place,
                next_step="Say it with like=: a tree with Sharded or DTensor in its place.",
            )
        offsets, sizes = [0] * len(shape), list(shape)
        for d in cut:
            each = -(-shape[d] // self._ranks)  # as torch.chunk and DTensor cut
            offsets[d] = min(shape[d], self._rank * each)
            sizes[d] = min(shape[d], offsets[d] + each) - offsets[d]
        return _Box(tuple(offsets), tuple(sizes))


def _joined(pieces: Collection[tuple[_Box, NDArray[np.uint8]]], wanted: _Box) -> NDArray[np.uint8]:
    """The bytes of a box, out of those of others that cover it."""
    if len(pieces) == 1:
        ((box, data),) = pieces
        if box == wanted:
            return data
    count = {box.volume: data.size for box, data in pieces}
    itemsize = next((size // n for n, size in count.items() if n), 1)
    whole = np.empty((*wanted.shape, itemsize), np.uint8)
    for box, data in pieces:
        common = box.common(wanted)
        source = data.reshape((*box.shape, itemsize))
        whole[common.within(wanted)] = source[common.within(box)]
    return whole.reshape(-1)
