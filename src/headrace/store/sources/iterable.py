"""An iterable of samples as a source: whatever Python can produce, packed in its order.

Items are `bytes`, `(name, bytes)`, `(name, bytes, label)`, or a dict with `data` (bytes, or a dict of
parts) and optionally `name`, `label` and `columns` (a dict of numbers). Without a name, a sample's
name is its zero-padded number.
"""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any

from headrace.errors import SourceError
from headrace.store.sources.scan import Stream, StreamItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_KEYS = frozenset({"name", "data", "label", "columns"})
_EXPECTED = "bytes, (name, bytes), (name, bytes, label) or a dict with name, data, label, columns"


def stream_iterable(source: Iterable[Any] | Callable[[], Iterable[Any]]) -> Stream:
    """A stream over an iterable, or over what a function returns each time it is called.

    Raises:
        SourceError: `source` is no iterable.
    """
    if not callable(source) and not hasattr(source, "__iter__"):
        raise SourceError(
            f"The source is {type(source).__name__}, expected a path or an iterable of samples.",
            next_step="Pass a folder, files, or an iterable of " + _EXPECTED + ".",
        )

    def items() -> Iterator[StreamItem]:
        for i, item in enumerate(source() if callable(source) else source):
            yield to_item(i, item)

    return Stream(items, {"kind": "iterable"})


def to_item(i: int, item: Any) -> StreamItem:
    """Sample `i` of an iterable.

    Raises:
        SourceError: it has none of the known shapes.
    """
    number = b"%012d" % i
    if isinstance(item, (bytes, bytearray, memoryview)):
        return StreamItem(number, ((b"", _data(i, item)),))
    if isinstance(item, tuple) and len(item) in (2, 3):
        label = _label(i, item[2]) if len(item) == 3 else -1
        return StreamItem(_name(i, item[0]), _parts(i, item[1]), label)
    if isinstance(item, dict):
        unknown = sorted(str(k) for k in item if k not in _KEYS)
        if unknown or "data" not in item:
            raise _bad(i, f"a dict with the keys {sorted(map(str, item))}")
        name = item.get("name")
        return StreamItem(
            number if name is None else _name(i, name),
            _parts(i, item["data"]),
            _label(i, item["label"]) if item.get("label") is not None else -1,
            _columns(i, item.get("columns") or {}),
        )
    raise _bad(i, type(item).__name__)


def _bad(i: int, found: str, expected: str = _EXPECTED) -> SourceError:
    return SourceError(
        f"Sample {i} is {found}, expected {expected}.", next_step="Change what the iterable yields."
    )


def _name(i: int, name: Any) -> bytes:
    if not isinstance(name, (str, bytes, os.PathLike)) or not os.fspath(name):
        raise _bad(i, f"named {name!r}", "a non-empty string or bytes as its name")
    return os.fsencode(name)


def _data(i: int, data: Any) -> memoryview:
    try:
        # A copy: the caller may reuse its buffer while we collect a batch.
        return memoryview(bytes(data) if not isinstance(data, bytes) else data)
    except TypeError:
        raise _bad(i, f"of {type(data).__name__}", "bytes as its data") from None


def _parts(i: int, data: Any) -> tuple[tuple[bytes, memoryview], ...]:
    if isinstance(data, dict):
        if not data:
            raise _bad(i, "without any part", "one part or more")
        return tuple(sorted((_name(i, k), _data(i, v)) for k, v in data.items()))
    if isinstance(data, (str, int)):
        raise _bad(i, f"of {type(data).__name__}", "bytes as its data")
    return ((b"", _data(i, data)),)


def _label(i: int, label: Any) -> int:
    try:
        value = operator.index(label)
    except TypeError:
        raise _bad(i, f"labelled {label!r}", "an integer of -1 or more") from None
    if not -1 <= value < 1 << 63:
        raise _bad(i, f"labelled {value}", "an integer from -1 to 2^63-1")
    return value


def _columns(i: int, columns: Any) -> dict[str, int | float]:
    out: dict[str, int | float] = {}
    for name, value in columns.items():
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, (int, float)):
            raise _bad(i, f"with {value!r} in column {name!r}", "a number")
        out[str(name)] = number
    return out
