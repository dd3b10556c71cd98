"""Text: numbers, sizes and times as people read them, and names from anywhere made safe to print.

One rule for each kind of number, wherever it is shown: terminal, report, page or message.
"""

from __future__ import annotations

import os
import re
import textwrap
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}


def bytes_text(count: float) -> str:
    """1234567 -> '1.23 MB': decimal, as disks and networks count, three figures."""
    power = 0
    while abs(count) >= 999.5 and power < len(_PREFIXES) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g} {_PREFIXES[power]}B"


def rate_text(bytes_per_s: float) -> str:
    """1234567890 -> '1,235 MB/s': rates that stand side by side have one unit."""
    rate = bytes_per_s / 1e6
    return f"{rate:,.0f} MB/s" if rate >= 99.95 else f"{rate:.3g} MB/s"


def binary_text(power_of_two: int) -> str:
    """65536 -> '64 KiB': for sizes that are powers of two."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if power_of_two < 1024:
            return f"{power_of_two} {unit}"
        power_of_two //= 1024
    return f"{power_of_two} TiB"


def bytes_of(text: str) -> int:
    """`8G`, `512M`, `1024` in bytes; the units are powers of 1024.

    Raises ValueError if the text is no size.
    """
    number, shift = text.strip().upper().removesuffix("IB").removesuffix("B"), 0
    if number and number[-1] in _SHIFTS:
        number, shift = number[:-1], _SHIFTS[number[-1]]
    try:
        return int(float(number) * (1 << shift))
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no size, expected bytes, or as 512M, 8G") from None


def count_text(value: float) -> str:
    """1234567 -> '1,234,567'."""
    return f"{value:,.0f}"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def times_text(count: int) -> str:
    """1 -> 'once', 3 -> '3 times'."""
    return "once" if count == 1 else f"{count:,} times"


def number_text(value: float) -> str:
    """Four digits, or all before the point."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def rough_text(value: float) -> str:
    """9832.1 -> '9,800': two figures are what a short measurement can promise."""
    if value <= 0:
        return "0"
    if value < 10:
        return f"{value:.1f}"
    step = 10 ** max(0, len(str(int(value))) - 2)
    return f"{round(value / step) * step:,.0f}"


def percent_text(share: float) -> str:
    """0.1234 -> '12.3 %'."""
    if 0 < share < 0.0005:
        return "less than 0.1 %"
    return f"{100 * share:.1f} %" if share else "0 %"


def seconds_text(seconds: float) -> str:
    """0.003124 -> '3.12 ms': what a step or a request takes."""
    if not seconds:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * factor
        if abs(value) >= 0.9995 or unit == "us":
            return f"{value:,.0f} {unit}" if abs(value) >= 999.5 else f"{value:.3g} {unit}"
    raise AssertionError


def duration_text(seconds: float) -> str:
    """83.2 -> '1:23', 3.21 -> '3.2 s': what a run takes."""
    if seconds < 1:
        return seconds_text(seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def labelled(label: str, text: str, *, margin: int = 10, width: int = 80) -> list[str]:
    """Lines of at most `width` with a label in the margin of the first; breaks in the text stay breaks."""
    lines: list[str] = []
    for part in text.split("\n"):
        lines += textwrap.wrap(
            part, width - margin, break_on_hyphens=False,
            subsequent_indent="  " if part[:1] == " " else "",
        ) or [""]  # fmt: skip
    return [f"{label if i == 0 else '':<{margin}}{line}".rstrip() for i, line in enumerate(lines)]


def aligned(rows: Sequence[Sequence[str]], sides: str = "") -> list[str]:
    """Rows as columns of text; `sides` has a < or > for each, to which its cells are: without, all >."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shapes = list(zip(sides or ">" * len(widths), widths, strict=True))
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, (side, width) in zip(row, shapes, strict=True)).rstrip()
        for row in rows
    ]  # fmt: skip


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was meant by one that is none; "" if it is like none of them."""
    import difflib  # for errors alone

    return next(iter(difflib.get_close_matches(name, list(known), 1)), "")


def printable(text: str, *, lines: bool = False) -> str:
    r"""Without what could move a terminal's cursor: control characters and bytes that are no text as `\xNN`.

    Args:
        text: of any origin; a file's name may hold lone surrogates.
        lines: line breaks and tabs stay, as those of a message; those of a name do not.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    raw = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in raw)


_SECRET_WORDS: Final = r"secret\w*|token|password|passwd|credential\w*|access_key\w*"  # noqa: S105 - a pattern

_SECRET_WORD: Final = re.compile(rf"[-+~]{{0,2}}[\w./@-]*(?:{_SECRET_WORDS})=", re.IGNORECASE)
"""How a word of a command line begins whose value is secret, whatever the value holds."""

_SECRET_IN_TEXT: Final = re.compile(
    rf"""(["']?\w*(?:{_SECRET_WORDS})["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,}}]+)""", re.IGNORECASE
)


def redacted(given: Any) -> Any:
    """Words of a command line, texts, or settings as mappings, without secrets."""
    if isinstance(given, dict):
        return {
            key: redacted(value)
            if isinstance(value, dict) or not _SECRET_IN_TEXT.match(f"{key}=x")
            else "***"
            for key, value in given.items()
        }
    if isinstance(given, (list, tuple)):
        return type(given)(redacted(each) for each in given)
    if not isinstance(given, str):
        return given
    if word := _SECRET_WORD.match(given):
        return f"{word[0]}***"
    return _SECRET_IN_TEXT.sub(r"\1***", given)
