"""Documents: JSON files that carry their own checksum, and typed access to what they say.

    {"kind": "headrace checkpoint", "version": 2, "step": 7, "world_size": 1, "crc32c": "0123abcd"}

The last field is the CRC-32C of all bytes before its comma, so every other program still reads the file as
JSON, and every flipped bit is found: one before the comma by the checksum, one behind it because the end
is not `, "crc32c": "` with eight digits, a quote, a brace and a newline any more.

A document without a checksum is believed only if its version is one that was written without (`unchecked`).
A flipped bit cannot make it so: it hits the version or the checksum, and either alone gives the document away.

Nothing is believed before it was checked: the size before the checksum, the checksum before the nesting, the
nesting before the text is parsed, and each value when it is asked for. A checksum is no signature: whoever may
write the file may write it with a good one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.base.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from headrace.errors import HeadraceError

_SEAL = re.compile(rb', "crc32c": "([0-9a-f]{8})"\}\n\Z')
_SEAL_BYTES = len(', "crc32c": "01234567"}\n')
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SHOWN_CHARACTERS = 200


def seal(text: bytes) -> bytes:
    """A JSON object with at least one field, as text, with its checksum as the last field."""
    body = text.rstrip()
    if body[-1:] != b"}" or b":" not in body:
        raise ValueError("expected the text of a JSON object that is not empty")
    body = body[:-1].rstrip()
    return body + b', "crc32c": "%08x"}\n' % crc32c(body)


def unseal(data: bytes) -> tuple[str, str] | None:
    """The checksum of a document's bytes, and the one that it carries; None: it carries none."""
    match = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if match is None:
        return None
    return f"{crc32c(data[: match.start()]):08x}", match[1].decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentKind:
    """What documents of one kind have in common."""

    name: str  # for messages: "the manifest of a checkpoint"
    version: int  # that is written, with a checksum
    error: type[HeadraceError]  # to raise
    next_step: str  # what to do about a document that cannot be used
    marks: Mapping[str, Any] = field(default_factory=dict)
    """Fields that each document of this kind has, with their values."""
    unchecked: int | None = None
    """The version that was written without a checksum, and is still read; 0: it said no version."""
    bytes_max: int = 16 << 20  # a larger document is refused unread
    containers_max: int = 1_000_000  # objects and lists in all
    depth_max: int = 64  # objects and lists in each other

    def encode(self, content: Mapping[str, Any], *, indent: int | None = None) -> bytes:
        """The file's content: marks, version, `content` and the checksum."""
        separators = (",", ":") if indent is None else (",", ": ")
        document = {**self.marks, "version": self.version, **content}
        return seal(json.dumps(document, indent=indent, separators=separators).encode())

    def decode(self, data: bytes, path: str) -> Fields:
        """What all the `data` of a file say; one byte more than `bytes_max` is enough. `path` is for messages.

        Raises HeadraceError as `error` says: it is damaged, too large, of another kind or version.
        """
        if len(data) > self.bytes_max:
            self.refuse(path, "the size", f"over {self.bytes_max:,} bytes", "no more than that")
        sums = unseal(data)
        if sums is not None and sums[0] != sums[1]:
            self.refuse(path, "the checksum", sums[0], sums[1])
        self._check_nesting(data, path)
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as e:
            self.refuse(path, "the text", f"no JSON ({e})", "an object")
        if not isinstance(values, dict):
            self.refuse(path, "the text", f"a {type(values).__name__}", "an object")
        for key, value in self.marks.items():
            if values.get(key) != value:
                self.refuse(path, key, values.get(key), repr(value))
        version = values.get("version", 0)
        expected = self.version if sums is not None else self.unchecked
        if type(version) is not int or version != expected:
            self._refuse_version(path, version, sealed=sums is not None)
        for key in ("version", "crc32c", *self.marks):
            values.pop(key, None)
        return Fields(self, path, values)

    def refuse(self, path: str, what: str, actual: object, expected: object) -> NoReturn:
        """Raises the error for a document of this kind: what is wrong in it."""
        text = actual if isinstance(actual, str) and what.startswith("the ") else repr(actual)
        raise self.error(
            f"{path}: {what} of {self.name} is {text[:_SHOWN_CHARACTERS]}, expected {expected}.",
            path=path,
            next_step=self.next_step,
        )

    def _refuse_version(self, path: str, version: object, *, sealed: bool) -> NoReturn:
        if isinstance(version, int) and version > self.version:
            self.refuse(path, "version", version, f"{self.version}: a newer headrace wrote it")
        if version == self.version and not sealed:
            self.refuse(path, "the checksum", "missing or damaged", "one in the last field, crc32c")
        self.refuse(path, "version", version, self.version)

    def _check_nesting(self, data: bytes, path: str) -> None:
        brackets = _STRING.sub(b"", data).translate(_BRACKETS, _NO_BRACKET)
        count = brackets.count(b"[")
        if count > self.containers_max:
            self.refuse(
                path,
                "the number of objects and lists",
                f"{count:,}",
                f"at most {self.containers_max:,}",
            )
        for _ in range(self.depth_max):
            inner = brackets.replace(b"[]", b"")
            if len(inner) == len(brackets):
                return  # nothing left, or they do not match, which the parser tells better
            brackets = inner
        if brackets:
            self.refuse(
                path, "the nesting", f"over {self.depth_max} deep", f"at most {self.depth_max}"
            )


