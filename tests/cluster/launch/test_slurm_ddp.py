"""On a real Slurm: PyTorch DDP over a staged store, a node killed for good, resumed exactly without it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

import headrace as hr
from cluster.launch.launching import MARK, Launch, processes_with
from tests_shared import CLIPART, until, write_real_images

pytest.importorskip("torch")
pytest.importorskip("PIL")

TRAINER = Path(__file__).with_name("train_ddp.py")
RANKS = 6
PER_CLASS = 64
SAMPLES = 3 * PER_CLASS


def script(launch: Launch, words: str) -> str:
    """A batch script as a user writes it."""
    mark = f"export {MARK}={launch.mark} HEADRACE_HISTORY={launch.folder}/history\n"
    python = f"{shlex.quote(sys.executable)} -c 'from headrace.cli import main; main()'"
    return f"#!/bin/bash\n{mark}cd {launch.folder}\nexec {python} launch --local {launch.disk} {words}\n"


def logged(log: Path, life: int) -> list[tuple[int, int, list[int]]]:
    """The steps of one life of the job."""
    return [
        (epoch, step, indices)
        for path in log.glob(f"rank-*.{life}.*")
        for line in path.read_text().splitlines()
        for epoch, step, indices in [json.loads(line)]
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_ddp_job_whose_node_is_killed_sees_each_sample_of_the_epoch_once(slurm, launch):
    source = write_real_images(launch.folder / "images", PER_CLASS)
    if CLIPART.is_dir():  # real images, as `make demo` uses them
        assert len(list(source.rglob("*.png"))) == SAMPLES
    checkpoints, log = launch.folder / "checkpoints", launch.folder / "log"
    out = launch.folder / "job.out"
    job = slurm.sbatch(
        script(launch, f"--no-agent --stage {source} {TRAINER} {checkpoints} {log} --pace 0.4"),
        "--nodes=3", "--gpus-per-node=2", "--cpus-per-task=2", "--time=5", "--requeue",
        f"--output={out}", "--open-mode=append",
    )  # fmt: skip

    # All ranks are behind a checkpoint, and have learned from samples that it does not know of.
    def behind_a_checkpoint() -> bool:
        steps = [step for _, step, _ in logged(log, 0)]
        return len(steps) >= RANKS * 4 and hr.checkpoint.latest(checkpoints) is not None

    assert until(behind_a_checkpoint, 200.0), out.read_text()
    slurm.kill_node("node2")
    assert until(lambda: slurm.job_state(job) == "PENDING", 60.0), slurm.job_state(job)
    assert until(lambda: not processes_with(launch.mark), 15.0), processes_with(launch.mark)
    saved = hr.checkpoint.latest(checkpoints)
    assert saved is not None
    lost = [indices for _, step, indices in logged(log, 0) if step > saved]
    assert lost  # the kill cost something: it is made up for
    assert saved < SAMPLES // (RANKS * 2)  # it did not come too late

    slurm.begin_now(job)
    state = slurm.wait_for_job(job, seconds=300.0)
    text = out.read_text()
    assert state == "COMPLETED", text
    assert text.count("ends at step") == RANKS, text
    assert "restart 1: completed, 3 nodes, 6 ranks" in text

    # What the model has learned from, as its last checkpoint says: each sample once.
    trees = [hr.checkpoint.load(checkpoints, rank=r, world_size=RANKS).tree for r in range(RANKS)]
    seen = sum(tree["parts"]["seen"]["counts"].numpy() for tree in trees)
    assert seen.tolist() == [1] * SAMPLES
    # What was done: the steps up to the checkpoint, and those of the second life, are the whole epoch.
    done = [i for _, step, indices in logged(log, 0) if step <= saved for i in indices]
    done += [i for _, _, indices in logged(log, 1) for i in indices]
    assert sorted(done) == list(range(SAMPLES))
    # The source was read once in each life, and served from the nodes' disks.
    assert f"{SAMPLES} samples staged" in text
    assert launch.leaves_nothing() == []
