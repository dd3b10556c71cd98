"""Files and objects that hold many samples, as scans see them.

A source's parsers take paths and hand them on. A URL travels the same way, as a string that knows who reads
it (`ObjectName`); `read_head`, `readable` and `Window` find its engine there. A window is a sliding buffer:
big steps where headers are dense, small ones else.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np

from headrace.base.extras import import_extra
from headrace.base.files import read_fully
from headrace.errors import SourceError
from headrace.io.objects.faults import Failure
from headrace.io.objects.location import has_magic, shown
from headrace.store.directory import columns_of
from headrace.store.manifest import VolumeEntry
from headrace.store.sources.contents import labels_of, sort_files
from headrace.store.sources.scan import (
    Scan,
    absolute_path,
    check_unchanged,
    no_samples,
    refused,
    unreadable,
    unsound,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from headrace.io.objects.engine import ObjectEngine
    from headrace.io.objects.reading import RemoteObject
    from headrace.io.objects.transport import Found
    from headrace.store.sources.scan import SourceOptions, Stream


_BUFFER_BYTES = 1 << 20


class ObjectName(str):
    """A URL with its engine."""

    __slots__ = ("engine", "head", "remote")

    engine: ObjectEngine  # reads it
    remote: RemoteObject  # size and version, as the scan met them
    head: bytes  # its first bytes

    @classmethod
    def of(cls, remote: RemoteObject, engine: ObjectEngine, head: bytes) -> ObjectName:
        """The name of an object that was looked at."""
        name = cls(remote.url)
        name.engine, name.remote, name.head = engine, remote, head
        return name


def read_head(path: str, size: int) -> bytes:
    """The first bytes of a file or object, `size` or fewer.

    Raises OSError if it cannot be read.
    """
    if isinstance(path, ObjectName):
        if size > len(path.head) < path.remote.size:
            raise ValueError(f"{size} bytes of the head asked for, {len(path.head)} were fetched")
        return path.head[:size]
    with open(path, "rb") as f:
        return f.read(size)


def readable(path: str) -> Any:
    """What libraries that want a path or a file can read: the path, or a file over an object."""
    if not isinstance(path, ObjectName):
        return path
    return io.BufferedReader(_ObjectFile(path), _BUFFER_BYTES)


_COMPRESSED: Final = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
"""How files of gzip, bzip2, xz and zstd begin."""

_COMPRESSED_STEP: Final = 4 << 10
"""Bytes that are decompressed at once: the densest that zstd can write are 128 MiB."""


def is_compressed(head: bytes) -> bool:
    """Whether a file that begins with `head` is compressed."""
    return head.startswith(_COMPRESSED)


def opened(path: str) -> io.BufferedReader:
    """A file or object to be read front to back, decompressed where its own first bytes say so.

    Raises SourceError if it cannot be opened, or, when it is read, is damaged or ends too early; MissingPackage
    if it is compressed with zstd, whose library is not installed.
    """
    head = read_head(path, 8)
    how = _decompressor(path, head) if is_compressed(head) else None
    file = readable(path)
    if isinstance(file, str):
        try:
            file = open(file, "rb")  # noqa: SIM115 - the caller's to close
        except OSError as e:
            raise unreadable(path, e, "Make it readable.") from e
    return file if how is None else io.BufferedReader(_Decompressed(path, file, *how), 64 << 10)


class _Decompressed(io.RawIOBase):
    """What compressed streams, one behind the other, hold.

    The libraries' own files differ in what they pass over: an end that is missing (zstd), or bytes that are no
    stream (bzip2). Here each stream must be whole, its checksum (where it has one) must fit, and nothing
    but zeros may stand between.
    """

    def __init__(
        self,
        path: str,
        file: io.BufferedReader,
        make: Callable[[], Any],
        errors: tuple[type[Exception], ...],
    ) -> None:
        super().__init__()
        self._path, self._file = path, file
        self._make, self._errors = make, errors
        self._stream: Any = None
        self._rest = b""
        self._data = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        while not self._data and self._decompress():
            pass
        count = min(len(view), len(self._data))
        view[:count], self._data = self._data[:count], self._data[count:]
        return count

    def _decompress(self) -> bool:
        chunk = self._rest or self._file.read(_COMPRESSED_STEP)
        self._rest = b""
        if self._stream is None:
            padded, chunk = chunk, chunk.lstrip(b"\0")
            if not chunk:
                return bool(padded)
            self._stream = self._make()
        if not chunk:
            raise unsound(self._path, "compressed", "it ends too early")
        try:
            self._data = memoryview(self._stream.decompress(chunk))
        except self._errors as e:
            raise unsound(self._path, "compressed", e) from e
        if self._stream.eof:
            self._rest, self._stream = self._stream.unused_data, None
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompressor(path: str, head: bytes) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """What decompresses one stream of a file that begins so, and what it raises."""
    if head.startswith(_COMPRESSED[0]):
        import zlib

        return (lambda: zlib.decompressobj(wbits=31)), (zlib.error,)
    if head.startswith(_COMPRESSED[1]):
        import bz2

        return bz2.BZ2Decompressor, (OSError,)
    if head.startswith(_COMPRESSED[2]):
        import lzma

        return lzma.LZMADecompressor, (lzma.LZMAError,)
    zstandard = import_extra("zstandard", f"reading {path}")
    return (lambda: zstandard.ZstdDecompressor().decompressobj()), (zstandard.ZstdError,)


class _ObjectFile(io.RawIOBase):
    """A seekable file over an object; who reads it front to back finds the next bytes on their way."""

    def __init__(self, name: ObjectName) -> None:
        super().__init__()
        self._window = ObjectWindow(name)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._window.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._window.read(self._at, len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


T = TypeVar("T")

_NEAR = 64 << 10
"""When headers are nearer to each other than this, reading on is cheaper than seeking."""

_BIG_STEP = 1 << 20
_SMALL_STEP = 4096


class Window:
    """A file seen through a sliding buffer: big steps where headers are dense, small ones else.

    When it is closed, the file must still be as it was when it was opened.
    """

    def __new__(cls, path: str) -> Self:
        """An object's window for an object."""
        if cls is Window and isinstance(path, ObjectName):
            return super().__new__(ObjectWindow)  # type: ignore[return-value]  # a subclass
        return super().__new__(cls)

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise unreadable(path, e, "Make it readable.") from e
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
                raise refused(
                    self.path, f"cannot be read: {e.strerror} (offset {offset:,}).",
                    "Check the disk.", offset,
                ) from e  # fmt: skip
            self._start, self._data = offset, bytes(buffer[:count])
            begin = 0
        return self._data[begin : begin + size]

    def volume(self) -> VolumeEntry:
        """The file as a volume."""
        return VolumeEntry("file", absolute_path(self.path), self.size, self.mtime_ns)


