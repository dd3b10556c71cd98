"""Charts: SVG within the page, each with its table behind it. Colours are classes: see `html.STYLE`.

No chart needs its colours to be read: parts are named where they stand or in the table. Values that stand side
by side are `stacked`, `bars` and `columns`; what changes over time or over steps is `areas` (parts of a whole),
`heat` (shades in a grid) and `lines`. These have at most some hundred columns, whatever they are made of.
Shapes of one colour are one path, so that a page stays small; columns have invisible bars above them that show
their values on hovering.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.pages.html import STYLE, safe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_WIDTH: Final = 720
_LEFT: Final = 108
_RIGHT: Final = 16
_LABEL: Final = 170

_VALUES_MOST: Final = 10  # columns that have their value above them, at most


class Part(NamedTuple):
    """A named value with its text and the class of its colour."""

    name: str
    value: float
    text: str
    colour: str = "c1"


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, words: bool = False) -> str:
    """A table; columns after the first are figures, or `words`."""
    heads = "".join(f'<th scope="col">{safe(h)}</th>' for h in head)
    body = "".join(
        f'<tr><th scope="row">{safe(row[0])}</th>'
        + "".join(f"<td>{safe(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    kind = ' class="words"' if words else ""
    return f'<div class="wide"><table{kind}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def behind(tables: str) -> str:
    """What stands behind a chart, folded."""
    return f"<details><summary>As a table</summary>{tables}</details>"


def figure(title: str, svg: str, tables: str, note: str = "") -> str:
    """A chart with its title, what to see in it, and its table."""
    below = f"<p>{safe(note)}</p>" if note else ""
    return f"<figure><figcaption>{safe(title)}</figcaption>{below}{svg}{behind(tables)}</figure>"


def svg(height: float, name: str, inside: str) -> str:
    """A picture of so many units' height, as wide as the page."""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{safe(name)}">'
        f"{inside}</svg>"
    )


