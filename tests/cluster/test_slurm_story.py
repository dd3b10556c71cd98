"""A real Slurm, at the level of the executor: what befalls jobs on clusters, from time limits to dead nodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from headrace.cluster.executor import JobState, Submission, executor
from headrace.cluster.slurm.commands import Commands
from headrace.cluster.slurm.executor import SlurmExecutor
from headrace.cluster.slurm.scontrol import read_snapshot
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout
from tests_shared import until

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cluster.executor import JobStatus

WAIT_S = 60.0
pytestmark = pytest.mark.usefixtures("slurm")


@pytest.fixture
def ex() -> SlurmExecutor:
    return SlurmExecutor()


def submit(ex: SlurmExecutor, folder: Path, script: str, *options: str) -> str:
    text = f"#!/bin/bash\n{script}\n".encode()
    return ex.submit(Submission(text, options, directory=folder))


def end(ex: SlurmExecutor, job: str) -> JobStatus:
    (status,) = ex.wait([job], WAIT_S)[job]
    return status


def state(ex: SlurmExecutor, job: str) -> tuple[JobState, str, int]:
    (status,) = ex.status([job])[job]
    return status.state, status.reason, status.restarts


def test_slurms_executor_is_chosen_where_sbatch_is():
    assert isinstance(executor(), SlurmExecutor)


def test_a_batch_script_runs_steps_on_all_nodes_with_their_gpus(ex, slurm, tmp_path):
    script = "srun --label sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES' | sort"
    job = submit(ex, tmp_path, script, "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=2")
    status = end(ex, job)
    assert (status.state, status.nodes) == (JobState.COMPLETED, slurm.nodes)
    said = b"".join(ex.logs(job)).decode().splitlines()
    assert said == [f"{i}: node{i} 0,1" for i in range(4)]


def test_a_job_that_is_too_long_is_ended_and_says_so(ex, slurm, tmp_path):
    script = "trap 'echo warned' TERM; echo began; while :; do sleep 0.1; done"
    job = submit(ex, tmp_path, script, "--time=1")
    slurm.wait_for_job(job, "RUNNING")
    slurm.end_time_limit(job)
    status = end(ex, job)
    assert (status.state, status.exit_code) == (JobState.TIMEOUT, None)
    assert b"began" in b"".join(ex.logs(job))
    assert b"DUE TO TIME LIMIT" in b"".join(ex.logs(job))


def test_a_node_dies_its_job_runs_again_elsewhere_and_the_node_comes_back(ex, slurm, tmp_path):
    script = "echo run $SLURM_RESTART_COUNT; test -z $SLURM_RESTART_COUNT || exit 0; srun sleep 99; sleep 99"
    job = submit(ex, tmp_path, script, "--nodes=2", "--requeue", "--open-mode=append")
    slurm.wait_for_job(job, "RUNNING")
    first = ex.status([job])[job][0].nodes
    assert until(lambda: all(map(slurm.processes, first)))
    slurm.kill_node(first[1])  # and nobody says so: Slurm must miss it
    slurm.wait_for_job(job, "PENDING", seconds=WAIT_S)
    assert state(ex, job)[2] == 1
    lost = {node.name: node for node in read_snapshot().nodes}[first[1]]
    assert "down" in lost.states
    slurm.begin_now(job)
    status = end(ex, job)
    assert (status.state, status.restarts) == (JobState.COMPLETED, 1)
    assert first[1] not in status.nodes
    assert b"run 1\n" in b"".join(ex.logs(job))
    slurm.start_node(first[1])
    (back,) = (node for node in read_snapshot().nodes if node.name == first[1])
    assert back.states == ("idle",)


def test_a_job_that_may_not_run_again_ends_with_its_node(ex, slurm, tmp_path):
    job = submit(ex, tmp_path, "sleep 300", "--no-requeue", "--nodelist=node3")
    slurm.wait_for_job(job, "RUNNING")
    slurm.lose_node("node3")
    status = end(ex, job)
    assert (status.state, status.exit_code, status.nodes) == (JobState.NODE_FAIL, None, ("node3",))


def test_a_job_is_requeued(ex, slurm, tmp_path):
    script = "test -z $SLURM_RESTART_COUNT || exit 0; touch began; sleep 300"
    job = submit(ex, tmp_path, script)
    assert until((tmp_path / "began").exists, WAIT_S)
    slurm.command("scontrol", "requeue", job)
    slurm.wait_for_job(job, "PENDING")
    slurm.begin_now(job)
    status = end(ex, job)
    assert (status.state, status.restarts) == (JobState.COMPLETED, 1), slurm.said_of(job)


def test_what_waits_says_why(ex, slurm, tmp_path):
    hog = submit(ex, tmp_path, "sleep 300", "--nodes=4", "--exclusive")
    slurm.wait_for_job(hog, "RUNNING")
    waits = submit(ex, tmp_path, "true", "--nodes=4")
    too_long = submit(ex, tmp_path, "true", "--partition=debug", "--time=60")
    assert until(lambda: state(ex, waits)[1] in {"Resources", "Priority"})
    assert until(lambda: state(ex, too_long)[1] == "PartitionTimeLimit")
    ex.cancel([hog, waits, too_long])
    assert {
        s.state for known in ex.wait([hog, waits, too_long], WAIT_S).values() for s in known
    } == {JobState.CANCELLED}


def test_what_the_cluster_does_not_have_is_refused(ex, tmp_path):
    for option in ("--partition=nope", "--gres=gpu:a100:1", "--gpus-per-node=3", "--mem=999G"):
        with pytest.raises(ClusterRequestError):
            submit(ex, tmp_path, "true", option)


def test_the_controller_is_restarted_while_a_job_is_waited_for(ex, slurm, tmp_path):
    job = submit(ex, tmp_path, "touch began; until test -e go; do sleep 0.05; done; echo fine")
    assert until((tmp_path / "began").exists, WAIT_S)
    slurm.stop_controller()
    hasty = SlurmExecutor(Commands(deadline_s=1))
    with pytest.raises(ClusterError, match="scontrol ping"):
        hasty.status([job])
    (tmp_path / "go").touch()
    with pytest.raises(ClusterTimeout, match="Slurm is away"):
        hasty.wait([job], 0.1)
    slurm.start_controller()
    assert end(ex, job).state == JobState.COMPLETED
    assert b"".join(ex.logs(job)) == b"fine\n"


def test_a_job_that_slurmctld_forgot_is_known_from_the_list_of_jobs_completed(ex, slurm, tmp_path):
    job = submit(ex, tmp_path, "exit 5", "--job-name=forgotten")
    slurm.wait_for_job(job)
    done = slurm.folder / "jobcomp.log"
    assert until(lambda: f"JobId={job} " in done.read_text())

    class Forgetful(Commands):
        """slurmctld as it is MinJobAge later."""

        def query(self, *command):
            if command[:2] == ("scontrol", "--details"):
                raise ClusterError("slurm_load_jobs error: Invalid job id specified")
            return super().query(*command)

    (status,) = SlurmExecutor(Forgetful()).wait([job], 10)[job]
    assert (status.name, status.state, status.exit_code) == ("forgotten", JobState.FAILED, 5)


def test_many_jobs_are_asked_for_at_once(ex, tmp_path):
    jobs = [submit(ex, tmp_path, "true", "--hold") for _ in range(34)]
    asked: list[tuple[str, ...]] = []

    class Counted(Commands):
        def query(self, *command):
            asked.append(command)
            return super().query(*command)

    found = SlurmExecutor(Counted()).status([*jobs, "987654"])
    assert [[s.job_id for s in found[job]] for job in jobs] == [[job] for job in jobs]
    assert found["987654"] == []
    assert asked.count(("scontrol", "--details", "show", "job")) == 1
    assert len(asked) < 6
    ex.cancel(jobs)


def test_two_jobs_of_one_name_are_two(ex, tmp_path):
    jobs = [submit(ex, tmp_path, f"echo {i}", "--job-name=same") for i in range(2)]
    ex.wait(jobs, WAIT_S)
    assert [b"".join(ex.logs(job)) for job in jobs] == [b"0\n", b"1\n"]


def test_jobs_are_submitted_from_within_a_job(ex, tmp_path):
    # What a job inherits must not leak into the one that it submits.
    program = (
        "from pathlib import Path; from headrace.cluster.executor import Submission; "
        "from headrace.cluster.executor import executor; "
        "print(executor().submit(Submission(b'#!/bin/sh\\necho $SLURM_JOB_ID\\n', "
        "('--nodes=1', '--ntasks=1'), directory=Path.cwd())))"
    )
    (tmp_path / "submit.py").write_text(program)
    import sys

    outer = submit(ex, tmp_path, f"{sys.executable} submit.py", "--nodes=2", "--ntasks=4")
    assert end(ex, outer).state == JobState.COMPLETED
    inner = b"".join(ex.logs(outer)).decode().strip()
    assert end(ex, inner).state == JobState.COMPLETED
    assert len(end(ex, inner).nodes) == 1
    assert b"".join(ex.logs(inner)).decode().strip() == inner
    assert "SLURM_JOB_ID" not in os.environ
