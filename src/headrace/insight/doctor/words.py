"""Figures in words, short enough for a line of 80 characters."""

from __future__ import annotations

import os

__all__ = ["bytes_text", "count_text", "duration_text", "rate_text", "safe"]

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def bytes_text(value: float) -> str:
    """1234567 -> '1.2 MB': decimal, as disks and networks count."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value /= 1000
        power += 1
    digits = 0 if power == 0 or value >= 99.5 else 1
    return f"{value:.{digits}f} {_PREFIXES[power]}B"


def rate_text(value: float) -> str:
    """9832.1 -> '9,800': two figures are what a short look can promise."""
    if value <= 0:
        return "0"
    if value < 10:
        return f"{value:.1f}"
    step = 10 ** max(0, len(str(int(value))) - 2)
    return f"{round(value / step) * step:,.0f}"


def count_text(value: float) -> str:
    """1234567 -> '1,234,567'."""
    return f"{value:,.0f}"


def duration_text(seconds: float) -> str:
    """0.00312 -> '3.1 ms'."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.{0 if seconds >= 0.00995 else 1}f} ms"
    return f"{seconds * 1e6:.0f} us"


def safe(text: str) -> str:
    r"""Without what could move a terminal's cursor: control characters and bytes that are no text as `\xNN`."""
    if text.isprintable():
        return text
    raw = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in raw)
