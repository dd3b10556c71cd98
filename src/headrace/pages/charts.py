"""Charts: SVG within the page, each with its table behind it. Colours are classes: see `style`.

No chart needs its colours to be read: parts are named where they stand or in the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.pages.text import safe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Part",
    "bars",
    "columns",
    "figure",
    "legend",
    "round_up",
    "stacked",
    "svg",
    "table",
    "text",
]

_WIDTH: Final = 720
_LEFT: Final = 108
_RIGHT: Final = 16
_LABEL: Final = 170

_VALUES_MOST: Final = 10
"""Columns that have their value above them, at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """A named value with its text and the class of its colour."""

    name: str
    value: float
    text: str
    colour: str = "c1"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; columns after the first are figures."""
    heads = "".join(f'<th scope="col">{safe(h)}</th>' for h in head)
    body = "".join(
        f'<tr><th scope="row">{safe(row[0])}</th>'
        + "".join(f"<td>{safe(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(title: str, svg: str, behind: str, said: str = "") -> str:
    """A chart with its title, what to see in it, and its table."""
    note = f"<p>{safe(said)}</p>" if said else ""
    return (
        f"<figure><figcaption>{safe(title)}</figcaption>{note}{svg}"
        f"<details><summary>As a table</summary>{behind}</details></figure>"
    )


def svg(height: float, name: str, inside: str) -> str:
    """A picture of so many units' height, as wide as the page."""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{safe(name)}">'
        f"{inside}</svg>"
    )


def text(x: float, y: float, text: str, where: str = "start", kind: str = "") -> str:
    """A word or two within a picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{where}" class="{kind}">{safe(text)}</text>'


def _rect(box: tuple[float, float, float, float], kind: str, told: str) -> str:
    x, y, width, height = box
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" '
        f'height="{max(0.0, height):.1f}" class="{kind}"><title>{safe(told)}</title></rect>'
    )


def legend(named: Sequence[tuple[str, str]]) -> str:
    """What colours stand for: (class, name)."""
    told = "".join(f'<li><i class="{colour}"></i>{safe(name)}</li>' for colour, name in named)
    return f'<ul class="legend">{told}</ul>'


def stacked(name: str, parts: Sequence[Part]) -> str:
    """One bar that is parts of a whole, with a legend."""
    total = sum(part.value for part in parts)
    if total <= 0:
        return ""
    drawn, x, named = [], 0.0, []
    for part in parts:
        width = part.value / total * _WIDTH
        told = f"{part.name}: {part.text}"
        drawn.append(_rect((x, 4, width - (1 if width > 3 else 0), 36), part.colour, told))
        x += width
        named.append((part.colour, told))
    return svg(44, name, "".join(drawn)) + legend(named)


def bars(name: str, parts: Sequence[Part], *, words: float = 130) -> str:
    """A bar for each part, below each other, on one scale from 0.

    Args:
        name: what it shows.
        parts: from the top down.
        words: room for the text behind the longest bar, of a picture that is 720 wide.
    """
    most = max((part.value for part in parts), default=0.0)
    room = _WIDTH - _LABEL - words
    drawn = []
    for row, part in enumerate(parts):
        y = 4 + 24 * row
        width = part.value / most * room if most > 0 else 0.0
        drawn += [
            text(_LABEL - 8, y + 14, part.name, "end"),
            _rect((_LABEL, y, max(1.0, width), 18), part.colour, f"{part.name}: {part.text}"),
            text(_LABEL + max(1.0, width) + 6, y + 14, part.text),
        ]
    return svg(8 + 24 * len(parts), name, "".join(drawn))


def columns(
    name: str,
    parts: Sequence[Part],
    told: Callable[[float], str],
    *,
    below: str,
    line: tuple[float, str] | None = None,
    top: float | None = None,
) -> str:
    """A column for each part from 0 up, with axes; perhaps a line across, with its name above.

    Args:
        name: what it shows.
        parts: from left to right.
        told: the text of a value on the axis.
        below: what the columns are: the axis's name.
        line: a value and what it is: a target.
        top: the axis's end; else a round number above all.
    """
    most = max([part.value for part in parts] + ([line[0]] if line else []), default=0.0)
    end = top or round_up(most)
    first, base = 48.0 if line else 24.0, 204.0
    scale = (base - first) / end
    drawn = []
    for fraction in (0, 0.25, 0.5, 0.75, 1):
        y = base - (base - first) * fraction
        drawn.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" class="grid"/>')
        drawn.append(text(_LEFT - 6, y + 4, _short(told(end * fraction)), "end"))
    room = (_WIDTH - _LEFT - _RIGHT) / max(1, len(parts))
    every = math.ceil(len(parts) * 44 / (_WIDTH - _LEFT - _RIGHT)) or 1
    values = []
    for at, part in enumerate(parts):
        x, width = _LEFT + room * at, min(48.0, room * 0.8)
        box = (x + (room - width) / 2, base - part.value * scale, width, part.value * scale)
        drawn.append(_rect(box, part.colour, f"{part.name}: {part.text}"))
        if at % every == 0:
            drawn.append(text(x + room / 2, base + 18, part.name, "middle"))
        if len(parts) <= _VALUES_MOST:
            values.append(text(x + room / 2, box[1] - 5, part.text, "middle", "value"))
    drawn.append(text((_LEFT + _WIDTH - _RIGHT) / 2, base + 38, below, "middle", "soft"))
    if line is not None:
        y, right = base - line[0] * scale, _WIDTH - _RIGHT
        drawn.append(f'<path d="M{_LEFT} {y:.1f}H{right}" class="target"/>')
        drawn.append(f'<path d="M{_LEFT} 14H{_LEFT + 30}" class="target"/>')
        drawn.append(text(_LEFT + 38, 19, line[1]))
    return svg(base + 46, name, "".join([*drawn, *values]))


def _short(text: str) -> str:
    """`12.50 ms` as `12.5 ms`."""
    number, space, unit = text.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit


def round_up(value: float) -> float:
    """A round number that is not less: where an axis ends."""
    if value <= 0:
        return 1.0
    value = max(value, 1e-12)
    power = 10.0 ** math.floor(math.log10(value))
    return min(step * power for step in (1, 2, 2.5, 4, 5, 8, 10, 20) if step * power >= value)
