"""Data sets that are read through the library that wrote them: Zarr arrays, LMDB and Lance.

Their bytes are compressed, or lie where the library alone knows, so they can only be packed.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.extras import import_extra
from headrace.errors import SourceError
from headrace.store.sources.arrow import LabelReader, choose_columns, stream_batch, stream_table
from headrace.store.sources.hdf5 import array_rows
from headrace.store.sources.scan import (
    SourceOptions,
    Stream,
    StreamItem,
    choose_label,
    label_array,
    left_out,
    listed,
    no_samples,
    refused,
    row_names,
    unsound,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.store.sources.arrow import ArrowColumns
    from headrace.store.sources.scan import StreamedRow

_ARRAYS_MAX: Final = 10_000


def _source(kind: str, path: str, options: SourceOptions, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "path": os.path.abspath(path), **options.to_json(), **more}


# -- Zarr --------------------------------------------------------------------------------------------


def open_zarr(path: str, options: SourceOptions) -> Stream:
    """The rows of a Zarr array, or of the arrays of a group, which are parts; versions 2 and 3."""
    zarr = import_extra("zarr", f"reading {path}")
    try:
        node = zarr.open(path, mode="r")
        arrays = _arrays(zarr, node)
    except Exception as e:  # whatever its codecs raise over damaged metadata
        raise unsound(path, "Zarr", e) from e
    rows = {name: array for name, array in arrays.items() if array.shape}
    if not rows:
        raise no_samples(path, " in an array with rows")
    names, label = _choose_arrays(path, rows, options)
    count = rows[names[0]].shape[0]
    parts = sorted(names, key=os.fsencode)
    shapes = {
        name: {"shape": list(rows[name].shape), "dtype": str(rows[name].dtype)} for name in names
    }

    def items() -> Iterator[StreamItem]:
        try:
            numbers = None if label is None else label_array(rows[label][:], path, label)
            arrays = [rows[name] for name in parts]
            # Whole chunks, however large: zarr decompresses each whole.
            for _, row in array_rows(list(map(os.fsencode, parts)), arrays, numbers, 1 << 62):
                yield StreamItem(row_names(count, rows=[row.row])[0], row.parts, row.label)
        except SourceError:
            raise
        except Exception as e:  # whatever its codecs raise over damaged chunks
            raise unsound(path, "Zarr", e) from e

    source = _source("zarr", path, options, arrays=shapes)
    rest = [name for name in arrays if name not in (*names, label)]
    reason = "Zarr's chunks are compressed"
    return Stream(items, source, reason=reason, count=count, notes=left_out(rest))


def _arrays(zarr: Any, node: Any) -> dict[str, Any]:
    """Of a group, by path; of an array, itself without a name."""
    if isinstance(node, zarr.Array):
        return {"": node}
    arrays = {}
    for name, member in node.members(max_depth=None):
        if isinstance(member, zarr.Array):
            arrays[name] = member
        if len(arrays) > _ARRAYS_MAX:
            break
    return arrays


def _choose_arrays(
    path: str, rows: dict[str, Any], options: SourceOptions
) -> tuple[tuple[str, ...], str | None]:
    """The arrays that are parts, and the one of labels, all of one number of rows."""
    label = choose_label(list(rows.items()), _is_label, options, path, "one integer a row")
    names = options.column or tuple(name for name in rows if name != label) or tuple(rows)
    label = None if label in names else label
    counts = {name: rows[name].shape[0] for name in (*names, *filter(None, [label]))}
    if len(set(counts.values())) > 1:
        raise refused(
            path, f"its arrays differ in their rows: {listed([f'{n} {c}' for n, c in counts.items()])}.",
            "Name those that belong together: column=('image', 'mask').",
        )  # fmt: skip
    for name in names:
        if np.dtype(rows[name].dtype).kind not in "biufcSV":
            raise refused(
                path, f"array {name!r} holds {rows[name].dtype}, expected numbers or bytes of one length.",
                "Name other arrays: column='image'.",
            )  # fmt: skip
    if not counts[names[0]]:
        raise no_samples(path)
    return names, label


def _is_label(array: Any) -> bool:
    return len(array.shape) == 1 and np.dtype(array.dtype).kind in "iu"


# -- LMDB --------------------------------------------------------------------------------------------

_COUNTS: Final = frozenset({b"__len__", b"__keys__", b"length", b"num-samples", b"num_samples"})
"""Keys under which data sets in LMDB keep their length, by habit; no samples."""

_SUBDATABASE_BYTES: Final = 48


def open_lmdb(path: str, options: SourceOptions) -> Stream:
    """The entries of an LMDB: each key is a sample's name, its value the bytes. There are no labels."""
    if options.column is not None or options.label is not None:
        raise ValueError("column and label are for tables, the source is an LMDB")
    lmdb = import_extra("lmdb", f"reading {path}")

    @contextlib.contextmanager
    def opened() -> Iterator[Any]:
        try:
            with (
                lmdb.open(
                    path,
                    readonly=True,
                    lock=False,
                    subdir=os.path.isdir(path),
                    readahead=False,
                    max_dbs=1,
                ) as environment,
                environment.begin(buffers=False) as transaction,
            ):
                yield transaction
        except lmdb.Error as e:
            raise unsound(path, "LMDB", e) from e

    with opened() as transaction:
        with transaction.cursor() as cursor:
            some = [value for _, (_, value) in zip(range(65), cursor, strict=False)]
        count = transaction.stat()["entries"]
        count -= sum(transaction.get(key) is not None for key in _COUNTS)
    if some and len(some) < 65 and all(len(value) == _SUBDATABASE_BYTES for value in some):
        raise refused(
            path, f"its {len(some)} entries look like named databases, not samples.",
            "Pack an iterable over the one that is meant.",
        )  # fmt: skip

    def items() -> Iterator[StreamItem]:
        with opened() as transaction, transaction.cursor() as cursor:
            for key, value in cursor:
                if key not in _COUNTS:
                    yield StreamItem(key, ((b"", value),))

    return Stream(
        items, _source("lmdb", path, options), reason="LMDB's pages may move", count=count
    )


# -- Lance -------------------------------------------------------------------------------------------


def open_lance(path: str, options: SourceOptions) -> Stream:
    """The rows of a Lance data set, its latest version."""
    lance = import_extra("lance", f"reading {path}")
    try:
        table = lance.dataset(path)
        count, schema, version = table.count_rows(), table.schema, table.version
    except Exception as e:  # its errors are of many kinds
        raise unsound(path, "Lance", e) from e
    columns = choose_columns(schema, options, path)
    if not count:
        raise no_samples(path)

    def read(
        where: str, columns: ArrowColumns, labels: LabelReader
    ) -> Iterator[tuple[int, StreamedRow]]:
        row = 0
        try:
            for batch in lance.dataset(path, version=version).to_batches(columns=columns.read):
                for streamed in stream_batch(batch, columns, labels, where, row):
                    yield count, streamed
                row += batch.num_rows
        except OSError as e:
            raise unsound(path, "Lance", e) from e

    source = _source("lance", path, options, version=version, **columns.entry())
    return stream_table(
        [path], columns, read, source, options, reason="Lance's pages are encoded", count=count
    )
