"""Report: what became of a run's time, from its traces, as text, as JSON and as one page.

* figures: a rank's steps as sums over time and steps, of bounded size whatever the run's; all ranks together
* page: one HTML file with its pictures, lines for a terminal, JSON
"""
