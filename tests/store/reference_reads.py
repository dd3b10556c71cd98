"""Single reads in plain Python: the measure for the native ones."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.base.checksum import crc32c
from headrace.base.files import read_fully
from headrace.errors import CorruptStore, HeadraceError
from headrace.store.segment import check_file, read_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.store.manifest import VolumeEntry
    from headrace.store.segment import Extent, OpenSegment


def read_extent(
    segment: OpenSegment, extent: Extent, start: int = 0, size: int | None = None
) -> bytearray:
    """The bytes `start` to `start + size - 1` of one extent, fewer at its end.

    Raises CorruptSample if the bytes differ from the checksum, or end early; SourceChanged if a foreign file
    is not as it was indexed; VolumeError if the system refuses the read.
    """
    begin = min(start, extent.length)
    end = extent.length if size is None else min(extent.length, begin + size)
    entry, path = _place(segment, extent)

    def failure(kind: str, actual: str = "", expected: str = "", code: int = 0) -> HeadraceError:
        return read_error(
            kind, extent.index, extent.name, path, extent.offset,
            actual=actual, expected=expected, code=code, foreign=entry.kind != "packed",
        )  # fmt: skip

    data = bytearray(end - begin)
    try:
        if entry.kind == "tree":
            with _open_tree_file(segment, extent, path, failure) as fd:
                count = read_fully(fd, memoryview(data), begin)
        else:
            with _open_volume(segment, extent.volume) as fd:
                count = read_fully(fd, memoryview(data), extent.offset + begin)
    except HeadraceError:
        raise
    except OSError as e:
        raise failure("system", code=e.errno or 0) from e
    if count < len(data):
        raise failure("short", str(count), str(len(data)))
    if extent.crc is not None and end - begin == extent.length:
        computed = f"{crc32c(data):08x}"
        if computed != f"{extent.crc:08x}":
            raise failure("checksum", computed, f"{extent.crc:08x}")
    return data


def _place(segment: OpenSegment, extent: Extent) -> tuple[VolumeEntry, str]:
    """The volume and the file of an extent, which lies in it: known before memory is allocated for it."""
    volumes = segment.volumes
    if extent.volume < len(volumes.entries) and extent.length >= 0 and extent.offset >= 0:
        entry, path = volumes.entries[extent.volume], volumes.paths[extent.volume]
        if entry.kind == "tree":
            return entry, f"{path}/{os.fsdecode(extent.name)}"
        if extent.offset + extent.length <= (entry.bytes or 0):
            return entry, path
    where = segment.entry.directory
    raise CorruptStore(
        f"{where}: sample {extent.index} lies in volume {extent.volume} at {extent.offset:,} with "
        f"{extent.length:,} bytes, which leaves the volumes.",
        path=where, next_step="The directory belongs to other volumes: pack or index again.",
    )  # fmt: skip


@contextmanager
def _open_volume(segment: OpenSegment, number: int) -> Iterator[int]:
    """A descriptor of the volume, if it is as the manifest says."""
    fd = segment.volumes.open(number)
    try:
        check_file(segment.volumes.entries[number], segment.volumes.paths[number], os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _open_tree_file(
    segment: OpenSegment, extent: Extent, path: str, failure: Callable[..., HeadraceError]
) -> Iterator[int]:
    """A descriptor of the file, if it is as it was indexed."""
    # A name in a damaged or hostile directory must not lead out of the tree.
    if extent.name.startswith(b"/") or b".." in extent.name.split(b"/") or b"\0" in extent.name:
        where = segment.entry.directory
        raise CorruptStore(
            f"{where}: the name of sample {extent.index}, {os.fsdecode(extent.name)!r}, leads out of "
            "the indexed folder.", path=where, next_step="Index the source again.",
        )  # fmt: skip
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise failure("changed", "no file", "the indexed file") from None
    try:
        status = os.fstat(fd)
        now = expected = ""
        if not stat.S_ISREG(status.st_mode):
            now, expected = "no regular file", "one"
        elif status.st_size != extent.length:
            now, expected = f"{status.st_size:,} bytes", f"{extent.length:,} bytes"
        elif extent.mtime_ns not in (None, status.st_mtime_ns):
            now, expected = f"modified at {status.st_mtime_ns} ns", f"{extent.mtime_ns} ns"
        if now:
            raise failure("changed", now, expected)
        yield fd
    finally:
        os.close(fd)
