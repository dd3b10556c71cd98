"""Plots: what changes over time or over steps: parts of a whole, shades in a grid, lines with marks.

A plot has at most some hundred columns, whatever it is made of. Shapes of one colour are one path, so that a
page stays small; columns have invisible bars above them that say on hovering what stands there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.pages.charts import Part, legend, svg, text
from headrace.pages.text import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "FEW_ROWS",
    "SHADES",
    "Axis",
    "Line",
    "areas",
    "count_axis",
    "heat",
    "lines",
    "share_axis",
    "time_axis",
]

_WIDTH: Final = 720.0
_LEFT: Final = 108.0
_RIGHT: Final = 16.0
_ROOM: Final = _WIDTH - _LEFT - _RIGHT
_TOP: Final = 18.0

SHADES: Final = 6
"""Shades of a heat map: classes h0 (nothing) to h5."""

FEW_ROWS: Final = 8
"""So many rows of a heat map are tall enough for a name each, on narrow screens, too."""

_TICKS_MOST: Final = 5


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: what it is of, and where it has marks.

    Attributes:
        name: stands beside it.
        ticks: (share of its length, text).
        crowded: every second text is left out on narrow screens.
    """

    name: str
    ticks: Sequence[tuple[float, str]]
    crowded: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A line of steps: it stays where it is until the next point.

    Attributes:
        name: in the legend.
        points: (share of the x axis, share of the y axis), in their order.
        colour: class of its colour: `l1` to `l3`, which differ in their dashes, too.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "l1"


def time_axis(seconds: float, name: str = "time since the run began") -> Axis:
    """Round numbers of seconds, minutes, hours or days."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size or unit == "s":
            return Axis(name, _ticks(seconds / size, lambda value, u=unit: f"{value:g} {u}"))
    raise AssertionError


def count_axis(most: float, name: str) -> Axis:
    """Round numbers from 0 on."""
    return Axis(name, _ticks(most, lambda value: f"{value:,.10g}"))


def share_axis(name: str, top: float = 1.0) -> Axis:
    """Percent from 0 on.

    Args:
        name: of what.
        top: the axis's end.
    """
    return Axis(name, [(part, f"{100 * part * top:.3g} %") for part in (0.0, 0.5, 1.0)])


def _ticks(end: float, told: object) -> list[tuple[float, str]]:
    """At most five round numbers, 0 among them."""
    assert callable(told)
    if not end > 0:
        return [(0.0, told(0.0))]
    power = 10.0 ** np.floor(np.log10(end))
    steps = [power * factor for factor in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0)]
    step = next(step for step in steps if end / step < _TICKS_MOST)
    return [
        (at * step / end, told(round(at * step, 9))) for at in range(int(end / step + 1e-9) + 1)
    ]


def _axes(x: Axis, y: Axis, height: float, *, grid: bool = True) -> str:
    base = _TOP + height
    drawn = []
    for number, (share, told) in enumerate(y.ticks):
        at = base - share * height
        kind = "minor" if y.crowded and number % 2 else ""
        if grid:
            drawn.append(f'<path d="M{_LEFT:g} {at:.1f}H{_WIDTH - _RIGHT:g}" class="grid"/>')
        drawn.append(text(_LEFT - 6, min(base, max(_TOP + 8, at + 4)), told, "end", kind))
    for share, told in x.ticks:
        at = _LEFT + share * _ROOM
        where = "start" if share < 0.02 else "end" if share > 0.97 else "middle"
        drawn.append(f'<path d="M{at:.1f} {base:.1f}v4" class="grid"/>')
        drawn.append(text(at, base + 19, told, where))
    drawn.append(text(_LEFT + _ROOM / 2, base + 42, x.name, "middle", "soft"))
    return "".join(drawn)


def areas(  # noqa: PLR0917 - a picture has two axes
    name: str,
    parts: Sequence[Part],
    values: NDArray[np.float64],
    x: Axis,
    y: Axis,
    told: Sequence[str],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Columns without gaps, each stacked of parts.

    Args:
        name: what it shows.
        parts: from the bottom up; their text stands in the legend.
        values: shape (parts, columns): shares of the height, 1.0 is the top.
        x: across.
        y: up.
        told: of each column, on hovering.
        marks: upright lines: (share of the x axis, what begins there).
    """
    height = 150.0
    base = _TOP + height
    columns = values.shape[1]
    width = _ROOM / max(1, columns)
    tops = np.clip(np.cumsum(values, axis=0), 0.0, 1.0) * height
    bottoms = np.concatenate([np.zeros((1, columns)), tops[:-1]])
    drawn = []
    for part, top, bottom in zip(parts, tops, bottoms, strict=True):
        path = "".join(
            f"M{_LEFT + at * width:.1f} {base - top[at]:.1f}h{width + 0.15:.1f}v{top[at] - bottom[at]:.1f}"
            f"h-{width + 0.15:.1f}z"
            for at in np.flatnonzero(top - bottom > 0.04)
        )
        drawn.append(
            f'<path d="{path}" class="{part.colour}"><title>{safe(part.name)}</title></path>'
        )
    for share, mark in marks:
        at = _LEFT + share * _ROOM
        drawn.append(f'<path d="M{at:.1f} {_TOP:g}V{base:g}" class="target"/>')
        drawn.append(text(at, _TOP - 5, mark, "end" if share > 0.95 else "middle", "soft value"))
    drawn += [
        f'<rect x="{_LEFT + at * width:.1f}" y="{_TOP:g}" width="{width:.1f}" height="{height:g}" class="over">'
        f"<title>{safe(one)}</title></rect>"
        for at, one in enumerate(told)
    ]
    picture = svg(base + 50, name, _axes(x, y, height) + "".join(drawn))
    return picture + legend([(part.colour, f"{part.name} {part.text}".rstrip()) for part in parts])