def text(x: float, y: float, text: str, where: str = "start", kind: str = "") -> str:
    """A word or two within a picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{where}" class="{kind}">{safe(text)}</text>'


def _rect(box: tuple[float, float, float, float], kind: str, title: str) -> str:
    x, y, width, height = box
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" '
        f'height="{max(0.0, height):.1f}" class="{kind}"><title>{safe(title)}</title></rect>'
    )


def legend(named: Sequence[tuple[str, str]]) -> str:
    """What colours stand for: (class, name)."""
    items = "".join(f'<li><i class="{colour}"></i>{safe(name)}</li>' for colour, name in named)
    return f'<ul class="legend">{items}</ul>'


_PICTURE: Final = re.compile(r'<svg viewBox="0 0 \d+ ([\d.]+)"[^>]*>(.*?)</svg>', re.DOTALL)


def image(title: str, pictures: Sequence[tuple[str, str]], named: Sequence[tuple[str, str]]) -> str:
    """An SVG file: pictures of this module with a title each, one below the other, two side by side.

    `named`: what lines stand for, (class, name), in the place of the pictures' own legends.
    """
    drawn, y, tall = [text(_LEFT, 30, title, kind="title")], 50.0, 0.0
    for at, (colour, name) in enumerate(named):
        x = _LEFT + 140 * at
        drawn.append(f'<path d="M{x} {y}h30" class="{colour}"/>' + text(x + 38, y + 4, name))
    y += 30
    for at, (name, picture) in enumerate(pictures):
        match = _PICTURE.match(picture)
        assert match is not None
        x = at % 2 * _WIDTH
        inside = f'<g transform="translate(0 8)">{match[2]}</g>'
        drawn.append(f'<g transform="translate({x} {y:g})">{text(_LEFT, 10, name)}{inside}</g>')
        tall = max(tall, float(match[1]) + 30)
        if at % 2 or at == len(pictures) - 1:
            y, tall = y + tall, 0.0
    style = STYLE + "svg text.title { font-size: 17px; font-weight: 600; }"
    size = f'viewBox="0 0 {2 * _WIDTH} {y:g}" width="{2 * _WIDTH}" height="{y:g}"'
    paper = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{safe(title)}">'
    return f"{head}<style>{style}</style>{paper}{''.join(drawn)}</svg>\n"


def stacked(name: str, parts: Sequence[Part]) -> str:
    """One bar that is parts of a whole, with a legend."""
    total = sum(part.value for part in parts)
    if total <= 0:
        return ""
    drawn, x, named = [], 0.0, []
    for part in parts:
        width = part.value / total * _WIDTH
        title = f"{part.name}: {part.text}"
        drawn.append(_rect((x, 4, width - (1 if width > 3 else 0), 36), part.colour, title))
        x += width
        named.append((part.colour, title))
    return svg(44, name, "".join(drawn)) + legend(named)


def bars(name: str, parts: Sequence[Part], *, words: float = 130) -> str:
    """A bar for each part, below each other, on one scale from 0."""
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
    tick_text: Callable[[float], str],
    *,
    below: str,
    line: tuple[float, str] | None = None,
    top: float | None = None,
) -> str:
    """A column for each part from 0 up, with axes that are named `below`; perhaps a line across, a target.

    The axis ends at `top`, else at a round number above all.
    """
    most = max([part.value for part in parts] + ([line[0]] if line else []), default=0.0)
    end = top or round_up(most)
    first, base = 48.0 if line else 24.0, 204.0
    scale = (base - first) / end
    drawn = []
    for fraction in (0, 0.25, 0.5, 0.75, 1):
        y = base - (base - first) * fraction
        drawn.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" class="grid"/>')
        drawn.append(text(_LEFT - 6, y + 4, _short(tick_text(end * fraction)), "end"))
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
    """A round number that is not less, and whose quarters are round, too: where an axis ends."""
    if value <= 0:
        return 1.0
    value = max(value, 1e-12)
    power = 10.0 ** math.floor(math.log10(value))
    return min(step * power for step in (1, 2, 4, 6, 8, 10, 20) if step * power >= value)


_ROOM: Final = _WIDTH - _LEFT - _RIGHT
_TOP: Final = 18.0

SHADES: Final = 6  # shades of a heat map: classes h0 (nothing) to h5

FEW_ROWS: Final = 8
"""So many rows of a heat map are tall enough for a name each, on narrow screens, too."""

_TICKS_MOST: Final = 5


class Axis(NamedTuple):
    """An axis: what stands beside it, and its marks: (share of its length, text).

    Every second mark of a `crowded` one is left out on narrow screens.
    """

    name: str
    ticks: Sequence[tuple[float, str]]
    crowded: bool = False


class StepLine(NamedTuple):
    """A line that stays where it is until the next point: (share of the x axis, share of the y axis).

    Colours are classes: `l1` to `l3`, which differ in their dashes, too.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "l1"


def time_axis(seconds: float, name: str = "time since the run began") -> Axis:
    """Round numbers of seconds, minutes, hours or days."""
    units = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
    unit, size = next(each for each in units if seconds >= 2 * each[1] or each[0] == "s")
    return Axis(name, _ticks(seconds / size, lambda value: f"{value:g} {unit}"))


def count_axis(most: float, name: str) -> Axis:
    """Round numbers from 0 on."""
    return Axis(name, _ticks(most, lambda value: f"{value:,.10g}"))


def share_axis(name: str, top: float = 1.0) -> Axis:
    """Percent from 0 on."""
    return Axis(name, [(part, f"{100 * part * top:.3g} %") for part in (0.0, 0.5, 1.0)])


def _ticks(end: float, text_of: Callable[[float], str]) -> list[tuple[float, str]]:
    """At most five round numbers, 0 among them."""
    if not end > 0:
        return [(0.0, text_of(0.0))]
    power = 10.0 ** np.floor(np.log10(end))
    steps = [power * factor for factor in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0)]
    step = next(step for step in steps if end / step < _TICKS_MOST)
    return [
        (at * step / end, text_of(round(at * step, 9))) for at in range(int(end / step + 1e-9) + 1)
    ]


