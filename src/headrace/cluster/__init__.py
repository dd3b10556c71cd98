"""Training on a cluster, or on a laptop in the same words: jobs are asked for in GPUs, staged, watched, ended.

`executor` is what runs jobs (Slurm's, or this machine's processes); `snapshot` what a cluster looks like at a
moment; what is asked for becomes nodes, tasks, CPUs and memory from what the cluster says it has. `launch`
starts a job's ranks on its nodes and ends them; a script asks `should_stop` after each step, or lets
`resume` do that and save. `submit` makes a job of a Python function, `map_array` one of many calls.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.base.job import restarts
    from headrace.cluster.functions import FunctionJob, map_array, submit
    from headrace.cluster.stopping import Resumed, resume, should_stop

__all__ = ["FunctionJob", "Resumed", "map_array", "restarts", "resume", "should_stop", "submit"]

_HOMES = {
    "restarts": "headrace.base.job", "FunctionJob": "headrace.cluster.functions",
    "map_array": "headrace.cluster.functions", "submit": "headrace.cluster.functions",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace.cluster' has no attribute {name!r}")
    home = _HOMES.get(name, "headrace.cluster.stopping")
    value = globals()[name] = getattr(import_module(home), name)
    return value
