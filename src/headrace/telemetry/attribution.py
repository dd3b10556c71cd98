"""Attribution: which job a process belongs to, by its control group or, failing that, by its environment.

Slurm makes a group for each job, `.../job_17/step_0/...`: below `slurm/uid_1000/` with version 1, below
`system.slice/slurmstepd.scope/` (or `NODE_slurmstepd.scope`) with version 2. A group's word is the
kernel's and counts for more than an environment, which a process may write itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["environment_of", "job_of_group", "job_of_groups"]

_JOB: Final = re.compile(r"(?:^|/)job_([0-9]{1,18})(?:/|$)")
_SLURM: Final = re.compile(r"(?:^|/)(?:slurm(?:_[^/]*)?|[^/]*slurmstepd\.scope)(?:/|$)")


def job_of_group(path: str) -> str:
    """The Slurm job of a control group's path; '' if it is of none."""
    # A user may name a group `job_1`, but not one below Slurm's own.
    slurm = _SLURM.search(path)
    if slurm is None:
        return ""
    job = _JOB.search(path, slurm.end() - 1)
    return job[1] if job else ""


def job_of_groups(text: str) -> str:
    """The Slurm job of a process, from its `/proc/PID/cgroup`: `4:memory:/slurm/uid_0/job_17/step_0`."""
    for line in text.splitlines():
        job = job_of_group(line.partition(":")[2].partition(":")[2])
        if job:
            return job
    return ""


def environment_of(block: bytes) -> Mapping[str, str]:
    """What `/proc/PID/environ` holds; entries without `=` are left out, of several the first counts."""
    found: dict[str, str] = {}
    for entry in block.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and name:
            found.setdefault(name.decode(errors="replace"), value.decode(errors="replace"))
    return found
