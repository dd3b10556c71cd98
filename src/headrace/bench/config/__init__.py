"""Configuration: DLIO's workload files and its command line, without hydra.

* values: what a key's value may be
* times: fixed and random times
* sections: the workload, as frozen dataclasses
* keys: DLIO's keys, and what becomes of each
* document: YAML that knows the line of every value
* command_line: hydra's grammar
* load: from a command line to a workload, or everything that is wrong with it
* query: one value of a workload

Nothing of DLIO's schema is ignored: a key is honoured, or it is refused with a reason.
"""

from headrace.bench.config.command_line import CommandLine, parse_command_line
from headrace.bench.config.load import LoadedWorkload, load_workload, shipped_workloads
from headrace.bench.config.sections import Workload
from headrace.bench.config.times import TimeDistribution

__all__ = [
    "CommandLine",
    "LoadedWorkload",
    "TimeDistribution",
    "Workload",
    "load_workload",
    "parse_command_line",
    "shipped_workloads",
]
