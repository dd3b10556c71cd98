"""A node of a real Slurm job dies and stays dead: the job goes on without it, and each sample is seen once.

Slurm waits five minutes for a node (SlurmdTimeout=300, its default) before it says that it is down: whatever
happens sooner is headrace's doing.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from cluster.launch.launching import processes_with
from cluster.launch.test_slurm_launch import output, submit
from cluster.slurm import Slurm, missing
from tests_shared import until

SAMPLES = 36
LOST = "node1"


@pytest.fixture
def slurm():
    """Four nodes that Slurm is slow to give up."""
    if missing():
        pytest.skip("Slurm is not installed")
    folder = Path(tempfile.mkdtemp(prefix="headrace-slurm-"))
    try:
        with Slurm(folder / "s", settings={"SlurmdTimeout": "300"}) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lives(launch) -> list[list[tuple[int, list[int]]]]:
    """(step, samples) of every rank, by life of the job."""
    made: dict[int, list[tuple[int, list[int]]]] = {}
    for path in (launch.folder / "log").glob("rank-*"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert {epoch for epoch, _, _ in lines} <= {0}
        life = made.setdefault(int(path.name.split(".")[1]), [])
        life += [(step, indices) for _, step, indices in lines]
    return [made[life] for life in sorted(made)]


def lose_a_node(
    slurm, launch, photos, nodes: int, *more: str, options: tuple[str, ...] = ()
) -> str:
    """A job whose node dies for good when its ranks are behind a checkpoint."""
    job = submit(
        slurm, launch, photos, "--epochs", "1", "--batch", "1", "--pace", "0.4", "--save-every", "2",
        *more,        options=options, sbatch=("--requeue",), nodes=nodes,
    )  # fmt: skip

    def behind_a_checkpoint() -> bool:
        logs = (launch.folder / "log").glob("rank-*")
        return len([p for p in logs if p.read_text().count("\n") >= 5]) == nodes

    assert until(behind_a_checkpoint, 60.0), output(launch)
    slurm.kill_node(LOST)
    assert slurm.processes(LOST) == []
    return job


def each_sample_was_seen_once(launch) -> None:
    """Over both lives, counting of the first what its last whole checkpoint knows."""
    first, second = lives(launch)
    (begun,) = set(re.findall(r"begins at step (\d+)", output(launch))) - {"0"}
    kept = [i for step, indices in first if step <= int(begun) for i in indices]
    again = [i for step, indices in first if step > int(begun) for i in indices]
    assert again  # the loss cost something: it is made up for
    assert sorted(kept + [i for _, indices in second for i in indices]) == list(range(SAMPLES))


def test_a_job_that_loses_a_node_is_requeued_without_it(slurm, launch, photos):
    job = lose_a_node(slurm, launch, photos, 3)
    assert until(lambda: slurm.job_state(job) == "PENDING", 60.0), slurm.job_state(job)
    assert f"job {job}: requeued" in output(launch)
    assert f"node {LOST} is lost" in output(launch)
    assert until(lambda: not processes_with(launch.mark), 15.0), processes_with(launch.mark)
    slurm.begin_now(job)
    state = slurm.wait_for_job(job, seconds=90.0)
    assert state == "COMPLETED", output(launch)
    known = slurm.command("scontrol", "show", "job", job)
    assert "Restarts=1" in known
    assert f"ExcNodeList={LOST}" in known
    assert "NodeList=node[0,2-3]" in known
    assert "restarted once: completed, 3 nodes, 3 ranks" in output(launch)
    assert slurm.node_states(LOST)[0] != "down"  # Slurm itself has not missed it yet
    each_sample_was_seen_once(launch)


@pytest.mark.slow
def test_a_job_that_may_have_fewer_nodes_goes_on_at_once_with_those_left(slurm, launch, photos):
    job = lose_a_node(slurm, launch, photos, 3, "--no-counts", options=("--nodes", "2-3"))
    state = slurm.wait_for_job(job, seconds=120.0)
    assert state == "COMPLETED", output(launch)
    assert "Restarts=0" in slurm.command("scontrol", "show", "job", job)
    assert f"node {LOST} is lost" in output(launch)
    assert f"job {job}: continued" in output(launch)
    assert "completed, 2 nodes, 2 ranks" in output(launch)
    assert until(lambda: not processes_with(launch.mark), 15.0), processes_with(launch.mark)
    each_sample_was_seen_once(launch)