def map_files(paths: list[str], scan: Callable[[str], T], workers: int) -> list[T]:
    """Calls `scan` for each file, with threads; results in the order of `paths`."""
    if len(paths) == 1:
        return [scan(paths[0])]
    with ThreadPoolExecutor(min(workers, len(paths)), "headrace-scan") as pool:
        try:
            return list(pool.map(scan, paths))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


STEP_BYTES = 4 << 20
_FAR_BYTES = 64 << 10


class ObjectWindow(Window):
    """`Window` over an object. Each read checks that it is still the same one."""

    path: ObjectName

    def __init__(self, path: ObjectName) -> None:
        self.path = path
        self.size = path.remote.size
        self._start = 0
        self._data = path.head
        self._ahead: tuple[int, memoryview, Future[Found | Failure]] | None = None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._ahead is not None:
            self._ahead[2].result()

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer at the object's end."""
        size = max(0, min(size, self.size - offset))
        if not self._holds(offset, size):
            self._move(offset, size)
        return self._data[offset - self._start : offset - self._start + size]

    def volume(self) -> VolumeEntry:
        """The object as a volume."""
        remote = self.path.remote
        return VolumeEntry(
            "object", str(self.path), remote.size, remote.modified_ns, etag=remote.etag
        )

    def _holds(self, offset: int, size: int) -> bool:
        return self._start <= offset and offset + size <= self._start + len(self._data)

    def _move(self, offset: int, size: int) -> None:
        """Makes the buffer begin at or before `offset` and hold `size` bytes from there."""
        end = self._start + len(self._data)
        near = self._start <= offset <= end + STEP_BYTES
        if near and self._ahead is None:
            self._fetch_ahead(end)
        while near and self._ahead is not None:
            start, view, future = self._ahead
            self._ahead = None
            if isinstance(outcome := future.result(), Failure):
                raise outcome.to_error()
            kept = self._data[max(0, offset - self._start) :] if offset < start else b""
            self._start, self._data = start - len(kept), kept + bytes(view)
            self._fetch_ahead(start + len(view))
            if self._holds(offset, size):
                return
        if self._ahead is not None:
            self._ahead[2].result()
            self._ahead = None
        view = memoryview(bytearray(min(max(size, _FAR_BYTES), self.size - offset)))
        if view:
            self.path.engine.fetch(str(self.path), offset, view)
        self._start, self._data = offset, bytes(view)

    def _fetch_ahead(self, start: int) -> None:
        size = min(STEP_BYTES, self.size - start)
        if size > 0:
            view = memoryview(bytearray(size))
            future = self.path.engine.start([(str(self.path), start, view)])[0]
            self._ahead = (start, view, future)


