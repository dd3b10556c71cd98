"""Text: numbers as people read them, and names that come from anywhere, safe to stand in HTML."""

from __future__ import annotations

import html
import re

__all__ = [
    "bytes_text",
    "count_text",
    "marked",
    "measure_text",
    "number_text",
    "safe",
    "seconds_text",
]

_LONGEST = 4000
"""Characters of a text that comes from a file, at most."""


def safe(value: object) -> str:
    """The value's text, escaped for HTML's text and attributes.

    What is not printable (controls, marks of direction, halves of characters) is shown as its escape: a
    name must not be able to turn the line around it.
    """
    text = str(value)
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + " [...]"
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return html.escape(shown, quote=True)


def marked(value: object) -> str:
    """As `safe`; what stands between backticks is shown as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe(value))


def number_text(value: float) -> str:
    """Four digits or all before the point."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def count_text(value: float) -> str:
    """As `number_text`, large ones in thousands, millions: short enough for an axis."""
    for unit in ("", " k", " M", " G"):
        if abs(value) < 10_000 or unit == " G":
            return number_text(value) + unit
        value /= 1000
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """0.00123 -> '1.23 ms'."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 1 or unit == "µs":
            return f"{number_text(seconds * factor)} {unit}" if seconds else "0 s"
    raise AssertionError


def bytes_text(count: float) -> str:
    """Decimal, as disks and networks count."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{number_text(count)} {unit}"
        count /= 1000
    raise AssertionError


def measure_text(value: float, unit: str) -> str:
    """A measure's value with its unit."""
    if unit == "s":
        return seconds_text(value)
    if unit == "B":
        return bytes_text(value)
    if unit == "%":
        return f"{value:.2f} %"
    return f"{number_text(value)} {unit}".rstrip()
