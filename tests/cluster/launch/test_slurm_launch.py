"""Launches on a real Slurm of four nodes: each ending that Slurm knows, and nothing left on any node."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from cluster.launch.launching import MARK, TRAINER, Launch, processes_with, seen_counts
from tests_shared import until

NODES = 2


def submit(
    slurm,
    launch: Launch,
    photos,
    *more: str,
    options: tuple[str, ...] = (),
    sbatch: tuple[str, ...] = (),
    nodes: int = NODES,
) -> str:
    """A staged job of a rank on each node; its script ends as `headrace launch` does."""
    words = shlex.join(
        [
            "launch", "--local", str(launch.disk), "--framework", "plain", "--ranks-per-node", "1",
            "--stage", str(photos), "--no-daemon", "--no-agent", *options, str(TRAINER),
            str(launch.folder / "checkpoints"), "--log", str(launch.folder / "log"), *more,
        ]
    )  # fmt: skip
    python = f"{shlex.quote(sys.executable)} -c 'from headrace.cli import main; main()'"
    mark = f"export {MARK}={launch.mark} HEADRACE_HISTORY={launch.folder}/history"
    return slurm.sbatch(
        f"#!/bin/bash\n{mark}\ncd {launch.folder}\nexec {python} {words}\n",
        f"--nodes={nodes}", "--cpus-per-task=2", "--time=5", f"--output={launch.folder}/job.out",
        "--open-mode=append", *sbatch,
    )  # fmt: skip


def output(launch: Launch) -> str:
    path = launch.folder / "job.out"
    return path.read_text() if path.exists() else ""


def running(slurm, launch: Launch, photos, **more) -> str:
    job = submit(slurm, launch, photos, "--pace", "0.2", "--epochs", "50", **more)
    log = launch.folder / "log"
    made = until(
        lambda: len([p for p in log.glob("rank-*") if p.stat().st_size]) >= NODES, 60.0
    )  # fmt: skip
    assert made, output(launch)
    assert len(launch.supervisors()) == NODES
    return job


def test_a_job_that_succeeds_leaves_nothing(slurm, launch, photos):
    job = submit(slurm, launch, photos)
    assert slurm.wait_for_job(job, seconds=90.0) == "COMPLETED", output(launch)
    assert launch.leaves_nothing() == []
    assert (seen_counts(launch.folder / "checkpoints", NODES) == 1).all()
    assert f"job {job}: completed, 2 nodes, 2 ranks" in output(launch)
    assert (launch.folder / f"headrace-runs/{job}-0.json").exists()


def test_a_job_that_is_cancelled_saves_and_leaves_nothing(slurm, launch, photos):
    job = running(slurm, launch, photos)
    slurm.command("scancel", job)
    assert slurm.wait_for_job(job, seconds=60.0) == "CANCELLED"
    assert launch.leaves_nothing() == [], output(launch)
    assert list((launch.folder / "checkpoints").glob("step-*/manifest.json")), output(launch)


# Slow, for once a rank ended in "terminate called without an active exception", and its job as failed.
@pytest.mark.slow
def test_a_step_that_is_signalled_with_usr1_has_its_job_requeued(slurm, launch, photos):
    """What `#SBATCH --signal=USR1@SECONDS` does: every process of the steps gets it, ranks too."""
    job = running(slurm, launch, photos, sbatch=("--requeue",))
    slurm.command("scancel", "--signal=USR1", job)
    assert until(lambda: slurm.job_state(job) == "PENDING", 40.0), output(launch)
    assert until(lambda: not processes_with(launch.mark), 15.0)
    first = output(launch)
    assert first.count("leaves at step") == NODES
    assert "requeued" in first
    slurm.begin_now(job)
    begun = re.compile(r"begins at step \d+\n")  # a line that is written whole
    assert until(lambda: len(begun.findall(output(launch))) == 2 * NODES, 60.0), output(launch)
    last = first.split("leaves at step ")[1].split()[0]
    assert output(launch).count(f"begins at step {last}\n") == NODES  # exactly there, and not at 0
    slurm.command("scancel", job)
    slurm.wait_for_job(job, seconds=60.0)
    assert launch.leaves_nothing() == [], output(launch)


@pytest.mark.parametrize("asks", [True, False])
def test_a_job_at_its_time_limit_leaves_nothing(slurm, launch, photos, asks):
    """A script that asks has saved before the limit; one that does not is cut off by Slurm."""
    more = () if asks else ("--ignore-stop",)
    job = submit(
        slurm, launch, photos, "--pace", "0.2", "--epochs", "50", *more,
        options=("--grace", "5"), sbatch=("--no-requeue",),
    )  # fmt: skip
    log = launch.folder / "log"
    assert until(lambda: len([p for p in log.glob("rank-*") if p.stat().st_size]) >= NODES, 60.0)
    if not asks:
        slurm.end_time_limit(job, 1)
        assert slurm.wait_for_job(job, seconds=70.0) == "TIMEOUT"
    else:
        # What `#SBATCH --signal=B:USR1@SECONDS` does before the limit. It may not be requeued.
        slurm.command("scancel", "--signal=USR1", "--batch", job)
        assert slurm.wait_for_job(job, seconds=60.0) == "FAILED"  # 75: to be submitted again
        assert output(launch).count("leaves at step") == NODES
        assert "Submit the job again" in output(launch)
    assert until(lambda: not processes_with(launch.mark), 20.0), processes_with(launch.mark)
    left = launch.leaves_nothing()
    if asks:
        assert left == []
    else:
        # Slurm kills all at once: what has names waits for the next launch on the node.
        assert not [text for text in left if text.startswith(("process", "open"))]
        again = submit(slurm, launch, photos, "--epochs", "1")
        assert slurm.wait_for_job(again, seconds=90.0) == "COMPLETED", output(launch)
        assert launch.leaves_nothing() == []
