"""Text: numbers as people read them, and names that come from anywhere, safe to stand in HTML."""

from __future__ import annotations

import html
import re

from headrace.base.text import bytes_text, number_text, seconds_text

__all__ = ["axis_text", "marked", "measure_text", "safe"]

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


def axis_text(value: float) -> str:
    """As `base.text.number_text`, large ones in thousands, millions: short enough for an axis."""
    for unit in ("", " k", " M", " G"):
        if abs(value) < 10_000 or unit == " G":
            return number_text(value) + unit
        value /= 1000
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
