"""Files of records as a source: TFRecord, and ArrayRecord where its package is installed.

A record of a TFRecord file is its length (u64), the masked CRC-32C of the length, the data, the masked
CRC-32C of the data. The format's checksum is ours, so an index has every sample's checksum without reading
the data: only the few bytes between the records are read, and each length is proved by its own checksum.

ArrayRecord files can be packed, not indexed. Riegeli's format cuts a file into blocks of 64 KiB and puts 24
bytes of its own at the start of each; a record that crosses a block's border (each one above 64 KiB does) is
interrupted by them, so it has no one place, compressed or not. The array_record package reads them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from array import array
from typing import TYPE_CHECKING

import numpy as np

from headrace.base.checksum import crc32c
from headrace.base.extras import import_extra
from headrace.errors import SourceError
from headrace.store.sources.detect import RIEGELI_MAGIC
from headrace.store.sources.scan import (
    Rows,
    StreamedRow,
    check_unchanged,
    damaged,
    refused,
    scan_rows,
    source_entry,
    stream_rows,
    unsound,
)
from headrace.store.sources.shards import Window, map_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.store.sources.scan import Scan, SourceOptions, Stream


_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


def unmask(masked: int) -> int:
    """The CRC-32C behind TFRecord's masked one."""
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def mask(crc: int) -> int:
    """TFRecord's masked form of a CRC-32C."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def looks_like_tfrecord(head: bytes) -> bool:
    """Whether a file that begins with `head` begins with a record."""
    if len(head) < _HEADER.size:
        return False
    _, masked = _HEADER.unpack_from(head)
    return crc32c(head[:8]) == unmask(masked)


def scan_tfrecord(paths: list[str], options: SourceOptions) -> Scan:
    """Lists TFRecord files without reading the records' data."""
    files = map_files(paths, _list_records, options.workers)
    return scan_rows(paths, files, source_entry("tfrecord", paths, options), options)


def _list_records(path: str) -> Rows:
    with Window(path) as window:
        numbers = array("Q", itertools.chain.from_iterable(read_records(window)))
        records = np.array(numbers, np.uint64).reshape(-1, 3)
        places = records[:, 0].copy(), records[:, 1].copy()
        return Rows(
            window.volume(), len(records), {b"": places}, crc=records[:, 2].astype(np.uint32)
        )


def read_records(window: Window) -> Iterator[tuple[int, int, int]]:
    """Offset, length and CRC of the data of each record."""
    at = 0
    while at < window.size:
        length, crc = _read_frame(window, at)
        yield at + _HEADER.size, length, crc
        at += _HEADER.size + length + _FOOTER.size


def _read_frame(window: Window, at: int) -> tuple[int, int]:
    """Length and CRC of the record at `at`."""
    header = window.read(at, _HEADER.size)
    if len(header) < _HEADER.size:
        expected = f"{_HEADER.size} bytes"
        raise damaged(window.path, "header of a record", f"{len(header)} bytes", expected, at)
    length, masked = _HEADER.unpack(header)
    if crc32c(header[:8]) != unmask(masked):
        if at == 0:
            raise _not_plain(window, header)
        computed, stated = f"{crc32c(header[:8]):08x}", f"{unmask(masked):08x}"
        raise damaged(window.path, "checksum of a record's length", computed, stated, at)
    end = at + _HEADER.size + length
    footer = window.read(end, _FOOTER.size) if end + _FOOTER.size <= window.size else b""
    if len(footer) < _FOOTER.size:
        most = f"at most the file's size {window.size:,}"
        raise damaged(window.path, "end of a record", f"{end + _FOOTER.size:,}", most, at)
    return length, unmask(_FOOTER.unpack(footer)[0])


def _not_plain(window: Window, header: bytes) -> SourceError:
    gzip = header[:2] == b"\x1f\x8b" or header[0] == 0x78
    return refused(
        window.path, f"begins with {header.hex(' ')}, expected a TFRecord"
        f"{': it looks compressed' if gzip else ''} (offset 0).",
        "Decompress it, or pack it from an iterable." if gzip else "Check the file.", 0,
    )  # fmt: skip


_AT_ONCE_BYTES = 8 << 20
_AT_ONCE_MAX = 4096


def stream_array_record(paths: list[str], options: SourceOptions) -> Stream:
    """The records of ArrayRecord files, in their order."""
    return stream_rows(
        paths, _stream_array_record, source_entry("array_record", paths, options), options,
        reason="ArrayRecord interrupts records with headers of 64 KiB blocks",
    )  # fmt: skip


def _stream_array_record(path: str) -> Iterator[tuple[int, StreamedRow]]:
    module = import_extra("array_record.python.array_record_module", f"reading {path}")
    status = os.stat(path)
    # Anything else would be found by the reader only when it is asked, as "no records".
    _check_begin(path)
    reader = module.ArrayRecordReader(path)
    try:
        count = int(reader.num_records())
        if not reader.ok() or (not count and status.st_size > 1 << 16):
            raise unsound(path, "ArrayRecord", "it names no records")
        at, at_once = 0, 1
        while at < count:
            wanted = list(range(at, min(at + at_once, count)))
            records = reader.read(wanted)
            if len(records) < len(wanted) or not reader.ok():
                raise unsound(path, "ArrayRecord", f"records {at} to {wanted[-1]} cannot be read")
            for row, record in zip(wanted, records, strict=True):
                yield count, StreamedRow(row, ((b"", bytes(record)),))
            at += len(wanted)
            mean = max(1, sum(map(len, records)) // len(records))
            at_once = max(1, min(_AT_ONCE_MAX, _AT_ONCE_BYTES // mean))
    except (RuntimeError, ValueError, IndexError, OSError) as e:
        if isinstance(e, SourceError):
            raise
        raise unsound(path, "ArrayRecord", e) from e
    finally:
        with contextlib.suppress(RuntimeError):  # it complains again
            reader.close()
    check_unchanged(path, os.stat(path), status.st_size, status.st_mtime_ns)


def _check_begin(path: str) -> None:
    with open(path, "rb") as f:
        head = f.read(len(RIEGELI_MAGIC))
    if head != RIEGELI_MAGIC:
        raise unsound(path, "ArrayRecord", f"it begins with {head.hex(' ') or 'nothing'}")
