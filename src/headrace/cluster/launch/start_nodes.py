"""NodeStarts: the processes by which the launcher's per-node parts are started: one srun, or one for each node.

Under Slurm one job step spans all nodes, beside whatever else runs in the job (`--overlap`). Elsewhere each
node is processes of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from headrace.closing import Closing
from headrace.cluster.launch.node import SPEC_VARIABLE
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from headrace.cluster.launch.node import NodeSpec
    from headrace.cluster.place import JobPlace

__all__ = ["NodeStarts", "node_command", "srun_command"]

_TERMINATE_S = 5.0


def node_command() -> list[str]:
    """What runs on each node."""
    return [sys.executable, "-m", "headrace.cluster.launch.node"]


def srun_command(place: JobPlace, nodes: tuple[str, ...]) -> list[str]:
    """The job step: one task on each node, with all that the job has there."""
    count = str(len(nodes))
    return [
        "srun", "--overlap",  # beside other steps of the job, a second launch among them
        f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        f"--cpus-per-task={place.cpus_per_node}", "--cpu-bind=none", "--mem=0",
        "--kill-on-bad-exit=0", "--wait=0",  # how nodes end is the first node's to judge
        "--input=none", "--unbuffered", "--job-name=headrace-launch",
        *node_command(),
    ]  # fmt: skip


class NodeStarts(Closing):
    """Starts all nodes' launchers.

    Args:
        place: of the job.
        spec: for all of them.

    Raises:
        LaunchError: srun is missing.
    """

    def __init__(self, place: JobPlace, spec: NodeSpec) -> None:
        environment = {**os.environ, SPEC_VARIABLE: spec.to_json()}
        self._processes: list[subprocess.Popen[bytes]] = []
        if place.scheduler == "slurm":
            if shutil.which("srun") is None:
                raise LaunchError(
                    "srun is not found, although SLURM_JOB_ID says that this is a Slurm job.",
                    next_step="Load Slurm's module in the script, or add its programs to PATH.",
                )
            # srun reads these as options of its own; what we say must hold.
            for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
                         "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND",
                         "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU",
                         "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_EXACT"):  # fmt: skip
                environment.pop(name, None)
            if str(len(spec.nodes)) != environment.get("SLURM_JOB_NUM_NODES"):
                environment.pop("SLURM_GPUS", None)  # of all nodes: a part of them has not so many
            self._start(srun_command(place, spec.nodes), environment)
            return
        for index in range(len(spec.nodes)):
            own = {"HEADRACE_NODE_RANK": str(index), "HEADRACE_NODES": str(len(spec.nodes))}
            self._start(node_command(), environment | own)

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        # In a session of its own: Ctrl-C is for us, we tell the nodes what it means.
        self._processes.append(
            subprocess.Popen(  # noqa: S603
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        )  # fmt: skip

    def ended(self) -> list[int]:
        """The exit statuses of those that have ended."""
        return [code for p in self._processes if (code := p.poll()) is not None]

    @property
    def all_ended(self) -> bool:
        """Whether none runs any more."""
        return len(self.ended()) == len(self._processes)

    def close(self, seconds: float = 10.0) -> None:
        """Waits for their ends; whoever does not end is ended, and with it what it started."""
        until_s = time.monotonic() + seconds
        for number in ("", "terminate", "kill"):
            for process in self._processes:
                if number and process.poll() is None:
                    getattr(process, number)()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until_s - time.monotonic()))
            if self.all_ended:
                return
            until_s = time.monotonic() + _TERMINATE_S
