"""Values: what a key's value may be. Each converter takes what YAML gave and returns what we use.

A converter raises `ValueError` whose message goes after "expected": the caller knows file, line and key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "Converter",
    "boolean",
    "choice",
    "integer",
    "integers",
    "mapping",
    "number",
    "optional",
    "shuffle",
    "text",
    "texts",
    "word",
]

Converter = Callable[[Any], Any]
"""From YAML's value to ours."""

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers like 1e-3, which YAML 1.1 takes for text and OmegaConf, DLIO's reader, does not."""


def boolean(value: Any) -> bool:
    """True or false, also as OmegaConf reads text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("true or false")


def integer(least: int | None = None) -> Converter:
    """Whole numbers, not below `least`; 4.0 is one."""

    def convert(value: Any) -> int:
        found = _numeric(value)
        if found is None or found != int(found) or (least is not None and found < least):
            raise ValueError("a whole number" + ("" if least is None else f" of at least {least}"))
        return int(found)

    return convert


def number(least: float | None = None, most: float | None = None) -> Converter:
    """Finite numbers within bounds."""

    def convert(value: Any) -> float:
        found = _numeric(value)
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        if found is None or not low <= found <= high:
            bounds = "" if least is None else f" of at least {least:g}"
            raise ValueError(f"a number{bounds}" + ("" if most is None else f", at most {most:g}"))
        return float(found)

    return convert


def _numeric(value: Any) -> float | int | None:
    if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def text(value: Any) -> str:
    """A word or a line. Numbers are text, too: a prefix may be 7."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        raise ValueError("text")
    return str(value)


def word(value: Any) -> str:
    """Text, where YAML takes the word null for nothing."""
    return "null" if value is None else text(value)


def choice(*names: str) -> Converter:
    """One of some words, in any case."""

    def convert(value: Any) -> str:
        if isinstance(value, str) and value.lower() in names:
            return value.lower()
        raise ValueError("one of " + ", ".join(names))

    return convert


def shuffle(value: Any) -> str:
    """off, seed or random. YAML reads a bare `off` as false, on which DLIO fails."""
    if value is False:
        return "off"
    converted: str = choice("off", "seed", "random")(value)
    return converted


def integers(least: int | None = None) -> Converter:
    """A list of whole numbers, as a tuple; one number is a list of one."""
    one = integer(least)

    def convert(value: Any) -> tuple[int, ...]:
        found = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        try:
            return tuple(one(entry) for entry in found)
        except ValueError as e:
            raise ValueError(f"a list, each {e}") from e

    return convert


def texts(value: Any) -> tuple[str, ...]:
    """A list of words, as a tuple; one word is a list of one."""
    found = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return tuple(text(entry) for entry in found)


def mapping(value: Any) -> dict[str, Any]:
    """Keys and values, whatever they are."""
    if isinstance(value, dict):
        return value
    raise ValueError("keys and values")


def optional(converter: Converter) -> Converter:
    """The same, or null for none."""

    def convert(value: Any) -> Any:
        return None if value is None or value == "None" else converter(value)

    return convert
