"""Report: what became of a run's time, from its traces, as text, as JSON and as one page.

* curves: a rank's steps as sums over time and over steps, of bounded size whatever the run's; what stages and
  tuner said over time
* figures: all ranks together
* pictures: what the page shows, drawn with `headrace.pages`
* page: one HTML file, lines for a terminal, JSON
"""
