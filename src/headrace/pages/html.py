"""HTML: the page around charts and tables, its style, text that is safe in it, and cards for notebooks.

A page is one file that works offline and in which nothing acts. A card is a small box of figures that needs no
style sheet, no script and no address, and takes the notebook's own colours, light or dark.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Final

from headrace.base.text import bytes_text, number_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may do with a page of ours: show it, and nothing else."""


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """The page.

    Args:
        title: of the window; escaped here.
        parts: HTML, from top to bottom; empty ones are left out.
        style: CSS beside that of all pages.
    """
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


def card(
    title: str, rows: Sequence[tuple[str, object]], *, waited: float | None = None, note: str = ""
) -> str:
    """The card.

    Args:
        title: in bold; all texts are escaped here.
        rows: names and values, from top to bottom.
        waited: share of the time that was waited for data, drawn as a bar; None: nothing is known.
        note: a line below.
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


STYLE: Final = (
    """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #595959; --paper: #fff; --card: #f4f5f7;
  --rule: #c9ccd1; --c1: #0072b2; --c2: #d55e00; --c3: #e69f00; --c4: #8a8f98; --c5: #009e73; --c6: #4a1e4f;
  --c7: #2c0a9d; --c8: #6d1a00; --h0: #eef2f6; --h1: #c6ddec; --h2: #8fbfdd; --h3: #4f97c4; --h4: #1c6a9c;
  --h5: #08385a; --line: #1a1a1a; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --soft: #b4b4b4; --paper: #16181c;
  --card: #22252b; --rule: #454a53; --c1: #56b4e9; --c2: #e8793a; --c3: #f0e442; --c4: #9aa0aa; --c5: #2bbf93;
  --c6: #cdf795; --c7: #3055e9; --c8: #855c3d; --h0: #23282f; --h1: #1d4059; --h2: #27618a; --h3: #3f8cc0;
  --h4: #7cbbe6; --h5: #d3ecff; --line: #ececec; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { margin: 0 0 .25rem; font-size: 1.6rem; } h2 { margin: 2rem 0 .5rem; font-size: 1.2rem; }
.not-mlperf { border: 2px solid var(--c2); border-radius: 6px; padding: .5rem .8rem; font-weight: 600; }
.soft, figure p { color: var(--soft); margin: 0 0 .5rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem;
  margin: 1rem 0; padding: 0; list-style: none; }
.cards li { background: var(--card); border-radius: 6px; padding: .7rem .9rem; }
.cards b { display: block; font-size: 1.35rem; }
.cards small { font-size: .95rem; } .cards span { color: var(--soft); font-size: .88rem; }
figure { margin: 1.5rem 0; break-inside: avoid; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 12.5px; }
svg text.soft { fill: var(--soft); }
svg text.value { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .2rem 0; padding: 0; list-style: none;
  font-size: .88rem; }
.legend i { display: inline-block; width: .75rem; height: .75rem; margin-right: .4rem; }
@media (max-width: 38rem) { body { padding: 1rem; } svg text { font-size: 19px; }
  svg text.value, svg text.minor { display: none; } }
"""
    + "".join(
        f".{colour} {{ fill: var(--{colour}); background: var(--{colour}); }}\n"
        for colour in (*(f"c{n}" for n in range(1, 9)), *(f"h{n}" for n in range(6)))
    )
    + """\
.over { fill: transparent; } .over:hover { fill: var(--ink); fill-opacity: .12; }
.frame { fill: none; stroke: var(--rule); }
.l1, .l2, .l3 { fill: none; stroke: var(--c1); stroke-width: 2; }
.l2 { stroke: var(--c2); stroke-dasharray: 7 3; }
.l3 { stroke: var(--c5); stroke-dasharray: 2 3; }
.mark { stroke: var(--soft); stroke-width: 3; stroke-opacity: .45; } .mark:hover { stroke-opacity: 1; }
.legend i.stroke { height: 0; border-top: 3px solid var(--c1); background: none; vertical-align: middle;
  width: 1.4rem; }
.legend i.l2 { border-top: 3px dashed var(--c2); }
.legend i.l3 { border-top: 3px dotted var(--c5); }
.grid { stroke: var(--rule); stroke-width: 1; fill: none; }
.target { stroke: var(--line); stroke-width: 1.5; stroke-dasharray: 6 4; fill: none; }
code, pre { font: .94em ui-monospace, monospace; }
pre { background: var(--card); border-radius: 6px; padding: .6rem .8rem; overflow-x: auto; }
summary { cursor: pointer; color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th:first-child, table.words td, table.words th { text-align: left; } tbody th { font-weight: 400; }
th, td { overflow-wrap: normal; } td { white-space: nowrap; }
table.words td { overflow-wrap: anywhere; white-space: normal; min-width: 14rem; }
table.words th { white-space: nowrap; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #333; --paper: #fff; --card: #f4f5f7;
  --rule: #bbb; --c1: #0072b2; --c2: #d55e00; --c3: #e69f00; --c4: #8a8f98; --c5: #009e73; --c6: #4a1e4f;
  --c7: #2c0a9d; --c8: #6d1a00;
  --h0: #eef2f6; --h1: #c6ddec; --h2: #8fbfdd; --h3: #4f97c4; --h4: #1c6a9c; --h5: #08385a; --line: #000; }
  body { max-width: none; padding: 0; font-size: 11pt; } rect, path, i { print-color-adjust: exact; }
  details::details-content { content-visibility: visible; display: block; }
  summary { list-style: none; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""
)
"""Without one address: the page works offline."""
