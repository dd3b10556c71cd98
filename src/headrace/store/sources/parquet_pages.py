"""Pages of a Parquet column chunk: where each value of a PLAIN, uncompressed column lies.

pyarrow says where a chunk of a column begins and how long it is, but not where its pages are, so their
headers are read here: Thrift's compact protocol, of which only numbers and the shape are needed. Each
page is then a run of values, each with its length before it. Nothing is believed: every header, page and
value must end inside what holds it, and the values of a page must fill it exactly.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.store.sources.rows import NotInPlace
from headrace.store.sources.shards import Window, damaged
from headrace.store.sources.thrift import BadThrift, parse_struct

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEADER_BYTES_MAX = 1 << 20
"""A page's header holds its smallest and largest value, which may be a sample."""

_DATA_PAGE, _INDEX_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = range(4)
_PLAIN = 0
_PAGE_NAMES = {0: "PLAIN", 2: "dictionary", 5: "DELTA", 6: "DELTA_LENGTH", 7: "DELTA_BYTE_ARRAY",
               8: "dictionary", 9: "BYTE_STREAM_SPLIT"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group.

    Attributes:
        start: offset of its first page in the file.
        size: bytes of all its pages.
        rows: values in it, nulls included.
        width: bytes of each value, or None where each has its length before it.
        nullable: whether pages may begin with definition levels.
    """

    start: int
    size: int
    rows: int
    width: int | None
    nullable: bool


def list_values(
    window: Window, chunk: ColumnChunk
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Offsets and lengths of a chunk's values, each (rows,) uint64.

    Raises:
        NotInPlace: a page is encoded otherwise, or holds nulls.
        SourceError: the pages contradict themselves.
    """
    end = chunk.start + chunk.size
    if chunk.start < 4 or chunk.size < 0 or end > window.size:
        raise damaged(
            window.path,
            "end of a column chunk",
            f"{end:,}",
            f"at most {window.size:,}",
            chunk.start,
        )
    offset: array[int] = array("Q")
    length: array[int] = array("Q")
    at = chunk.start
    while at < end:
        header, header_bytes = read_page_header(window, at, end)
        data, stop = at + header_bytes, at + header_bytes + header.size
        if header.size < 0 or stop > end:
            raise damaged(window.path, "end of a page", f"{stop:,}", f"at most {end:,}", at)
        if header.values is not None:
            first = _first_value(window, header, data, stop, nullable=chunk.nullable)
            if header.values > chunk.rows - len(offset):
                raise damaged(
                    window.path, "number of values in a page", header.values,
                    f"at most {chunk.rows - len(offset)}", at,
                )  # fmt: skip
            found = _list_page(window, first, stop, header.values, chunk.width)
            offset += found[0]
            length += found[1]
        at = stop
    if len(offset) != chunk.rows:
        raise damaged(
            window.path, "number of values in a column chunk", len(offset), chunk.rows, chunk.start
        )
    return np.array(offset, np.uint64), np.array(length, np.uint64)


def _list_page(
    window: Window, at: int, stop: int, values: int, width: int | None
) -> tuple[array[int], array[int]]:
    """Offsets and lengths of the values of one page, which lie from `at` to `stop`."""
    if width is not None:
        if stop - at != values * width:
            raise _misfit(window, stop - at, values * width, at)
        return array("Q", range(at, stop, width)), array("Q", [width]) * values
    offset, length = array("Q"), array("Q")
    for k in range(values):
        if at + 4 > stop:
            raise _misfit(window, k, values, at)
        size = int.from_bytes(window.read(at, 4), "little")
        at += 4
        if size > stop - at:
            raise damaged(
                window.path, "length of a value", f"{size:,}", f"at most {stop - at:,}", at - 4
            )
        offset.append(at)
        length.append(size)
        at += size
    if at != stop:
        raise damaged(window.path, "end of a page's values", f"{at:,}", f"{stop:,}", at)
    return offset, length


def _misfit(window: Window, found: int, expected: int, at: int) -> Exception:
    """A page with fewer values than rows: nulls take no place, or it is damaged."""
    if found < expected:
        return NotInPlace(f"{window.path}: a page holds nulls (offset {at:,})")
    return damaged(window.path, "size of a page's values", found, expected, at)


def _first_value(
    window: Window, header: PageHeader, data: int, stop: int, *, nullable: bool
) -> int:
    """Where the values begin, behind the levels."""
    if header.compressed:
        raise NotInPlace(f"{window.path}: its pages are compressed")
    if header.encoding != _PLAIN:
        name = _PAGE_NAMES.get(header.encoding or 0, str(header.encoding))
        raise NotInPlace(f"{window.path}: a page's values are {name}-encoded (offset {data:,})")
    if header.levels_bytes is not None:
        first = data + header.levels_bytes
    elif nullable:
        # Definition levels, behind their length.
        if data + 4 > stop:
            raise damaged(window.path, "size of a page", stop - data, "4 or more", data)
        first = data + 4 + int.from_bytes(window.read(data, 4), "little")
    else:
        first = data
    if header.nulls:
        raise NotInPlace(f"{window.path}: a page holds nulls (offset {data:,})")
    if not data <= first <= stop:
        raise damaged(
            window.path, "end of a page's levels", f"{first:,}", f"at most {stop:,}", data
        )
    return first


# -- page headers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageHeader:
    """What matters of a page's header.

    Attributes:
        size: bytes of the page behind its header.
        values: values in it, nulls included; None for a page without values of rows.
        encoding: of the values.
        levels_bytes: bytes of levels before them, where the header says it (version 2).
        nulls: nulls among the values, where the header says it (version 2).
        compressed: whether the header's two sizes differ.
    """

    size: int
    values: int | None = None
    encoding: int | None = None
    levels_bytes: int | None = None
    nulls: int = 0
    compressed: bool = False


def read_page_header(window: Window, at: int, end: int) -> tuple[PageHeader, int]:
    """The page header at `at`, and its length in bytes.

    Raises:
        SourceError: it is none, or longer than a mebibyte.
    """
    size = 256
    while True:
        data = window.read(at, min(size, end - at))
        try:
            fields, used = parse_struct(data)
            return _page_header(fields), used
        except IndexError:  # it goes on behind `data`
            if len(data) < size or size >= _HEADER_BYTES_MAX:
                raise damaged(
                    window.path, "header of a page", "cut off", "a whole header", at
                ) from None
            size *= 16
        except BadThrift as e:
            raise damaged(window.path, "header of a page", e, "a page header", at) from None


def _page_header(fields: dict[int, Any]) -> PageHeader:
    kind, plain, packed = fields.get(1), fields.get(2), fields.get(3)
    if not all(isinstance(x, int) for x in (kind, plain, packed)):
        raise BadThrift("without type and sizes")
    assert isinstance(packed, int)
    if kind not in (_DATA_PAGE, _DATA_PAGE_V2):
        return PageHeader(packed)
    inner = fields.get(5 if kind == _DATA_PAGE else 8)
    if not isinstance(inner, dict):
        raise BadThrift("without the header of its kind")
    values = inner.get(1)
    if not isinstance(values, int) or values < 0:
        raise BadThrift(f"with {values} values")
    if kind == _DATA_PAGE:
        return PageHeader(packed, values, inner.get(2), compressed=plain != packed)
    levels = 0
    for size in (inner.get(5), inner.get(6)):
        if not isinstance(size, int) or not 0 <= size <= packed:
            raise BadThrift(f"with levels of {size} bytes")
        levels += size
    return PageHeader(
        packed, values, inner.get(4), levels, inner.get(2) or 0, compressed=plain != packed
    )