HEAD_BYTES = 1024

_NO_SUCH_RANGE = 416
"""The status of a range that begins behind the object's end: an empty one has no first byte."""

_STREAMED = {"parquet", "jsonl", "lines"}
"""Kinds whose compressed objects are packed as they come, without a copy first."""


def open_objects(
    urls: list[str],
    options: SourceOptions,
    objects: ObjectEngine | None,
    open_files: Callable[[list[Any], SourceOptions], Scan | Stream],
) -> Scan | Stream:
    """Lists the objects that URLs and patterns stand for.

    Raises SourceError if there are none, or they cannot be used where they lie, and VolumeError if one cannot
    be read.
    """
    from headrace.io.objects.engine import ObjectEngine
    from headrace.io.objects.listing import expand

    engine = objects or ObjectEngine()
    notes: list[str] = []
    if len(urls) == 1 and urls[0].endswith("/") and not has_magic(urls[0]):
        below = _open_prefix(urls[0], engine, options)
        if isinstance(below, Scan):
            return below
        names, notes = below
    else:
        names = [url for pattern in urls for url in expand(pattern, engine.client_options)]
    if not names:
        raise refused(shown(urls[0]), "there is no such object.", "Check the URL and the pattern.")
    listed_names, empty = _look_at(names, engine)
    if empty:
        more = f" and {len(empty) - 4:,} more" if len(empty) > 4 else ""
        notes.append(f"left out, as they are empty: {', '.join(empty[:4])}{more}")
    if not listed_names:
        raise no_samples(shown(urls[0]), "; all objects are empty")
    engine.register(name.remote for name in listed_names)
    engine.looked_at.update(listed_names)
    listed = open_files(listed_names, options)
    if isinstance(listed, Scan):
        listed.objects = engine
    elif listed.source["kind"] not in _STREAMED:
        raise SourceError(
            f"{shown(names[0])} is compressed, or can only be read front to back.",
            path=shown(names[0]),
            next_step="Copy it to a disk and pack it there, or decompress it.",
        )
    listed.notes.extend(notes)
    return listed


def _look_at(names: list[str], engine: ObjectEngine) -> tuple[list[ObjectName], list[str]]:
    """Objects with their sizes, versions and first bytes; and those that are empty.

    Raises VolumeError if one cannot be read.
    """
    from headrace.io.objects.reading import RemoteObject

    heads = [memoryview(bytearray(HEAD_BYTES)) for _ in names]
    ranges = [(url, 0, head) for url, head in zip(names, heads, strict=True)]
    held, empty = [], []
    for (url, _, head), outcome in zip(ranges, engine.fetch_many(ranges, exact=False), strict=True):
        if not isinstance(outcome, Failure):
            remote = RemoteObject(url, outcome.size, outcome.etag, outcome.modified_ns)
            held.append(ObjectName.of(remote, engine, bytes(head[: outcome.count])))
        elif outcome.fault.status == _NO_SUCH_RANGE:
            empty.append(shown(url))
        else:
            raise outcome.to_error()
    return held, empty


def _open_prefix(
    url: str, engine: ObjectEngine, options: SourceOptions
) -> Scan | tuple[list[str], list[str]]:
    """What lies below a prefix: objects that are samples; or the URLs of shards, and what was left out."""
    from headrace.io.objects.listing import list_objects

    endings = tuple(each.lower() for each in options.extensions or ())
    below: dict[bytes, RemoteObject] = {}
    for remote in list_objects(url, engine.client_options):
        key = remote.url.removeprefix(url)
        hidden = any(part.startswith(".") for part in key.split("/"))
        if not key or key.endswith("/") or hidden or not key.lower().endswith(endings or ("",)):
            continue
        below[os.fsencode(key)] = remote
    names = sorted(below)
    if not names:
        raise refused(shown(url), "there are no objects.", "Check the URL: nothing lies below it.")
    verdict, left, notes = sort_files(shown(url), names, options.format)
    remotes = [below[name] for name in names if name not in left]
    if verdict.kind != "files":
        return [remote.url for remote in remotes], notes
    engine.register(remotes)
    engine.looked_at.update(remote.url for remote in remotes)
    kept = [name for name in names if name not in left]
    labels, classes = labels_of(kept, notes)
    numbers = np.arange(len(kept), dtype=np.uint32)
    sizes = np.array([remote.size for remote in remotes], np.uint64)
    columns = columns_of(kept, numbers, 0 * sizes, sizes, labels=labels, class_names=classes)
    volumes = tuple(
        VolumeEntry("object", each.url, each.size, each.modified_ns, etag=each.etag)
        for each in remotes
    )
    source = {"kind": "objects", "path": url, **options.to_json()}
    return Scan(columns, volumes, source, notes=notes, objects=engine)
