"""Report: what became of a run's time, from its traces, as text, as JSON and as one page.

* curves: a rank's steps as sums over time and over steps, of bounded size whatever the run's
* figures: all ranks together: what the page and the text say
* looks: what stages and tuner said over time: latencies, knobs, decisions
* words: phases, tiers and causes, as people call them
* page, strip, pictures: one HTML file, drawn with `headrace.pages`
* text: the same for a terminal
"""

from __future__ import annotations

from headrace.insight.report.figures import TraceFigures, run_figures
from headrace.insight.report.page import report_page
from headrace.insight.report.text import report_lines

__all__ = ["TraceFigures", "report_lines", "report_page", "run_figures"]
