"""Arrow IPC files as a source: each row's value of a binary column is a sample.

Both formats, file and stream. The file is mapped, in a way that survives its truncation, and pyarrow lays
its arrays over the mapping: where an array's buffer lies in memory says where it lies in the file. A
buffer that lies elsewhere was decompressed: then the rows can only be packed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.errors import SourceError
from headrace.store.sources.arrow_column import (
    ArrowColumns,
    LabelReader,
    choose_columns,
    stream_batch,
    values_of,
)
from headrace.store.sources.rows import (
    NotInPlace,
    Rows,
    import_extra,
    null_problems,
    scan_rows,
    stream_rows,
)
from headrace.store.sources.scan import Scan, SourceOptions, SourceVolume, Stream, check_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.store.sources.arrow_column import Values
    from headrace.store.sources.rows import StreamedRow

_FILE_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"


def looks_like_arrow_stream(head: bytes) -> bool:
    """Whether a file that begins with `head` may be an Arrow stream: a message's frame."""
    if len(head) < 16 or head[:4] != _CONTINUATION:
        return False
    # A flatbuffer of some size, whose root offset lies inside it.
    size = int.from_bytes(head[4:8], "little", signed=True)
    return 8 <= size < 1 << 24 and size % 8 == 0 and int.from_bytes(head[8:12], "little") < size


def open_arrow(paths: list[str], options: SourceOptions) -> Scan | Stream:
    """Lists the rows of Arrow files; a stream if their buffers are compressed.

    Raises:
        SourceError: a file is damaged, no column fits, or pyarrow is not installed.
    """
    first = _Table(paths[0])
    columns = choose_columns(first.schema, options, paths[0])
    labels = LabelReader(columns, paths[0])
    absolute = [os.path.abspath(p) for p in paths]
    source: dict[str, Any] = {"kind": "arrow", "paths": absolute, **options.to_json()}
    source["columns"] = list(columns.data)
    try:
        files = [_list_rows(path, columns, labels) for path in paths]
    except NotInPlace as e:
        again = LabelReader(columns, paths[0])
        return stream_rows(
            paths, lambda path: _stream(path, columns, again), source, options,
            reason=str(e), class_names=lambda: again.class_names,
        )  # fmt: skip
    return scan_rows(paths, files, source, options, labels.class_names)


class _Table:
    """An Arrow file laid over a mapping of it.

    Raises:
        SourceError: it is damaged, or cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._pa = import_extra("pyarrow", "arrow", path)
        import_extra("pyarrow.ipc", "arrow", path)
        self.path = path
        try:
            with open(path, "rb") as f:
                self.status = os.fstat(f.fileno())
                head = f.read(8)
                # pyarrow's own mapping would end the process if somebody truncated the file.
                self._mapped = _native.MappedFile(f.fileno(), self.status.st_size, path)
            self.base = self._pa.py_buffer(self._mapped.data)
        except OSError as e:
            raise _damaged(path, e) from e
        try:
            if head[:6] == _FILE_MAGIC:
                self._reader = self._pa.ipc.open_file(self._pa.BufferReader(self.base))
            else:
                self._reader = self._pa.ipc.open_stream(self._pa.BufferReader(self.base))
            self.schema = self._reader.schema
            _ = self.schema.names, str(self.schema.types)  # finds names that are no text
        except (self._pa.ArrowException, OSError, ValueError) as e:
            self.check()
            raise _damaged(path, e) from e

    def check(self) -> None:
        """What was read so far was there.

        Raises:
            SourceError: the file was truncated or changed meanwhile.
        """
        status = os.stat(self.path)
        check_unchanged(self.path, status, self.status.st_size, self.status.st_mtime_ns)
        if self._mapped.damaged:  # and it has its size and time again
            raise _damaged(self.path, OSError("it shrank while it was read"))

    def batches(self) -> Iterator[Any]:
        """The record batches, each checked as far as pyarrow can without reading the values."""
        try:
            if hasattr(self._reader, "num_record_batches"):
                for i in range(self._reader.num_record_batches):
                    yield self._checked(self._reader.get_batch(i))
            else:
                for batch in self._reader:
                    yield self._checked(batch)
        except (self._pa.ArrowException, OSError, ValueError, MemoryError) as e:
            if isinstance(e, SourceError):
                raise
            self.check()
            raise _damaged(self.path, e) from e
        self.check()

    def _checked(self, batch: Any) -> Any:
        batch.validate()
        return batch

    def volume(self) -> SourceVolume:
        return SourceVolume(
            "file", os.path.abspath(self.path), self.status.st_size, self.status.st_mtime_ns
        )

    def place(self, values: Values) -> NDArray[np.uint64]:
        """Where values lie in the file.

        Raises:
            NotInPlace: they do not.
        """
        if values.buffer is None or not int(values.length.sum()):
            return np.zeros(len(values.start), np.uint64)
        at = values.buffer.address - self.base.address
        if not 0 <= at <= at + values.buffer.size <= self.base.size:
            raise NotInPlace(f"{self.path}: its buffers are compressed")
        places: NDArray[np.uint64] = (values.start + at).astype(np.uint64)
        return places


def _damaged(path: str, error: BaseException) -> SourceError:
    said = str(error).partition("\n")[0][:300]
    return SourceError(
        f"{path}: is no sound Arrow file: {said}.",
        path=path,
        next_step="The file is truncated or damaged: fetch it again.",
    )


def _list_rows(path: str, columns: ArrowColumns, labels: LabelReader) -> Rows:
    table = _Table(path)
    _require(table, columns)
    places: dict[str, list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]]
    places = {name: [] for name in columns.data}
    valid: list[NDArray[np.bool_]] = []
    numbers: list[NDArray[np.int64]] = []
    for batch in table.batches():
        good = np.ones(batch.num_rows, bool)
        for name in columns.data:
            values = values_of(batch.column(name), path)
            if values.valid is not None:
                good &= values.valid
            places[name].append((table.place(values), values.length.astype(np.uint64)))
        valid.append(good)
        if labels.name:
            numbers.append(labels.read(batch.column(labels.name)))
    kept = np.flatnonzero(np.concatenate([np.zeros(0, bool), *valid]))
    count = sum(map(len, valid))
    missing = np.setdiff1d(np.arange(count), kept)

    def joined(pieces: list[Any], dtype: Any) -> Any:
        return np.concatenate([np.zeros(0, dtype), *pieces])[kept]

    return Rows(
        table.volume(),
        count,
        {
            os.fsencode(name): (
                joined([p[0] for p in places[name]], np.uint64),
                joined([p[1] for p in places[name]], np.uint64),
            )
            for name in columns.data
        },
        joined(numbers, np.int64) if labels.name else None,
        kept=kept,
        problems=null_problems(path, columns.data[0], missing),
    )


def _require(table: _Table, columns: ArrowColumns) -> None:
    """A further file has the columns of the first."""
    choose_columns(
        table.schema, SourceOptions(column=columns.data, label=columns.label or ""), table.path
    )


def _stream(
    path: str, columns: ArrowColumns, labels: LabelReader
) -> Iterator[tuple[int, StreamedRow]]:
    table = _Table(path)
    _require(table, columns)
    row = 0
    for batch in table.batches():
        for item in stream_batch(batch, columns, labels, path, row):
            # How many rows there are is known at the end: names of more than 10 million grow longer.
            yield 0, item
        row += batch.num_rows
