"""`ObjectName`: the URL of an object that knows who reads it, in the place of a file's path.

Sources take paths and hand them on. A URL travels the same way, as a string, and where bytes are needed
`read_head`, `readable` and `shards.Window` find its engine in it.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from headrace.errors import SourceError
from headrace.io.objects.location import is_url

if TYPE_CHECKING:
    from headrace.io.objects.engine import ObjectEngine
    from headrace.io.objects.reading import RemoteObject

_BUFFER_BYTES = 1 << 20


class ObjectName(str):
    """A URL with its engine.

    Attributes:
        engine: reads it.
        found: size and version, as the scan met them.
        head: its first bytes.
    """

    __slots__ = ("engine", "found", "head")

    engine: ObjectEngine
    found: RemoteObject
    head: bytes

    @classmethod
    def of(cls, found: RemoteObject, engine: ObjectEngine, head: bytes) -> ObjectName:
        """The name of an object that was looked at."""
        name = cls(found.url)
        name.engine, name.found, name.head = engine, found, head
        return name


def absolute_path(path: str) -> str:
    """A file's absolute path; a URL as it is."""
    return str(path) if is_url(path) else os.path.abspath(path)


def read_head(path: str, size: int) -> bytes:
    """The first bytes of a file or object, `size` or fewer.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(path, ObjectName):
        if size > len(path.head) < path.found.size:
            raise ValueError(f"{size} bytes of the head asked for, {len(path.head)} were fetched")
        return path.head[:size]
    with open(path, "rb") as f:
        return f.read(size)


def readable(path: str) -> Any:
    """What libraries that want a path or a file can read: the path, or a file over an object."""
    return (
        io.BufferedReader(_ObjectFile(path), _BUFFER_BYTES)
        if isinstance(path, ObjectName)
        else path
    )


def open_binary(path: str) -> Any:
    """A file or object, open for reading."""
    return readable(path) if isinstance(path, ObjectName) else open(path, "rb")


def refuse_object(path: str, what: str) -> None:
    """Says that this kind of source must be a local file.

    Raises:
        SourceError: `path` is an object.
    """
    if is_url(path):
        raise SourceError(
            f"{path}: {what} in an object store cannot be read where it lies.",
            path=str(path),
            next_step="Copy it to a disk first.",
        )


class _ObjectFile(io.RawIOBase):
    """A seekable file over an object."""

    def __init__(self, name: ObjectName) -> None:
        super().__init__()
        self._name = name
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._name.found.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._name.found.size - self._at))]
        if len(view):
            self._name.engine.fetch(str(self._name), self._at, view)
        self._at += len(view)
        return len(view)
