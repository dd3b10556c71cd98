"""Files that hold many samples: a window that reads only what a scan needs, and joining shards."""

from __future__ import annotations

import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypeVar

from headrace.errors import SourceError
from headrace.store.sources.extents import read_fully
from headrace.store.sources.object_name import ObjectName, absolute_path
from headrace.store.sources.scan import SourceVolume, check_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_NEAR = 64 << 10
"""When headers are nearer to each other than this, reading on is cheaper than seeking."""

_BIG_STEP = 1 << 20
_SMALL_STEP = 4096


class Window:
    """A file seen through a sliding buffer: big steps where headers are dense, small ones else.

    Args:
        path: the file; it is checked on closing that it did not change meanwhile.
    """

    def __new__(cls, path: str) -> Self:
        """An object's window for an object."""
        if cls is Window and isinstance(path, ObjectName):
            from headrace.store.sources.object_window import ObjectWindow

            return super().__new__(ObjectWindow)  # type: ignore[return-value]  # a subclass
        return super().__new__(cls)

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise SourceError(
                f"{path}: cannot be read: {e.strerror}.", path=path, next_step="Make it readable."
            ) from e
        status = os.fstat(self._fd)
        self.size = status.st_size
        self.mtime_ns = status.st_mtime_ns
        self._start = 0
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                check_unchanged(self.path, os.fstat(self._fd), self.size, self.mtime_ns)
        finally:
            os.close(self._fd)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer at the file's end."""
        begin = offset - self._start
        if begin < 0 or begin + size > len(self._data):
            gap = offset - self._start - len(self._data)
            near = bool(self._data) and 0 <= gap < _NEAR
            step = max(size, _BIG_STEP if near else _SMALL_STEP)
            buffer = bytearray(min(step, max(0, self.size - offset)))
            try:
                count = read_fully(self._fd, memoryview(buffer), offset)
            except OSError as e:
                raise SourceError(
                    f"{self.path}: cannot be read: {e.strerror} (offset {offset:,}).",
                    path=self.path,
                    offset_bytes=offset,
                    next_step="Check the disk.",
                ) from e
            self._start, self._data = offset, bytes(buffer[:count])
            begin = 0
        return self._data[begin : begin + size]

    def volume(self) -> SourceVolume:
        """The file as a volume."""
        return SourceVolume("file", absolute_path(self.path), self.size, self.mtime_ns)


@dataclass(slots=True)
class ShardListing:
    """What one file holds: extents and their (sample, part), in the file's order."""

    volume: SourceVolume
    names: list[bytes] = field(default_factory=list)
    counts: array[int] = field(default_factory=lambda: array("Q"))
    labels: array[int] = field(default_factory=lambda: array("q"))
    offset: array[int] = field(default_factory=lambda: array("Q"))
    length: array[int] = field(default_factory=lambda: array("Q"))
    crc: array[int] = field(default_factory=lambda: array("L"))
    parts: list[bytes] = field(default_factory=list)


def list_shards(
    paths: list[str], scan: Callable[[str], ShardListing], workers: int
) -> list[ShardListing]:
    """Scans files with threads; results in the order of `paths`."""
    return map_files(paths, scan, workers)


def map_files(paths: list[str], scan: Callable[[str], T], workers: int) -> list[T]:
    """Calls `scan` for each file, with threads; results in the order of `paths`."""
    if len(paths) == 1:
        return [scan(paths[0])]
    with ThreadPoolExecutor(min(workers, len(paths)), "headrace-scan") as pool:
        try:
            return list(pool.map(scan, paths))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def shard_labels(paths: list[str]) -> list[bytes]:
    """A short unique name for each file: its base name, or what differs of its path."""
    base = [os.path.basename(p) for p in paths]
    if len(set(base)) < len(base):
        common = os.path.commonpath([absolute_path(p) for p in paths])
        base = [os.path.relpath(absolute_path(p), common) for p in paths]
    return [os.fsencode(b) for b in base]


def damaged(path: str, what: str, found: object, expected: object, offset: int) -> SourceError:
    """The error for a file that contradicts its own format."""
    return SourceError(
        f"{path}: {what} is {found}, expected {expected} (offset {offset:,}).",
        path=path,
        offset_bytes=offset,
        next_step="The file is truncated or damaged: fetch it again.",
    )
