"""HTML: the page around charts and tables, its style, text that is safe in it, and cards for notebooks.

A page is one file that works offline and in which nothing acts. A card is a small box of figures that needs no
style sheet, no script and no address, and takes the notebook's own colours, light or dark.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.base.text import bytes_text, number_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LONGEST = 4000  # characters of a text that comes from a file, at most


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


POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may do with a page of ours: show it, and nothing else."""


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """The page, of parts in HTML; empty ones are left out. The title is escaped here."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{STYLE}{style}</style></head>\n<body>"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


_BOX: Final = (
    "display:inline-block;max-width:44rem;border:1px solid rgba(128,128,128,.4);border-radius:6px;"
    "padding:8px 14px;font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;"
    "font-variant-numeric:tabular-nums"
)
_SOFT: Final = "opacity:.75"
_NAME: Final = f"text-align:left;font-weight:400;{_SOFT};padding:1px 12px 1px 0"
_VALUE: Final = "text-align:left;padding:1px 0;overflow-wrap:anywhere"
_BAR: Final = (
    "display:flex;height:8px;margin:6px 0 2px;border-radius:4px;overflow:hidden;background:#3f8cc0"
)


def card_list(cards: Iterable[tuple[str, str]]) -> str:
    """A page's figures that matter most: (value, perhaps with a unit, and what it is); nothing without."""
    drawn = ""
    for text, what in cards:
        value, _, unit = text.partition(" ")
        unit = unit and f" <small>{safe(unit)}</small>"
        drawn += f"<li><b>{safe(value)}{unit}</b><span>{safe(what)}</span></li>"
    return f'<ul class="cards">{drawn}</ul>' if drawn else ""


def card(
    title: str, rows: Sequence[tuple[str, object]], *, waited: float | None = None, note: str = ""
) -> str:
    """The card: names and values, a bar for the share of the time that was `waited` (None: not known), a note.

    All texts are escaped here.
    """
    lines = "".join(
        f'<tr style="background:none"><th style="{_NAME}">{safe(name)}</th>'
        f'<td style="{_VALUE}">{safe(value)}</td></tr>'
        for name, value in rows
    )
    return (
        f'<div style="{_BOX}"><div style="font-weight:600;overflow-wrap:anywhere">{safe(title)}</div>'
        f'{_bar(waited)}<table style="border-collapse:collapse;margin:4px 0 0">{lines}</table>'
        + (f'<div style="{_SOFT};margin-top:4px">{safe(note)}</div>' if note else "")
        + "</div>"
    )


def _bar(waited: float | None) -> str:
    if waited is None:
        return ""
    share = 100.0 * min(1.0, max(0.0, waited))
    label = f"{share:.1f} % of the time waited for data"
    return (
        f'<div role="img" aria-label="{label}" style="{_BAR}">'
        f'<div style="width:{share:.1f}%;background:#d55e00"></div></div><div style="{_SOFT}">{label}</div>'
    )


STYLE: Final = (Path(__file__).parent / "pages.css").read_text(encoding="utf-8")
"""Without one address: the page works offline."""
