"""Data sets that are read through the library that wrote them: LMDB and Lance.

Their bytes are compressed, or lie where the library alone knows, so they can only be packed.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

from headrace.base.extras import import_extra
from headrace.store.sources.arrow import LabelReader, choose_columns, stream_batch, stream_table
from headrace.store.sources.scan import (
    SourceOptions,
    Stream,
    StreamItem,
    no_samples,
    refused,
    unsound,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.store.sources.arrow import ArrowColumns
    from headrace.store.sources.scan import StreamedRow


def _source(kind: str, path: str, options: SourceOptions, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "path": os.path.abspath(path), **options.to_json(), **more}


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
