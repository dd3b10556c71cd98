"""TFRecord files as a source: each record is a sample.

A record is its length (u64), the masked CRC-32C of the length, the data, the masked CRC-32C of the data.
The format's checksum is ours, so an index has every sample's checksum without reading the data: only
the few bytes between the records are read, and each length is proved by its own checksum.
"""

from __future__ import annotations

import struct

import numpy as np

from headrace.base.checksum import crc32c
from headrace.errors import SourceError
from headrace.store.directory_writer import DirectoryColumns
from headrace.store.names import join_names
from headrace.store.sources.object_name import absolute_path
from headrace.store.sources.scan import Scan, SourceOptions, no_samples
from headrace.store.sources.shards import (
    ShardListing,
    Window,
    damaged,
    list_shards,
    shard_labels,
)

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
_DIGITS = 7
"""Digits of a record's number in its name; more where a file has more records."""


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
    """Lists TFRecord files without reading the records' data.

    Raises:
        SourceError: a file is truncated, damaged or compressed, or there are no records.
    """
    shards = list_shards(paths, _scan_shard, options.workers)
    names: list[bytes] = []
    for label, shard in zip(shard_labels(paths), shards, strict=True):
        count = len(shard.offset)
        digits = max(_DIGITS, len(str(max(count - 1, 0))))
        names += [b"%s:%0*d" % (label, digits, i) for i in range(count)]
    if not names:
        raise no_samples(paths[0])
    blob, offsets = join_names(names)
    counts = [len(s.offset) for s in shards]
    columns = DirectoryColumns(
        names=blob,
        name_offsets=offsets,
        volume=np.repeat(np.arange(len(shards), dtype=np.uint32), counts),
        offset=np.concatenate([np.array(s.offset, np.uint64) for s in shards]),
        length=np.concatenate([np.array(s.length, np.uint64) for s in shards]),
        crc=np.concatenate([np.array(s.crc, np.uint32) for s in shards]),
    )
    absolute = [absolute_path(p) for p in paths]
    source = {"kind": "tfrecord", "paths": absolute, **options.to_json()}
    return Scan(columns, tuple(s.volume for s in shards), source)


def _scan_shard(path: str) -> ShardListing:
    with Window(path) as window:
        listing = ShardListing(window.volume())
        at = 0
        while at < window.size:
            length, crc = _read_frame(window, at)
            listing.offset.append(at + _HEADER.size)
            listing.length.append(length)
            listing.crc.append(crc)
            at += _HEADER.size + length + _FOOTER.size
    return listing


def _read_frame(window: Window, at: int) -> tuple[int, int]:
    """Length and CRC of the record at `at`."""
    header = window.read(at, _HEADER.size)
    if len(header) < _HEADER.size:
        raise damaged(
            window.path, "header of a record", f"{len(header)} bytes", f"{_HEADER.size} bytes", at
        )
    length, masked = _HEADER.unpack(header)
    if crc32c(header[:8]) != unmask(masked):
        if at == 0:
            raise _not_plain(window, header)
        raise damaged(
            window.path, "checksum of a record's length", f"{crc32c(header[:8]):08x}",
            f"{unmask(masked):08x}", at,
        )  # fmt: skip
    end = at + _HEADER.size + length
    footer = window.read(end, _FOOTER.size) if end + _FOOTER.size <= window.size else b""
    if len(footer) < _FOOTER.size:
        raise damaged(
            window.path, "end of a record", f"{end + _FOOTER.size:,}",
            f"at most the file's size {window.size:,}", at,
        )  # fmt: skip
    return length, unmask(_FOOTER.unpack(footer)[0])


def _not_plain(window: Window, header: bytes) -> SourceError:
    gzip = header[:2] == b"\x1f\x8b" or header[0] == 0x78
    return SourceError(
        f"{window.path}: begins with {header.hex(' ')}, expected a TFRecord"
        f"{': it looks compressed' if gzip else ''} (offset 0).",
        path=window.path,
        offset_bytes=0,
        next_step="Decompress it, or pack it from an iterable." if gzip else "Check the file.",
    )
