"""Figure: the scaling table as one SVG file: throughput beside its ideal, accuracy beside its guard, time.

It stands alone: its style is inside, light or dark as the reader's, in the colours of the reports. What is
flagged is hollow and named in words, so that no colour is needed to see it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from headrace.pages.charts import text
from headrace.pages.html import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.scaling import ScalingRow, ScalingTable


_WIDTH: Final = 760
_LEFT: Final = 76
_RIGHT: Final = 24
_PANEL: Final = 190
_GAP: Final = 74
_TOP: Final = 62

_STYLE: Final = """
svg { font: 13px system-ui, sans-serif; --ink: #1a1a1a; --soft: #595959; --paper: #fff; --rule: #d7dade;
  --c1: #0072b2; --c2: #d55e00; --c3: #e69f00; --c4: #8a8f98; --c5: #009e73; }
@media (prefers-color-scheme: dark) { svg { --ink: #ececec; --soft: #b4b4b4; --paper: #16181c;
  --rule: #454a53; --c1: #56b4e9; --c2: #e8793a; --c3: #f0e442; --c4: #9aa0aa; --c5: #2fc79a; } }
.paper { fill: var(--paper); } text { fill: var(--ink); } .soft { fill: var(--soft); }
.title { font-size: 15px; font-weight: 600; } .grid { stroke: var(--rule); fill: none; }
.ideal, .guard { stroke: var(--soft); stroke-dasharray: 6 5; stroke-width: 1.5; fill: none; }
.line { stroke: var(--c1); stroke-width: 2; fill: none; } .point { fill: var(--c1); stroke: var(--c1); }
.learnt { stroke: var(--c5); } .point.learnt { fill: var(--c5); }
.point.fell { fill: var(--paper); stroke: var(--c2); stroke-width: 3; }
.fell-text { fill: var(--c2); font-weight: 600; }
.c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); } .c4 { fill: var(--c4); }
.c5 { fill: var(--c5); }
"""

_PARTS: Final = (
    ("waiting_s", "data", "c2"),
    ("computing_s", "compute", "c1"),
    ("saving_s", "save", "c3"),
    ("evaluating_s", "test", "c5"),
    ("other_s", "other", "c4"),
)


def figure_svg(table: ScalingTable, title: str) -> str:
    """The whole file; ends with a line break."""
    rows = [row for row in table.rows if row.split is not None]
    height = _TOP + 2 * (_PANEL + _GAP) + 26 * len(rows) + 56
    inside = [
        f'<rect width="{_WIDTH}" height="{height}" class="paper"/>',
        text(16, 28, title, kind="title"),
    ]
    panels = (_throughput(rows), _accuracy(rows, table.tolerance), _times(rows)) if rows else ()
    for number, panel in enumerate(panels):
        y = _TOP + number * (_PANEL + _GAP)
        inside.append(f'<g transform="translate(0 {y:g})">{"".join(panel)}</g>')
    if not rows:
        inside.append(text(16, _TOP, "No size ran to its end."))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{safe(title)}"><style>{_STYLE}</style>'
        f"{''.join(inside)}</svg>\n"
    )


def _places(rows: Sequence[ScalingRow]) -> list[float]:
    """Where sizes stand: doubled ranks are equally far apart."""
    low, high = math.log2(rows[0].ranks), math.log2(rows[-1].ranks)
    shares = [0.5 if high == low else (math.log2(r.ranks) - low) / (high - low) for r in rows]
    return [_LEFT + 36 + share * (_WIDTH - _LEFT - _RIGHT - 110) for share in shares]


def _axis(rows: Sequence[ScalingRow], name: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
    """The panel's title, lines across with their values, and the ranks below."""
    drawn = [text(16, -14, name, kind="soft")]
    for y, label in ticks:
        drawn.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" class="grid"/>')
        drawn.append(text(_LEFT - 8, y + 4, label, "end", "soft"))
    for row, x in zip(rows, _places(rows), strict=True):
        label = f"{row.ranks} rank{'s' if row.ranks > 1 else ''}"
        drawn.append(text(x, _PANEL + 20, label, "middle"))
    return drawn


def _dot(x: float, y: float, kind: str, label: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="point {kind}">'
        f"<title>{safe(label)}</title></circle>"
    )


def _through(xs: Sequence[float], ys: Sequence[float], kind: str) -> str:
    points = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<path d="M{points}" class="{kind}"/>'


def _throughput(rows: Sequence[ScalingRow]) -> list[str]:
    """Both axes by powers of two, so that perfect scaling is a straight line."""
    rates = [row.training_per_s or 0.0 for row in rows]
    ideal = [rates[0] * row.ranks / rows[0].ranks for row in rows]
    low = math.floor(math.log2(max(min(rates + ideal), 1e-9)))
    high = max(math.ceil(math.log2(max(*rates, *ideal, 1e-9))), low + 1)

    def y(rate: float) -> float:
        return _PANEL - (math.log2(max(rate, 1e-9)) - low) / (high - low) * _PANEL

    ticks = [(y(2.0**power), f"{2.0**power:,.4g}") for power in range(low, high + 1)]
    name, xs = (
        "samples a second in training (dashed: the first size's, times the ranks)",
        _places(rows),
    )
    drawn = _axis(rows, name, ticks)
    drawn.append(_through(xs, [*map(y, ideal)], "ideal"))
    drawn.append(_through(xs, [*map(y, rates)], "line"))
    for row, x, rate in zip(rows, xs, rates, strict=True):
        label = f"{rate:,.0f}/s, {row.efficiency or 0:.0%}"
        drawn.append(_dot(x, y(rate), "fell" if row.accuracy_fell else "", label))
        drawn.append(text(x + 9, min(y(rate) + 18, _PANEL - 4), label))
    return drawn


def _accuracy(rows: Sequence[ScalingRow], tolerance: float) -> list[str]:
    """From a little below the worst to a little above the best: falls of a point must be seen."""
    shares = [row.accuracy or 0.0 for row in rows]
    guard = max(0.0, shares[0] - tolerance)
    worst, best = min([*shares, guard]), max([*shares, guard])
    room = max(0.02, best - worst) * 0.35
    low, high = max(0.0, worst - room), min(1.0, best + room)

    def y(share: float) -> float:
        return _PANEL - (share - low) / (high - low) * _PANEL

    ticks = [(y(share), f"{share:.1%}") for share in (low + (high - low) * i / 4 for i in range(5))]
    name = (
        f"accuracy on held-out samples (dashed: the first size's less {100 * tolerance:g} points)"
    )
    drawn = _axis(rows, name, ticks)
    drawn.append(f'<path d="M{_LEFT} {y(guard):.1f}H{_WIDTH - _RIGHT}" class="guard"/>')
    xs, ys = _places(rows), [*map(y, shares)]
    drawn.append(_through(xs, ys, "line learnt"))
    for row, x, at, following, share in zip(rows, xs, ys, [*ys[1:], 0.0], shares, strict=True):
        kinds = ("fell", "fell-text") if row.accuracy_fell else ("learnt", "")
        label = f"{share:.2%}" + (" fell" if row.accuracy_fell else "")
        drawn.append(_dot(x, at, kinds[0], label))
        # Beside the line, not on it.
        beside = max(at - 10, 12) if following > at else min(at + 20, _PANEL - 4)
        drawn.append(text(x + 9, beside, label, kind=kinds[1]))
    return drawn


def _times(rows: Sequence[ScalingRow]) -> list[str]:
    """A bar for each size, cut into parts of its wall time."""
    drawn = [text(16, -14, "where the wall time went", kind="soft")]
    room = _WIDTH - _LEFT - 36 - 90
    for number, row in enumerate(rows):
        y, x = 26.0 * number, _LEFT + 36.0
        parts = [(name, colour, getattr(row.split, field)) for field, name, colour in _PARTS]
        total = max(sum(seconds for _, _, seconds in parts), 1e-9)
        drawn.append(text(x - 8, y + 14, f"{row.ranks}", "end"))
        for name, colour, seconds in parts:
            width = seconds / total * room
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width - 1):.1f}" height="18" '
                f'class="{colour}"><title>{name}: {seconds:.1f} s, {seconds / total:.0%}</title></rect>'
            )
            x += width
        drawn.append(text(x + 6, y + 14, f"{row.wall_s:.1f} s"))
    x, y = _LEFT + 36.0, 26.0 * len(rows) + 24
    for _, name, colour in _PARTS:
        drawn.append(
            f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" class="{colour}"/>'
        )
        drawn.append(text(x + 18, y, name))
        x += 40 + 8 * len(name)
    return drawn
