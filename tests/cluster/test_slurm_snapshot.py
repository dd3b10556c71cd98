"""Snapshots: of the real Slurm and of a large simulated cluster."""

from __future__ import annotations

import pytest

from cluster.simulated import simulated_cluster
from headrace.cluster.executor import JobState
from headrace.cluster.slurm.accounting import read_accounting
from headrace.cluster.slurm.commands import Commands
from headrace.cluster.slurm.executor import SlurmExecutor
from headrace.cluster.slurm.scontrol import node_here, read_snapshot
from headrace.errors import ClusterError
from tests_shared import until


def test_a_real_cluster_reads_as_it_is(slurm):
    job = slurm.sbatch(
        "#!/bin/sh\nsleep 60\n", "--nodelist=node[0-1]", "--gpus-per-node=1", "--cpus-per-task=2",
        "--job-name=two", "--time=10",
    )  # fmt: skip
    one = slurm.sbatch("#!/bin/sh\nsleep 60\n", "--nodelist=node1", "--gpus=1")
    waits = slurm.sbatch(
        "#!/bin/sh\ntrue\n", f"--dependency=afterok:{job}", "--gpus=8", "--nodes=4"
    )
    for each in (job, one):
        slurm.wait_for_job(each, "RUNNING")
    snapshot = read_snapshot()
    assert (snapshot.cluster, snapshot.version) == (
        "lab",
        slurm.command("scontrol", "--version").split()[1],
    )
    nodes = {node.name: node for node in snapshot.nodes}
    assert [nodes[n].gpus_allocated for n in slurm.nodes] == [(0,), (0, 1), (), ()]
    assert {(n.cpus, n.gpus, n.gpu_type, n.memory_mib) for n in nodes.values()} == {
        (8, 2, "h100", 16000)
    }
    jobs = {j.job_id: j for j in snapshot.jobs}
    assert [(a.node, a.gpus, a.cpus) for a in jobs[job].allocations] == [
        ("node0", (0,), 2),
        ("node1", (0,), 2),
    ]
    assert [(a.node, a.gpus) for a in jobs[one].allocations] == [("node1", (1,))]
    assert (jobs[waits].state, jobs[waits].gpu_count, jobs[waits].reason) == (
        JobState.PENDING,
        8,
        "Dependency",
    )
    assert {p.name for p in snapshot.partitions if p.is_default} == {"main"}


def test_the_node_of_a_host_with_another_name_is_asked_for_or_several_are_said(fake):
    node = "NodeName=gpu07 Gres=gpu:h100:4 CPUTot=64 RealMemory=512000 State=IDLE"
    fake(
        "scontrol",
        f"""case "$*" in
        "show aliases c7") echo gpu07 ;;
        "show aliases many") echo gpu07 gpu08 ;;
        "--details show node gpu07") echo '{node}' ;;
    esac""",
    )
    here = node_here(Commands(), "c7")
    assert (here.name, here.cpus, here.memory_mib, here.gpus) == ("gpu07", 64, 512000, 4)
    assert node_here(Commands(), "many", "gpu07") == here
    assert node_here(Commands(), "laptop") is None
    with pytest.raises(ClusterError, match=r"many gpu\[07-08\], 2 nodes"):
        node_here(Commands(), "many")


def test_jobs_that_ended_are_in_the_books_and_not_in_the_snapshot(slurm):
    job = slurm.sbatch("#!/bin/sh\nexit 4\n", "--job-name=over", "--comment=x")
    slurm.wait_for_job(job)
    assert job not in {j.job_id for j in read_snapshot().jobs}

    def books() -> list:
        return [j for j in read_accounting(Commands()) if j.job_id == job]

    assert until(books)  # the list is written a moment later
    (found,) = books()
    assert (found.name, found.state, found.exit_code) == ("over", JobState.FAILED, 4)
    earlier = read_accounting(Commands(), until_s=found.submitted_s - 10)
    assert job not in {j.job_id for j in earlier}


def test_nodes_that_are_only_planned_are_not_a_jobs(slurm):
    slurm.sbatch("#!/bin/sh\nsleep 100\n", "--nodes=4", "--exclusive", "--time=5")
    waits = slurm.sbatch("#!/bin/sh\ntrue\n", "--exclusive", "--time=5")
    show = ("scontrol", "show", "job", waits)
    assert until(lambda: " SchedNodeList=node" in slurm.command(*show), 60)
    (job,) = [job for job in read_snapshot().jobs if job.job_id == waits]
    (status,) = SlurmExecutor().status([waits])[waits]
    assert (job.nodes, status.nodes) == ((), ())
    assert job.started_s == status.started_s > job.submitted_s  # that is planned, too


def test_a_large_simulated_cluster_reads_whole():
    snapshot = simulated_cluster(nodes=500, jobs=5000)
    assert (len(snapshot.nodes), len(snapshot.jobs)) == (500, 5000)
    running = [job for job in snapshot.jobs if job.state == JobState.RUNNING]
    assert 0 < len(running) < len(snapshot.jobs)
    # What jobs have is what nodes have given.
    had: dict[str, set[int]] = {}
    for job in running:
        assert sum(a.gpu_count for a in job.allocations) == job.gpu_count
        for allocation in job.allocations:
            taken = had.setdefault(allocation.node, set())
            assert taken.isdisjoint(allocation.gpus)
            taken.update(allocation.gpus)
    assert {n.name: set(n.gpus_allocated) for n in snapshot.nodes if n.gpus_allocated} == had