def heat(  # noqa: PLR0917 - likewise
    name: str,
    shades: NDArray[np.int64],
    x: Axis,
    rows: Axis,
    said: Sequence[str],
    height: float = 0.0,
) -> str:
    """A grid of shades, the first row at the top.

    Args:
        name: what it shows.
        shades: 0 to `SHADES` - 1, -1: there is nothing; shape (rows, columns).
        x: across.
        rows: down.
        said: what each shade stands for, for the legend; `SHADES` of them.
        height: of the grid; else by its rows.
    """
    count, columns = shades.shape
    height = height or min(360.0, max(60.0, (26.0 if count <= FEW_ROWS else 18.0) * count))
    tall, wide = height / max(1, count), _ROOM / max(1, columns)
    paths: list[list[str]] = [[] for _ in range(SHADES)]
    for row in range(count):
        line = shades[row]
        cuts = np.flatnonzero(np.diff(line)) + 1
        for begin, end in zip([0, *cuts], [*cuts, columns], strict=True):
            if line[begin] >= 0:
                paths[line[begin]].append(
                    f"M{_LEFT + begin * wide:.1f} {_TOP + row * tall:.1f}h{(end - begin) * wide:.1f}"
                    f"v{tall:.1f}h-{(end - begin) * wide:.1f}z"
                )
    drawn = "".join(
        f'<path d="{"".join(path)}" class="h{shade}"><title>{safe(said[shade])}</title></path>'
        for shade, path in enumerate(paths)
        if path
    )
    turned = Axis(rows.name, [(1.0 - share, told) for share, told in rows.ticks], rows.crowded)
    frame = (
        f'<rect x="{_LEFT:g}" y="{_TOP:g}" width="{_ROOM:g}" height="{height:g}" class="frame"/>'
    )
    picture = svg(_TOP + height + 50, name, drawn + frame + _axes(x, turned, height, grid=False))
    return picture + legend([(f"h{shade}", one) for shade, one in enumerate(said)])


def lines(
    name: str, found: Sequence[Line], marks: Sequence[tuple[float, str]], x: Axis, y: Axis
) -> str:
    """Lines of steps, and marks below them.

    Args:
        name: what it shows.
        found: the lines.
        marks: (share of the x axis, what is told on hovering).
        x: across.
        y: up.
    """
    height = 120.0
    base = _TOP + height
    drawn = [
        f'<path d="M{_LEFT + share * _ROOM:.1f} {_TOP:g}V{base:g}" class="mark">'
        f"<title>{safe(told)}</title></path>"
        for share, told in marks
    ]
    for line in found:
        path = []
        for at, (share, up) in enumerate(line.points):
            across, over = _LEFT + share * _ROOM, base - up * height
            path.append(f"M{across:.1f} {over:.1f}" if at == 0 else f"H{across:.1f}V{over:.1f}")
        if path:
            drawn.append(f'<path d="{"".join(path)}H{_WIDTH - _RIGHT:g}" class="{line.colour}"/>')
    picture = svg(base + 50, name, _axes(x, y, height) + "".join(drawn))
    return picture + legend([(f"stroke {line.colour}", line.name) for line in found])
