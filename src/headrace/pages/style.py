"""Style of pages: light, dark and paper.

c1 to c5 are Okabe and Ito's colours; c6 to c8 were searched for, so that all eight differ for all eyes.
h0 to h5 are shades of one hue, which their lightness tells apart.
"""

from __future__ import annotations

from typing import Final

__all__ = ["STYLE"]

STYLE: Final = """
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
.c1 { fill: var(--c1); background: var(--c1); }
.c2 { fill: var(--c2); background: var(--c2); }
.c3 { fill: var(--c3); background: var(--c3); }
.c4 { fill: var(--c4); background: var(--c4); }
.c5 { fill: var(--c5); background: var(--c5); }
.c6 { fill: var(--c6); background: var(--c6); }
.c7 { fill: var(--c7); background: var(--c7); }
.c8 { fill: var(--c8); background: var(--c8); }
.h0 { fill: var(--h0); background: var(--h0); }
.h1 { fill: var(--h1); background: var(--h1); }
.h2 { fill: var(--h2); background: var(--h2); }
.h3 { fill: var(--h3); background: var(--h3); }
.h4 { fill: var(--h4); background: var(--h4); }
.h5 { fill: var(--h5); background: var(--h5); }
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
"""Without one address: the page works offline."""
