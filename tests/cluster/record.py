"""Records what a real Slurm's commands print, as fixtures of its version: `python -m cluster.record` in tests/.

A cluster of four nodes with jobs of most kinds: over, running on one node and on two with GPUs, exclusive,
arrays, dependent, too large, cancelled; one node is drained. Paths and names of this machine are replaced.
"""

from __future__ import annotations

import re
import socket
import sys
import tempfile
import time
from pathlib import Path

from cluster.slurm import Slurm

FIXTURES = Path(__file__).parent / "fixtures"

COMMANDS = {
    "nodes.txt": ("scontrol", "--details", "show", "nodes"),
    "jobs.txt": ("scontrol", "--details", "show", "jobs"),
    "partitions.txt": ("scontrol", "show", "partitions"),
    "config.txt": ("scontrol", "show", "config"),
    "version.txt": ("scontrol", "--version"),
    "array.txt": ("scontrol", "--details", "show", "job", "{array}"),
    "done-array.txt": ("scontrol", "--details", "show", "job", "{done-array}"),
    "task.txt": ("scontrol", "--details", "show", "job", "{array}_3"),
}
REFUSED = {
    "partition": ("--partition=nope",),
    "gpus": ("--gpus=100",),
    "gpu-type": ("--gres=gpu:a100:1",),
    "gres": ("--gres=nothing:1",),
    "memory": ("--mem=9999G",),
    "feature": ("--constraint=nofeat",),
    "array": ("--array=9-1",),
    "option": ("--bogus",),
    "reservation": ("--reservation=none",),
    "time": ("--time=soon",),
}


def submit_jobs(slurm: Slurm) -> dict[str, str]:
    """Jobs of most kinds; their ids by name."""
    ids: dict[str, str] = {}

    def submit(name: str, script: str, *options: str) -> None:
        ids[name] = slurm.sbatch(f"#!/bin/sh\n{script}\n", f"--job-name={name}", *options)

    submit("ok", "echo fine", "--time=1")
    submit("fails", "exit 3")
    submit("killed", "kill -9 $$")
    for name in list(ids):
        slurm.wait_for_job(ids[name])
    submit("two nodes", "sleep 100", "--nodelist=node[0-1]", "--gpus-per-node=1", "--time=10",
           "--comment=a b=c")  # fmt: skip
    submit("one", "sleep 100", "--nodelist=node1", "--gpus=h100:1", "--time=1-00:00:00", "--mem=3G",
           "--cpus-per-task=2")  # fmt: skip
    submit("hogs", "sleep 100", "--nodelist=node[2-3]", "--exclusive", "--gres=gpu:h100:2")
    submit("array", "sleep 100", "--array=0-9%2", "--cpus-per-task=2", "--output=a-%A_%a-%x.out")
    submit("after", "true", f"--dependency=afterok:{ids['one']}", "--gpus-per-task=1", "--ntasks=2")
    submit("big", "true", "--nodes=4", "--gpus=8")
    submit("done-array", "exit $SLURM_ARRAY_TASK_ID", "--array=0-2")
    submit("cancelled", "sleep 9")
    slurm.command("scancel", ids["cancelled"])
    slurm.wait_for_job(ids["done-array"])
    slurm.wait_for_job(ids["two nodes"], "RUNNING")
    slurm.command("scontrol", "update", "nodename=node3", "state=drain", "reason=bad fan")
    time.sleep(2)  # the backfill scheduler says when what waits will start
    return ids


def main() -> None:
    """Write the fixtures of the installed version."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-slurm-") as folder,
        Slurm(Path(folder) / "s") as slurm,
    ):
        ids = submit_jobs(slurm)
        said = {}
        for name, command in COMMANDS.items():
            said[name] = slurm.command(
                "env", "SLURM_TIME_FORMAT=%s", *(c.format(**ids) for c in command)
            )
        for name, options in REFUSED.items():
            ended = slurm.run(
                "sbatch", "--parsable", f"--chdir={folder}/s", *options, text="#!/bin/sh\ntrue\n"
            )
            said[f"refused-{name}.txt"] = f"{ended.returncode}\n{ended.stderr}"
        said["unknown-job.txt"] = slurm.run("scontrol", "show", "job", "999").stderr
        said["no-accounting.txt"] = slurm.run("sacct").stderr
        said["jobcomp.log"] = (slurm.folder / "jobcomp.log").read_text()
        slurm.stop_controller()
        said["no-controller.txt"] = slurm.run(
            "sbatch", "--parsable", text="#!/bin/sh\ntrue\n"
        ).stderr
        slurm.start_controller()
    version = re.search(r"(\d+\.\d+)\.", said["version.txt"])
    assert version is not None, said["version.txt"]
    target = FIXTURES / version[1]
    target.mkdir(parents=True, exist_ok=True)
    for name, text in said.items():
        neutral = text.replace(str(slurm.folder), "/lab").replace(
            f"={socket.gethostname()}", "=lab"
        )
        neutral = re.sub(r"OS=Linux.*", "OS=Linux", neutral)
        (target / name).write_text(neutral)
    sys.stdout.write(f"{target}: {len(said)} files\n")


if __name__ == "__main__":
    main()