class Fields:
    """An object of a document. Each value is checked when it is asked for.

    Every method raises the error of the document's kind, with file, place, value and what was expected.
    """

    __slots__ = ("_kind", "_path", "_values", "_where")

    def __init__(
        self, kind: DocumentKind, path: str, values: dict[str, Any], where: str = ""
    ) -> None:
        self._kind, self._path, self._values, self._where = kind, path, values, where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def plain(self) -> dict[str, Any]:
        """All of it as it stands, without marks, version and checksum."""
        return dict(self._values)

    def value(self, key: str, default: Any = None) -> Any:
        """Whatever stands there."""
        return self._values.get(key, default)

    def text(self, key: str, *, characters_max: int = 1 << 16) -> str:
        """A string."""
        value = self._values.get(key)
        if not isinstance(value, str) or len(value) > characters_max:
            self.refuse(key, f"a string of at most {characters_max:,} characters")
        return value

    def matching(self, key: str, pattern: re.Pattern[str], expected: str) -> str:
        """A string that a pattern matches as a whole."""
        value = self._values.get(key)
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            self.refuse(key, expected)
        return value

    def one_of(self, key: str, values: Collection[str]) -> str:
        """One of these strings."""
        value = self._values.get(key)
        if not isinstance(value, str) or value not in values:
            self.refuse(key, "one of " + ", ".join(values))
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        """A whole number, bounds included."""
        value = self._values.get(key)
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """A number, bounds included; never NaN."""
        value = self._values.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            self.refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def inner(self, key: str) -> Fields:
        """Another object."""
        value = self._values.get(key)
        if not isinstance(value, dict):
            self.refuse(key, "an object")
        return Fields(self._kind, self._path, value, f"{self._where}{key}.")

    def each(self, key: str, low: int = 0, high: int = 1 << 32) -> list[Fields]:
        """A list of objects."""
        return [Fields(self._kind, self._path, v, f"{self._where}{key}[{i}].")
                for i, v in enumerate(self._list(key, low, high, dict, "objects"))]  # fmt: skip

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(self._list(key, 0, 1 << 20, str, "strings"))

    def integers(self, key: str, low: int, high: int) -> dict[str, int]:
        """An object whose values are whole numbers, bounds included."""
        values = self.inner(key)
        return {name: values.integer(name, low, high) for name in values}

    def refuse(self, key: str, expected: object) -> NoReturn:
        """Raises the error for what stands at `key`."""
        value = self._values.get(key) if key in self._values else "missing"
        self._kind.refuse(self._path, f"{self._where}{key}", value, expected)

    def _list(self, key: str, low: int, high: int, kind: type, what: str) -> list[Any]:
        values = self._values.get(key)
        if (
            not isinstance(values, list)
            or not low <= len(values) <= high
            or not all(isinstance(v, kind) for v in values)
        ):
            self.refuse(key, f"a list of {low:,} to {high:,} {what}")
        return values
