"""The Slurm that tests use: many nodes on one machine, and nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

import pytest

from cluster.executor_tests import lives
from cluster.slurm import Slurm, descendants, missing
from tests_shared import until


def mentions(text: str) -> set[int]:
    """Processes with a text in their command line or environment."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                said = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                if text.encode() in said:
                    found.add(int(folder.name))
    return found


def test_a_job_runs_on_all_nodes_with_their_gpus(slurm):
    job = slurm.sbatch(
        "#!/bin/sh\nsrun sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'\n",
        "--nodes=4", "--gpus-per-node=2", "--output=all.txt",
    )  # fmt: skip
    assert slurm.wait_for_job(job) == "COMPLETED"
    said = sorted((slurm.folder / "all.txt").read_text().splitlines())
    assert said == [f"{name} 0,1" for name in slurm.nodes]


def test_a_lost_node_takes_its_processes_with_it_and_comes_back(slurm):
    job = slurm.sbatch(
        "#!/bin/sh\nsetsid sleep 300 &\nsleep 301\n", "--requeue", "--nodelist=node1"
    )
    assert slurm.wait_for_job(job, "RUNNING") == "RUNNING"
    assert until(lambda: len(slurm.processes("node1")) >= 3)
    ran = slurm.processes("node1")
    slurm.lose_node("node1")
    assert not [pid for pid in ran if Path(f"/proc/{pid}/exe").exists()]
    assert slurm.node_states("node1")[0].startswith("down")
    slurm.wait_for_job(job, "PENDING")
    slurm.start_node("node1")
    slurm.begin_now(job)
    assert slurm.wait_for_job(job, "RUNNING") == "RUNNING"
    assert "Restarts=1" in slurm.command("scontrol", "show", "job", job)


def test_jobs_outlive_the_controller(slurm):
    job = slurm.sbatch("#!/bin/sh\nsleep 0.5\n")
    slurm.wait_for_job(job, "RUNNING")
    slurm.stop_controller()
    slurm.start_controller()
    assert slurm.wait_for_job(job) == "COMPLETED"


@pytest.mark.skipif(bool(missing()), reason="no Slurm")
def test_nothing_is_left_of_a_slurm_that_was_stopped():
    with tempfile.TemporaryDirectory(prefix="headrace-slurm-") as folder:
        with Slurm(Path(folder) / "s", nodes=2, gpus=1) as slurm:
            job = slurm.sbatch("#!/bin/sh\nsetsid sleep 300 &\nsrun sleep 301\n", "--nodes=2")
            slurm.wait_for_job(job, "RUNNING")
            assert until(lambda: all(map(slurm.processes, slurm.nodes))), slurm.said_of(job)
            ran = mentions(folder) | {pid for name in slurm.nodes for pid in slurm.processes(name)}
            assert len(ran) > 10  # four daemons, steps, scripts and what those started
        # Children of ours are no zombies, either.
        assert until(lambda: not mentions(folder) and not ran & set(descendants(os.getpid())), 10)
        assert not any(map(lives, ran))
        for port in slurm.ports:
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind(("127.0.0.1", port))
        assert [p for p in slurm.folder.rglob("*") if not (p.is_file() or p.is_dir())] == []
