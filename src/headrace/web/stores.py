"""Stores: find a sample by name, beginning of a name, or index; see where it lies, and its picture.

Only stores that were named when the server was started, and only to read. What a sample holds is anybody's:
it is shown as a picture only if its first bytes are those of one, with the type that these say.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import HeadraceError, SampleNotFound
from headrace.store.residency import resident_range
from headrace.store.sources.contents import format_of_bytes
from headrace.web.views import plain, sentence, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.store import Store
    from headrace.store.segment import Extent, OpenSegment

ROWS: Final = 50
IMAGE_BYTES_MAX: Final = 32 << 20
PREVIEW_BYTES: Final = 256


def image_type(data: bytes | memoryview) -> str | None:
    """The type of a picture that browsers show safely, by its first bytes; None: it is none."""
    kind = format_of_bytes(bytes(data[:16]))
    return f"image/{kind}" if kind in ("png", "jpeg", "gif", "webp") else None


class StoreBrowser:
    """Open stores, by their number. Its calls may come from several threads."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = list(stores)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close them."""
        for store in self._stores:
            store.close()

    def listed(self) -> list[dict[str, Any]]:
        """What there is."""
        return [
            {
                "number": number,
                "path": plain(store.path),
                "samples": len(store),
                "bytes": store.nbytes,
                "classes": len(store.classes or []),
                "fingerprint": store.fingerprint,
            }
            for number, store in enumerate(self._stores)
        ]

    def find(
        self, number: int, *, prefix: str = "", index: int | None = None, after: str = ""
    ) -> dict[str, Any]:
        """A page of samples whose names begin so, in the order of names; else from an index on.

        `after` is the `next` of the page before.

        Raises SampleNotFound if there is no such store or index.
        """
        with self._lock:
            store = self._store(number)
            if prefix:
                matches = list(_with_prefix(store, os.fsencode(prefix), after))
                segment, rank, _ = matches[:ROWS][-1] if matches else (0, 0, 0)
                more = f"{segment}:{rank + 1}" if len(matches) > ROWS else ""
                indices = [index for _, _, index in matches[:ROWS]]
            else:
                first = whole_number(after, "after") if after else index or 0
                if len(store):
                    first = store.index_of(first)
                indices = list(range(first, min(first + ROWS, len(store))))
                more = str(first + ROWS) if first + ROWS < len(store) else ""
            return {"samples": [_row(store, i) for i in indices], "next": more, "of": len(store)}

    def sample(self, number: int, index: int) -> dict[str, Any]:
        """A sample and where each of its parts lies.

        Raises SampleNotFound if there is none, and HeadraceError if it cannot be read.
        """
        with self._lock:
            store = self._store(number)
            index = store.index_of(index)
            segment = store.segment_of(index)
            parts = [self._part(store, segment, extent) for extent in segment.extents(index)]
            columns = {plain(name): plain(values[index]) for name, values in store.columns.items()}
            return _row(store, index) | {
                "parts": parts, "columns": columns, "path": plain(store.path),
            }  # fmt: skip

    def image(self, number: int, index: int, part: str | None) -> tuple[bytes, str]:
        """A picture and its type.

        Raises SampleNotFound if there is no such sample or part, ValueError if it is no picture, or too large
        to be shown, and HeadraceError if it cannot be read.
        """
        with self._lock:
            store = self._store(number)
            sizes = store.parts_of(index)
            name = next(iter(sizes)) if part is None and len(sizes) == 1 else part
            if name is not None and sizes.get(name, 0) > IMAGE_BYTES_MAX:
                raise ValueError(
                    f"it has {sizes[name]:,} bytes, at most {IMAGE_BYTES_MAX:,} are shown as a picture"
                )
            data = bytes(store.read(index, part=part))
        kind = image_type(data)
        if kind is None:
            raise ValueError("it is no PNG, JPEG, GIF or WebP: nothing else is shown as a picture")
        return data, kind

    def _store(self, number: int) -> Store:
        if not 0 <= number < len(self._stores):
            raise SampleNotFound(
                f"there is no store {number}.", next_step="Name stores: headrace web --store DIR."
            )
        return self._stores[number]

    @staticmethod
    def _part(store: Store, segment: OpenSegment, extent: Extent) -> dict[str, Any]:
        volume = segment.volumes.entries[extent.volume]
        name = os.fsdecode(segment.directory.part_names[extent.part])
        path = segment.volumes.paths[extent.volume]
        file = f"{path}/{os.fsdecode(extent.name)}" if volume.kind == "tree" else path
        part: dict[str, Any] = {
            "part": plain(name), "volume": plain(file), "kind": volume.kind,
            "offset": extent.offset, "length": extent.length,
            "crc32c": None if extent.crc is None else f"{extent.crc:08x}",
            "resident": None if volume.kind == "object" else _resident(file, extent),
            "image": None, "hex": "", "text": "", "trouble": "",
        }  # fmt: skip
        try:
            head = bytes(store.read(extent.index, 0, PREVIEW_BYTES, part=name))
        except HeadraceError as e:
            part["trouble"] = sentence(e)
            return part
        part["image"] = image_type(head)
        if part["image"] is None:
            part["hex"] = head.hex(" ")
            part["text"] = plain(head.decode("utf-8", "replace"))
        return part


def _resident(path: str, extent: Extent) -> int | None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return resident_range(fd, extent.offset, extent.length)
        finally:
            os.close(fd)
    return None


def _row(store: Store, index: int) -> dict[str, Any]:
    labels, classes = store.labels, store.classes or []
    label = None if labels is None else int(labels[index])
    named = label is not None and 0 <= label < len(classes)
    return {
        "index": index,
        "name": plain(store.names[index]),
        "bytes": sum(store.parts_of(index).values()),
        "label": label,
        "class": plain(classes[label]) if named and label is not None else "",
    }


def _with_prefix(store: Store, prefix: bytes, after: str) -> Iterator[tuple[int, int, int]]:
    """Segment, rank and index of names that begin so, one more than are shown."""
    begin, _, rank_text = after.partition(":")
    first = whole_number(begin, "after") if after else 0
    left = ROWS + 1
    for at in range(first, len(store.segments)):
        segment = store.segments[at]
        rank = (
            whole_number(rank_text, "after")
            if after and at == first
            else segment.directory.seek(prefix)
        )
        while left and rank < segment.directory.samples:
            local = segment.directory.index_at_rank(rank)
            if not segment.directory.name(local).startswith(prefix):
                break
            yield at, rank, local + segment.base
            left -= 1
            rank += 1
