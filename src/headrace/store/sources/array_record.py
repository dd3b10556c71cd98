"""ArrayRecord files as a source: each record is a sample. They can be packed, not indexed.

The records are kept in Riegeli's format, which cuts a file into blocks of 64 KiB and puts 24 bytes of
its own at the start of each. A record that crosses a block's border (each one above 64 KiB does) is
interrupted by them, so it has no one place, compressed or not. The array_record package reads them.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from headrace.errors import SourceError
from headrace.store.sources.rows import StreamedRow, import_extra, stream_rows
from headrace.store.sources.scan import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.store.sources.scan import SourceOptions, Stream

RIEGELI_MAGIC = bytes.fromhex("83af70d10d884a3f0000000000000000 4000000000000000".replace(" ", ""))
"""How each Riegeli file begins: the header of its first block, and where its first chunk ends."""

_AT_ONCE_BYTES = 8 << 20
_AT_ONCE_MAX = 4096


def stream_array_record(paths: list[str], options: SourceOptions) -> Stream:
    """The records of ArrayRecord files, in their order."""
    source: dict[str, Any] = {
        "kind": "array_record",
        "paths": [os.path.abspath(p) for p in paths],
        **options.to_json(),
    }
    return stream_rows(
        paths, _stream, source, options,
        reason="ArrayRecord interrupts records with headers of 64 KiB blocks",
    )  # fmt: skip


def _stream(path: str) -> Iterator[tuple[int, StreamedRow]]:
    module = import_extra("array_record.python.array_record_module", "array-record", path)
    status = os.stat(path)
    # Anything else would be found by the reader only when it is asked, as "no records".
    _check_begin(path)
    reader = module.ArrayRecordReader(path)
    try:
        count = int(reader.num_records())
        if not reader.ok() or (not count and status.st_size > 1 << 16):
            raise _damaged(path, "it names no records")
        at, at_once = 0, 1
        while at < count:
            wanted = list(range(at, min(at + at_once, count)))
            records = reader.read(wanted)
            if len(records) < len(wanted) or not reader.ok():
                raise _damaged(path, f"records {at} to {wanted[-1]} cannot be read")
            for row, record in zip(wanted, records, strict=True):
                yield count, StreamedRow(row, ((b"", bytes(record)),))
            at += len(wanted)
            mean = max(1, sum(map(len, records)) // len(records))
            at_once = max(1, min(_AT_ONCE_MAX, _AT_ONCE_BYTES // mean))
    except (RuntimeError, ValueError, IndexError, OSError) as e:
        if isinstance(e, SourceError):
            raise
        raise _damaged(path, str(e).partition("\n")[0][:300]) from e
    finally:
        with contextlib.suppress(RuntimeError):  # it complains again
            reader.close()
    check_unchanged(path, os.stat(path), status.st_size, status.st_mtime_ns)


def _check_begin(path: str) -> None:
    with open(path, "rb") as f:
        head = f.read(len(RIEGELI_MAGIC))
    if head != RIEGELI_MAGIC:
        raise _damaged(path, f"it begins with {head.hex(' ') or 'nothing'}")


def _damaged(path: str, what: str) -> SourceError:
    return SourceError(
        f"{path}: is no sound ArrayRecord file: {what}.",
        path=path,
        next_step="The file is truncated or damaged: fetch it again.",
    )
