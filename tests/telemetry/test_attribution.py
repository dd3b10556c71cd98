"""Which job a process belongs to: by control group, by environment, and by neither."""

import os
import subprocess
import sys
import time

import pytest

from headrace.base.job import JobIdentity, clean, identity_of, local_ranks_of
from headrace.telemetry.processes import (
    Processes,
    environment_of,
    job_groups,
    job_of_group,
    job_of_groups,
)
from tests_shared import until


@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("/slurm/uid_1000/job_17/step_0/task_0", "17"),
        ("/slurm_node3/uid_0/job_17", "17"),
        ("/system.slice/slurmstepd.scope/job_4711/step_batch/user/task_0", "4711"),
        ("/system.slice/node3_slurmstepd.scope/job_4711/step_extern", "4711"),
        ("/user.slice/user-1000.slice/job_17", ""),
        ("/slurm/uid_1000/job_x17", ""),
        ("/slurm/uid_1000/job_", ""),
        ("/job_17/slurm/uid_0", ""),
        ("/", ""),
        ("", ""),
    ],
)
def test_the_job_of_a_control_group(path, job):
    assert job_of_group(path) == job


def test_the_job_of_a_processs_groups_of_both_versions():
    assert job_of_groups("5:cpu,cpuacct:/slurm/uid_1/job_9/step_0\n0::/user.slice\n") == "9"
    assert job_of_groups("0::/system.slice/slurmstepd.scope/job_9/step_0/user\n") == "9"
    assert job_of_groups("nonsense\n::\n") == ""


def test_an_identity_out_of_slurms_words():
    assert identity_of(
        {
            "SLURM_JOB_ID": "4712", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "1",
            "SLURM_JOB_NAME": "train", "SLURM_JOB_USER": "ann", "SLURM_JOB_ACCOUNT": "physics",
            "SLURM_JOB_GPUS": "0,2-3", "SLURM_CPUS_ON_NODE": "16", "SLURM_RESTART_COUNT": "2",
            "SLURMD_NODENAME": "node3",
        }
    ) == JobIdentity(
        job_id="4712", alias="4711_1", name="train", user="ann", account="physics", gpus=3,
        gpu_indices=(0, 2, 3), cpus=16, restarts=2, node="node3",
    )  # fmt: skip
    assert identity_of({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({"HEADRACE_JOB_GPUS_PER_NODE": "4"}, 4),
        ({"HEADRACE_JOB_GPUS_PER_NODE": "4", "HEADRACE_JOB_GPUS": ""}, 0),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "0,1,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"SLURM_JOB_GPUS": "3-1"}, 0),
        ({"SLURM_JOB_GPUS": "0-99999999999999"}, 0),
        ({"SLURM_GPUS_ON_NODE": "1e9"}, 0),
        ({}, 0),
    ],
)
def test_how_many_gpus_a_job_has_here(environment, gpus):
    identity = identity_of({"HEADRACE_JOB_ID": "1"} | environment)
    assert identity is not None
    assert identity.gpus == gpus


def test_hostile_names_are_bounded_and_printable():
    nasty = "\x1b[2J<script>\udc80" + "x" * 500
    identity = identity_of({"HEADRACE_JOB_ID": nasty, "HEADRACE_JOB_NAME": "\n\r\0"})
    assert identity is not None
    assert identity.job_id.isprintable()
    assert len(identity.job_id) <= 128
    assert identity.name == "???"
    assert clean("a\u202eb") == "a?b"


def test_local_ranks():
    assert local_ranks_of({"LOCAL_WORLD_SIZE": "4", "SLURM_STEP_TASKS_PER_NODE": "1"}) == 4
    assert local_ranks_of({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}) == 2
    assert local_ranks_of({"LOCAL_WORLD_SIZE": "many"}) == 0


def test_an_environment_may_hold_anything():
    block = b"A=1\0=2\0B\0A=3\0C=\xff=x\0" + b"\0" * 9
    assert environment_of(block.decode(errors="replace")) == {"A": "1", "C": "\ufffd=x"}


