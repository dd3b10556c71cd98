"""One cluster as each version of Slurm prints it, reads as the same snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cluster.executor import JobState
from headrace.cluster.slurm.accounting import (
    FIELDS,
    read_completed,
    read_sacct,
)
from headrace.cluster.slurm.scontrol import read_jobs, read_nodes, read_partitions, read_statuses
from headrace.cluster.snapshot import Allocation, ClusterJob, Node
from headrace.errors import ClusterError
from headrace.insight.usage import booked_of
from headrace.telemetry.waste import use_of

FIXTURES = Path(__file__).parent / "fixtures"
TEXT = ("20.11", "25.05")

JOBS = (
    ClusterJob(
        job_id="101", name="train it", user="ann", account="vision", partition="gpu",
        state=JobState.RUNNING, qos="normal", nodes=("gpu01",),
        allocations=(Allocation("gpu01", cpus=4, memory_mib=8192, gpu_count=1, gpus=(1,)),),
        node_count=1, cpu_count=4, gpu_count=1, memory_mib=8192, submitted_s=1795332993.0,
        started_s=1795332994.0, limit_minutes=2160, priority=4294,
    ),
    ClusterJob(
        job_id="102_[3-9]", name="sweep", user="ann", account="vision", partition="gpu",
        state=JobState.PENDING, reason="JobArrayTaskLimit", qos="normal", node_count=1, cpu_count=4,
        gpu_count=1, memory_mib=8192, submitted_s=1795332993.0, limit_minutes=2160, priority=4294,
    ),
)  # fmt: skip

GPU01 = Node(
    name="gpu01", states=("mixed",), cpus=16, threads_per_core=1,
    memory_mib=64000, gpus=2, gpu_type="h100", gpus_allocated=(1,), cpus_allocated=4, cpu_load=3.5,
    memory_allocated_mib=8192, partitions=("gpu",), features=("h100", "ib"),
    architecture="x86_64",
)  # fmt: skip
GPU02 = Node(
    name="gpu02", states=("idle", "drain"), cpus=16, threads_per_core=1,
    memory_mib=64000, gpus=2, gpu_type="h100", cpu_load=3.5, partitions=("gpu",),
    features=("h100", "ib"), reason="bad fan", architecture="x86_64",
)  # fmt: skip


def said(version: str, name: str) -> str:
    return (FIXTURES / version / name).read_text()


@pytest.mark.parametrize("version", TEXT)
def test_text_of_each_version_reads_the_same(version):
    assert read_jobs(said(version, "jobs.txt")) == JOBS
    assert read_nodes(said(version, "nodes.txt")) == (GPU01, GPU02)


@pytest.mark.parametrize("version", TEXT)
def test_a_job_whose_start_is_planned_has_no_nodes_yet(version):
    """From 22.05 on the nodes that the scheduler has in mind stand behind those that a job has: none."""
    text = said(version, "jobs.txt")
    for none in ("NodeList=\n", "NodeList=(null)\n"):
        text = text.replace(f"   {none}", f"   {none.rstrip()} SchedNodeList=gpu[01-02]\n")
    assert text.count(" SchedNodeList=") == 1
    assert read_jobs(text) == JOBS
    assert [s.nodes for s in read_statuses(text)] == [("gpu01",), *[()] * 7]


@pytest.mark.parametrize("version", TEXT)
def test_statuses_of_each_version_read_the_same(version):
    first, *tasks = read_statuses(said(version, "jobs.txt"))
    assert (first.job_id, first.name, first.state) == ("101", "train it", JobState.RUNNING)
    assert first.output == Path("/home/ann/slurm-101.out")
    assert [t.job_id for t in tasks] == [f"102_{i}" for i in range(3, 10)]
    assert tasks[0].output == Path("/home/ann/slurm-102_3.out")


def test_recorded_jobs_have_their_real_gpus():
    jobs = {job.name: job for job in read_jobs(said("22.05", "jobs.txt"))}
    assert [(a.node, a.gpus) for a in jobs["two nodes"].allocations] == [
        ("node0", (0,)),
        ("node1", (0,)),
    ]
    assert [(a.node, a.gpus) for a in jobs["one"].allocations] == [("node1", (1,))]
    assert [(a.node, a.gpus) for a in jobs["hogs"].allocations] == [
        ("node2", (0, 1)),
        ("node3", (0, 1)),
    ]
    # TRES does not count GPUs there: what waits says it by --gpus and --gpus-per-task.
    assert (jobs["big"].gpu_count, jobs["after"].gpu_count) == (8, 2)
    nodes = {node.name: node for node in read_nodes(said("22.05", "nodes.txt"))}
    assert [nodes[f"node{i}"].gpus_allocated for i in range(4)] == [(0,), (0, 1), (0, 1), (0, 1)]
    assert (nodes["node3"].states, nodes["node3"].reason) == (("allocated", "drain"), "bad fan")


def test_recorded_partitions():
    main, debug = read_partitions(said("22.05", "partitions.txt"))
    assert (main.name, main.is_default, main.max_minutes) == (
        "main",
        True,
        1440,
    )
    assert main.nodes == ("node0", "node1", "node2", "node3")
    assert (debug.nodes, debug.max_minutes) == (
        ("node0",),
        30,
    )


def test_recorded_statuses_say_how_jobs_ended():
    ended = {s.name: s for s in read_statuses(said("22.05", "jobs.txt"))}
    assert (ended["ok"].state, ended["ok"].exit_code) == (JobState.COMPLETED, 0)
    assert (ended["fails"].state, ended["fails"].exit_code) == (JobState.FAILED, 3)
    assert (ended["killed"].exit_code, ended["killed"].signal) == (None, 9)
    assert (ended["cancelled"].state, ended["cancelled"].exit_code) == (JobState.CANCELLED, None)
    tasks = {s.job_id: s.state for s in read_statuses(said("22.05", "array.txt"))}
    assert len(tasks) == 10
    (task,) = read_statuses(said("22.05", "task.txt"))
    assert task.job_id.endswith("_3")
    assert str(task.output).endswith("_3-array.out")


@pytest.mark.parametrize("version", ["20.11", "23.02"])
def test_sacct_of_each_version_reads_the_same(version):
    fields = FIELDS if version == "23.02" else tuple(f for f in FIELDS if f != "Restarts")
    jobs = {job.job_id: job for job in read_sacct(said(version, "sacct.txt"), fields)}
    first = jobs["101"]
    assert (first.name, first.user, first.gpu_count, first.gpu_hours) == (
        "train it",
        "ann",
        1,
        600 / 3600,
    )
    assert first.cpu_s == pytest.approx(2300.123)
    assert first.memory_peak_mib == 2000
    assert str(first.folder) == "/home/ann"  # where its launch has written why it ended
    # As `seff` has it: of the CPU time and memory that it had.
    use = use_of(None, booked_of(first, 0.0, 4e9))
    assert use.cpu.share == pytest.approx(2300.123 / (4 * 600))
    assert use.memory.share == pytest.approx(2000 / 8192)
    again = jobs["102_3"]
    assert (again.name, again.state, again.exit_code) == ("sweep | with bars", JobState.FAILED, 3)
    assert (again.restarts, again.elapsed_s, again.nodes) == (1, 60.0, ("gpu01",))
    assert (jobs["104"].state, jobs["104"].started_s, jobs["104"].nodes) == (
        JobState.CANCELLED,
        None,
        (),
    )
    large = jobs["105"]
    assert (large.state, large.signal, large.exit_code) == (JobState.OUT_OF_MEMORY, 125, None)
    assert (large.nodes, large.gpu_count, large.limit_minutes) == (("gpu01", "gpu02"), 16, None)
    assert large.cpu_s == 26 * 3600 + 184


def test_the_recorded_list_of_jobs_completed():
    jobs = {job.job_id: job for job in read_completed(said("22.05", "jobcomp.log").splitlines())}
    by_name = {job.name: job for job in jobs.values()}
    assert (by_name["fails"].state, by_name["fails"].exit_code) == (JobState.FAILED, 3)
    assert by_name["killed"].signal == 9
    assert {job_id.partition("_")[2] for job_id in jobs if "_" in job_id} == {"0", "1", "2"}
    # A line that is being written, or is something else, is left out.
    assert (
        list(read_completed(["JobId=7 UserId=root(0) Name=cut off JobState=COMPL", "", "x"])) == []
    )


def test_a_name_may_look_like_anything():
    text = said("25.05", "jobs.txt").replace(
        "JobName=train it", "JobName=x JobState=FAILED NodeList=gpu09 Reason=no"
    )
    (job, _) = read_jobs(text)
    assert (job.state, job.nodes) == (JobState.RUNNING, ("gpu01",))
    assert job.name == "x JobState=FAILED NodeList=gpu09 Reason=no"
    (status, *_) = read_statuses(text)
    assert (status.name, status.state) == (job.name, JobState.RUNNING)


def test_no_jobs_are_no_error():
    assert read_jobs("No jobs in the system\n") == ()
    assert list(read_statuses("No jobs in the system\n")) == []
    assert read_jobs("") == ()


def test_cut_off_text_is_an_error_that_says_so():
    text = said("22.05", "jobs.txt")
    failures = 0
    for at in range(20, 1500, 7):
        try:
            jobs = read_jobs(text[:at])
        except ClusterError as e:
            failures += 1
            assert "cannot be read" in str(e)  # noqa: PT017 - it is not raised at all places
        else:
            assert len(jobs) <= 2
    assert failures > 50
