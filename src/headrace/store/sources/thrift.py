"""Thrift's compact protocol, read: what Parquet's footers and page headers are written in.

Field names play no part in it: a struct is its fields by number. Nothing is allocated by a count that the
bytes do not bear out.
"""

from __future__ import annotations

from typing import Any

_DEPTH_MAX = 12
_STRING_BYTES_MAX = 1 << 24
"""The longest string: footers hold schemas and other metadata as strings."""


class BadThrift(ValueError):
    """Bytes that are not in Thrift's compact protocol."""


def parse_struct(data: bytes) -> tuple[dict[int, Any], int]:
    """A Thrift compact struct as {field id: integer, boolean, bytes, list, struct or None}, and its length.

    Raises `IndexError` where it goes on behind `data`, `ValueError` where it is none.
    """
    reader = _Reader(data)
    return reader.struct(0), reader.at


class _Reader:
    """Thrift's compact protocol, forwards over bytes. Takes memory by the bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _DEPTH_MAX:
            raise BadThrift(f"nested more than {_DEPTH_MAX} deep")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self._zigzag()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # true, false
            return kind == 1
        if kind in (4, 5, 6):  # i16, i32, i64
            return self._zigzag()
        if kind == 8:
            return self._take(self._varint())
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (9, 10):  # list, set
            return self._list(depth)
        if kind not in (3, 7):
            raise BadThrift("of an unknown type")
        self._take(1 if kind == 3 else 8)  # byte, double
        return None

    def _list(self, depth: int) -> list[Any]:
        if depth > _DEPTH_MAX:
            raise BadThrift(f"nested more than {_DEPTH_MAX} deep")
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == 15:
            count = self._varint()
        # Each element takes a byte at least, so the data bounds the count.
        if kind in (1, 2):
            return [self._byte() == 1 for _ in range(count)]
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _take(self, size: int) -> bytes:
        if size > _STRING_BYTES_MAX:
            raise BadThrift(f"with a string of {size:,} bytes")
        if self.at + size > len(self._data):
            raise IndexError
        self.at += size
        return self._data[self.at - size : self.at]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise BadThrift("with a number of more than 10 bytes")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
