"""Ray Data: a store as a `ray.data.Dataset`, a block for each stretch of samples in the stored order.

A read task knows the store by its path and fingerprint, and which samples it has: whatever node it runs on, and
however often, it gives these or fails. So the tasks' samples are all of the store's, each once. Blocks come as
they are read, unless Ray is told otherwise (`execution_options.preserve_order`). The columns:

    index      int64          of the sample in the store
    name       string         of the sample; a name that is no UTF-8 is an error
    label      int64          -1: none; only where samples have labels
    data       large_binary   the sample's bytes; where samples have several parts, a column for each, by its
                              name, null where a sample lacks it
    ...        the user's columns of the store, by their names and types

Shuffling is Ray's to do (`Dataset.random_shuffle`, `randomize_block_order`); headrace's own orders, and exact
resumption, are those of headrace's loaders, in Ray Train too.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ray.data import Datasource, ReadTask, read_datasource
from ray.data.block import BlockMetadata

from headrace import api
from headrace.base.extras import import_extra
from headrace.base.text import printable
from headrace.config import reader_options
from headrace.errors import DecodeError
from headrace.plane.pipeline import Pipeline
from headrace.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from headrace.config import ReaderOptions

_BLOCK_BYTES: Final = 64 << 20
"""The largest block, but for a sample that is larger: half of Ray's own limit."""

_READ_SAMPLES: Final = 256
_OURS: Final = ("index", "name", "label", "data")


def read(
    store: Store | str | PathLike[str],
    *,
    parts: Sequence[str] = (),
    blocks: int | None = None,
    concurrency: int | None = None,
    **options: Any,
) -> Any:
    """A store's samples as a data set of Ray's; see above for its columns.

    Args:
        store: an open store, or the path of one (or of a folder, a tar, ...), which every node must see.
        parts: parts to read of samples that have several; all if empty.
        blocks: so many at least; by default as many as Ray asks for, and of at most 64 MiB each.
        concurrency: so many read tasks at one time; by default Ray's choice.
        options: fields of `headrace.config.ReaderOptions`.

    Returns:
        A `ray.data.Dataset`; its count is known without reading.

    Raises:
        ValueError: it is a mixture, a part or option is unknown, or a part or column has a name of ours.
        MissingPackage: pyarrow is not installed.
    """
    source = StoreSource(store, parts=parts, **options)
    return read_datasource(source, override_num_blocks=blocks, concurrency=concurrency)


# Ray is not typed where it counts, so for the type checker this is a subclass of Any.
class StoreSource(Datasource):  # type: ignore[misc]
    """What `read` gives to Ray; for `ray.data.read_datasource`, with what else that takes."""

    def __init__(
        self,
        store: Store | str | PathLike[str],
        *,
        parts: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        import_extra("pyarrow", "headrace.ray")
        self._store = store if isinstance(store, Store) else api.open(store)
        self._options, _ = reader_options(options)
        self._parts = tuple(parts)
        if self._store.mixture is not None:
            raise ValueError(
                "the store is a mixture: give Ray each of its stores, or use headrace.loader"
            )
        names = Pipeline(self._store, self._options, self._parts).part_names
        several = [name for name in names if len(names) > 1]
        taken = [*_OURS, *several]
        if clash := [
            n for n in (*self._store.columns, *several) if taken.count(n) != (n in several)
        ]:
            raise ValueError(
                f"the store's {clash[0]!r} has the name of another column, see headrace.ray"
            )

    def get_name(self) -> str:
        """For Ray's progress bars."""
        return "headrace"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all samples."""
        return self._store.nbytes

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """A task for each stretch."""
        del data_context
        samples, nbytes = len(self._store), self._store.nbytes
        count = min(samples, max(parallelism, -(-nbytes // _BLOCK_BYTES), 1))
        edges = [samples * i // count for i in range(count + 1)] if count else [0]
        tasks = []
        for first, end in itertools.pairwise(edges):
            task = functools.partial(
                _read_stretch, self._store, self._options, self._parts, range(first, end)
            )
            about = BlockMetadata(
                num_rows=end - first, size_bytes=nbytes * (end - first) // samples,
                input_files=(self._store.path,), exec_stats=None,
            )  # fmt: skip
            tasks.append(ReadTask(task, about, per_task_row_limit=per_task_row_limit))
        return tasks


def _read_stretch(
    store: Store, options: ReaderOptions, parts: tuple[str, ...], stretch: range
) -> Iterator[Any]:
    """One block, on whatever node this runs: there the store was opened anew, and is the same or an error."""
    import pyarrow as pa

    pipeline = Pipeline(store, options, parts)
    labels, columns = store.labels, store.columns
    tables = []
    for first in range(stretch.start, stretch.stop, _READ_SAMPLES):
        indices = np.arange(first, min(first + _READ_SAMPLES, stretch.stop))
        batch = pipeline.fetch(indices).batch
        values: dict[str, Any] = {
            "index": pa.array(batch.indices),
            "name": pa.array(_checked(store, store.names.many(indices)), pa.string()),
        }
        if labels is not None:
            values["label"] = pa.array(batch.labels)
        names = batch.part_names
        for part in names:
            held = set(range(len(batch)))
            if len(names) > 1:
                held = {i for i in held if part in store.parts_of(int(indices[i]))}
            rows = [(batch[i, part] if len(names) > 1 else batch[i]) if i in held else None
                    for i in range(len(batch))]  # fmt: skip
            values[part if len(names) > 1 else "data"] = pa.array(rows, pa.large_binary())
        values |= {name: pa.array(column[indices]) for name, column in columns.items()}
        tables.append(pa.table(values))
    yield pa.concat_tables(tables)


def _checked(store: Store, names: list[str]) -> list[str]:
    """Names that Arrow can hold."""
    for name in names:
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DecodeError(
                f"{store.path}: the name {printable(name)} is no UTF-8: no column of Arrow holds it.",
                path=store.path,
                next_step="Pack the files under other names.",
            )
    return names