def _axes(x: Axis, y: Axis, height: float, *, grid: bool = True) -> str:
    base = _TOP + height
    drawn = []
    for number, (share, label) in enumerate(y.ticks):
        at = base - share * height
        kind = "minor" if y.crowded and number % 2 else ""
        if grid:
            drawn.append(f'<path d="M{_LEFT:g} {at:.1f}H{_WIDTH - _RIGHT:g}" class="grid"/>')
        drawn.append(text(_LEFT - 6, min(base, max(_TOP + 8, at + 4)), label, "end", kind))
    for share, label in x.ticks:
        at = _LEFT + share * _ROOM
        where = "start" if share < 0.02 else "end" if share > 0.97 else "middle"
        drawn.append(f'<path d="M{at:.1f} {base:.1f}v4" class="grid"/>')
        drawn.append(text(at, base + 19, label, where))
    drawn.append(text(_LEFT + _ROOM / 2, base + 42, x.name, "middle", "soft"))
    return "".join(drawn)


def areas(  # noqa: PLR0917 - a picture has two axes
    name: str,
    parts: Sequence[Part],
    values: NDArray[np.float64],
    x: Axis,
    y: Axis,
    titles: Sequence[str],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Columns without gaps, each stacked of parts from the bottom up, whose text stands in the legend.

    `values` are shares of the height, shape (parts, columns); `titles` of each column are shown on hovering;
    `marks` are upright lines: (share of the x axis, what begins there).
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
        for at, one in enumerate(titles)
    ]
    picture = svg(base + 50, name, _axes(x, y, height) + "".join(drawn))
    return picture + legend([(part.colour, f"{part.name} {part.text}".rstrip()) for part in parts])


def heat(  # noqa: PLR0917 - likewise
    name: str,
    shades: NDArray[np.int64],
    x: Axis,
    rows: Axis,
    names: Sequence[str],
    height: float = 0.0,
) -> str:
    """A grid of shades, 0 to `SHADES` - 1, or -1 for nothing; the first row at the top, shape (rows, columns).

    `names` say what each shade stands for; the height is by the rows, unless it is given.
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
        f'<path d="{"".join(path)}" class="h{shade}"><title>{safe(names[shade])}</title></path>'
        for shade, path in enumerate(paths)
        if path
    )
    turned = Axis(rows.name, [(1.0 - share, label) for share, label in rows.ticks], rows.crowded)
    frame = (
        f'<rect x="{_LEFT:g}" y="{_TOP:g}" width="{_ROOM:g}" height="{height:g}" class="frame"/>'
    )
    picture = svg(_TOP + height + 50, name, drawn + frame + _axes(x, turned, height, grid=False))
    return picture + legend([(f"h{shade}", one) for shade, one in enumerate(names)])


def lines(
    name: str, series: Sequence[StepLine], marks: Sequence[tuple[float, str]], x: Axis, y: Axis
) -> str:
    """Lines of steps, and marks below them."""
    height = 120.0
    base = _TOP + height
    drawn = [
        f'<path d="M{_LEFT + share * _ROOM:.1f} {_TOP:g}V{base:g}" class="mark">'
        f"<title>{safe(title)}</title></path>"
        for share, title in marks
    ]
    for line in series:
        path = []
        for at, (share, up) in enumerate(line.points):
            across, over = _LEFT + share * _ROOM, base - up * height
            path.append(f"M{across:.1f} {over:.1f}" if at == 0 else f"H{across:.1f}V{over:.1f}")
        if path:
            drawn.append(f'<path d="{"".join(path)}H{_WIDTH - _RIGHT:g}" class="{line.colour}"/>')
    picture = svg(base + 50, name, _axes(x, y, height) + "".join(drawn))
    return picture + legend([(f"stroke {line.colour}", line.name) for line in series])
