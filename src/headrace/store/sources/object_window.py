"""A shard in an object store, seen through a sliding buffer that is fetched ahead.

Where what a scan looks at lies densely the whole object is read, front to back, in large ranges, the
next one always on its way: a request costs as much as megabytes. Where it lies far apart only the
places themselves are fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.io.objects.failure import Failure
from headrace.store.sources.scan import SourceVolume
from headrace.store.sources.shards import Window

if TYPE_CHECKING:
    from concurrent.futures import Future

    from headrace.io.objects.transport import Found
    from headrace.store.sources.object_name import ObjectName

STEP_BYTES = 4 << 20
_FAR_BYTES = 64 << 10


class ObjectWindow(Window):
    """`Window` over an object.

    Args:
        path: its name. That it does not change meanwhile is checked with each read.
    """

    path: ObjectName

    def __init__(self, path: ObjectName) -> None:
        self.path = path
        self.size = path.found.size
        self._start = 0
        self._data = path.head
        self._ahead: tuple[int, memoryview, Future[Found | Failure]] | None = None
        self._far = False

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._ahead is not None:
            self._ahead[2].result()

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer at the object's end."""
        size = max(0, min(size, self.size - offset))
        begin = offset - self._start
        if begin < 0 or begin + size > len(self._data):
            self._move(offset, size)
            begin = offset - self._start
        return self._data[begin : begin + size]

    def volume(self) -> SourceVolume:
        """The object as a volume."""
        found = self.path.found
        return SourceVolume("object", str(self.path), found.size, found.modified_ns, found.etag)

    def _move(self, offset: int, size: int) -> None:
        """Makes the buffer begin at or before `offset` and hold `size` bytes from there."""
        end = self._start + len(self._data)
        near = offset - self._start >= 0 and offset <= end + STEP_BYTES
        if near and self._ahead is None:
            self._fetch_ahead(end)
        while near and self._ahead is not None:
            start, view, future = self._ahead
            self._ahead = None
            _raise_failure(future.result())
            kept = self._data[max(0, offset - self._start) :] if offset < start else b""
            self._start, self._data = start - len(kept), kept + bytes(view)
            self._fetch_ahead(start + len(view))
            if self._start <= offset and offset + size <= self._start + len(self._data):
                return
        self._jump(offset, size)

    def _jump(self, offset: int, size: int) -> None:
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


def _raise_failure(outcome: Found | Failure) -> None:
    if isinstance(outcome, Failure):
        raise outcome.to_error()
