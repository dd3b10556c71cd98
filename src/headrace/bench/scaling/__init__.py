"""Scaling: one training job on more and more ranks, and what it says of each: speed beside accuracy.

* lines: what a training script prints at the end of an epoch
* table: a run for each number of ranks, and what they are worth beside each other
* measure: submits the project's batch script at each size, one after the other
* text, figure: how the table is shown
"""

from headrace.bench.scaling.figure import figure_svg
from headrace.bench.scaling.lines import EpochLine, read_epochs
from headrace.bench.scaling.measure import ScalingOptions, measure
from headrace.bench.scaling.table import Row, ScalingRun, Split, Table, scaling_table
from headrace.bench.scaling.text import table_text

__all__ = [
    "EpochLine",
    "Row",
    "ScalingOptions",
    "ScalingRun",
    "Split",
    "Table",
    "figure_svg",
    "measure",
    "read_epochs",
    "scaling_table",
    "table_text",
]