@pytest.fixture
def child():
    """Starts processes with an environment of their own, which spin until they are ended."""
    started = []

    def start(code="import time; time.sleep(60)", **environment):
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HEADRACE"))}
        process = subprocess.Popen([sys.executable, "-c", code], env=own | environment)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_processes_are_found_by_their_environment_and_what_they_use_is_added_up(child):
    from pathlib import Path

    spin = "x = 0\nwhile True: x += 1"
    before = os.times().elapsed
    processes = [child(spin, HEADRACE_JOB_ID="job-a", HEADRACE_JOB_NAME="n") for _ in range(2)]
    child(HEADRACE_JOB_ID="job-b")
    child()
    looks = Processes(Path("/"), "job-a")
    until(lambda: len(looks.look().get("job-a", EMPTY).pids) == 2)

    def at_work():
        """A look at which they had used something since the one before, and had their memory."""
        use = (jobs := looks.look())["job-a"].use
        return jobs if use.cpu_s > 0 and use.memory_bytes > 1e6 else None

    jobs = until(at_work)
    assert set(jobs) == {"job-a"}
    job = jobs["job-a"]
    assert job.pids == {process.pid for process in processes}
    assert job.identity.name == "n"
    assert looks.job_of(processes[0].pid) == "job-a"
    assert 0.0 < job.use.cpu_s <= 2 * (os.times().elapsed - before) + 0.5
    assert job.use.memory_bytes > 1e6
    assert abs(job.began_s - time.time()) < 60


class EMPTY:
    pids = frozenset()


def test_a_job_that_vanishes_between_looks_is_gone_without_an_error(child):
    from pathlib import Path

    process = child(HEADRACE_JOB_ID="short")
    looks = Processes(Path("/"), "short")
    until(lambda: "short" in looks.look())
    process.kill()
    process.wait()
    assert looks.look() == {}
    assert looks.job_of(process.pid) == ""


def test_another_process_under_an_old_number_is_another(tmp_path):
    fields = "S 1 1 1 0 -1 0 0 0 0 0 {cpu} 0 0 0 20 0 1 0 {began} 1000 50 0 0 0\n"
    folder = tmp_path / "proc/42"
    folder.mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("btime 1000\n")
    (folder / "stat").write_text("42 (a) b) " + fields.format(cpu=500, began=100))
    (folder / "environ").write_bytes(b"HEADRACE_JOB_ID=one\0")
    looks = Processes(tmp_path)
    assert looks.look()["one"].use.cpu_s == pytest.approx(500 / os.sysconf("SC_CLK_TCK"))
    (folder / "stat").write_text("42 (b) " + fields.format(cpu=1, began=900))
    (folder / "environ").write_bytes(b"HEADRACE_JOB_ID=two\0")
    assert looks.look() == {}
    assert set(looks.look()) == {"two"}
    (folder / "stat").write_text("42 (")
    assert looks.look() == {}


def test_processes_of_other_nodes_on_the_same_machine_are_left_out(child):
    from pathlib import Path

    child(SLURM_JOB_ID="5", SLURMD_NODENAME="node1")
    mine = child(SLURM_JOB_ID="5", SLURMD_NODENAME="node0")
    looks = Processes(Path("/"), "5", "node0")
    until(lambda: "5" in looks.look())
    time.sleep(0.2)
    assert looks.look()["5"].pids == {mine.pid}


@pytest.mark.parametrize("version", [1, 2])
def test_slurms_control_groups_tell_of_whole_jobs(tmp_path, version):
    mount = tmp_path / "sys/fs/cgroup"
    if version == 2:
        job = mount / "system.slice/node3_slurmstepd.scope/job_17"
        files = {
            "cpu.stat": "usage_usec 2500000\nuser_usec 1\n", "memory.current": "9000\n",
            "memory.stat": "anon 1\ninactive_file 4000\n",
            "io.pressure": "some avg10=0.00 total=3000000\nfull total=1\n",
        }  # fmt: skip
        (job / "step_0").mkdir(parents=True)
        for name, text in files.items():
            (job / name).write_text(text)
        use = job_groups(tmp_path)["17"]
        assert use.io_pressure_s == 3.0
    else:
        for controller, files in (
            ("cpuacct", {"cpuacct.usage": "2500000000\n"}),
            ("memory", {"memory.usage_in_bytes": "9000\n",
                        "memory.stat": "total_inactive_file 4000\n"}),
        ):  # fmt: skip
            job = mount / controller / "slurm/uid_1000/job_17"
            job.mkdir(parents=True)
            for name, text in files.items():
                (job / name).write_text(text)
        use = job_groups(tmp_path)["17"]
        assert use.io_pressure_s is None
    assert use.cpu_s == 2.5
    assert use.memory_bytes == 5000
