"""Real Slurm jobs with injected waste: what they had, used and wasted is told within 2 percent of the truth.

The truth is measured by the job's own program, from /proc, and by prolog and epilog, with the clock. The GPUs
are a fake source, and called so: an NVML whose GPUs do what this test says. The agent looks every 5 seconds, so
that only what prolog and epilogs tell it can make a job of 10 seconds right.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cluster.slurm import Slurm, missing
from headrace.cluster.site_files import slurm_files
from headrace.telemetry.messages import ask_state
from tests_shared import until

CPUS, MEMORY_MIB, GPUS = 4, 8000, 2
CPU_SHARE, MEMORY_SHARE, GPU_BUSY = 0.10, 0.05, 60
SECONDS = 10

FAKE_GPUS = f"""
# A fake of NVML: not a driver, and no GPUs.
from telemetry.fake_nvml import FakeNVML

_fake = FakeNVML(dict(busy={GPU_BUSY}, memory=8 << 30, pids=[]), dict(busy=0, memory=0, pids=[]))
globals().update({{name: getattr(_fake, name) for name in dir(_fake) if name.startswith("nvml")}})
"""

PROGRAM = f"""
import json, os, sys, time

def kib(pid):
    with open(f"/proc/{{pid}}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

def cpu_s(pid):
    with open(f"/proc/{{pid}}/stat") as stat:
        return sum(map(int, stat.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

held = bytearray(b"x") * int({MEMORY_MIB} * {MEMORY_SHARE} * (1 << 20))
end = time.monotonic() + {SECONDS}
while (left := end - time.monotonic()) > 0:
    # What starting up took counts, too. A busy machine may give less.
    if time.process_time() >= {CPUS} * {CPU_SHARE} * ({SECONDS} - left):
        time.sleep(0.02)
rss = (kib("self") + kib(os.getppid())) << 10
del held  # that takes time, too
with open(sys.argv[1], "w") as file:
    json.dump({{"cpu_s": cpu_s("self") + cpu_s(os.getppid()), "memory_bytes": rss}}, file)
"""

WRAPPED = """#!/bin/bash
export HEADRACE_AGENT={folder}/rt-$SLURMD_NODENAME-agent/socket
echo $EPOCHREALTIME > {folder}/$SLURM_JOB_ID.$SLURM_SCRIPT_CONTEXT
exec {folder}/headrace-job
"""


def near(value):
    """Within 2 percent."""
    return pytest.approx(value, rel=0.02)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes whose prolog and epilogs tell an agent of jobs; on the first of them there is one."""
    if lacks := missing():
        pytest.skip(f"no {', '.join(lacks)}")
    folder = Path(tempfile.mkdtemp(prefix="headrace-use-"))
    wrapper = folder / "notice"
    settings = {name: str(wrapper) for name in ("Prolog", "Epilog", "TaskEpilog")}
    # The agent sees the jobs of other clusters of this machine, too.
    settings |= {"PrologFlags": "Alloc", "FirstJobId": str(100_000 + os.getpid() * 10)}
    (folder / "fake").mkdir()
    (folder / "fake/pynvml.py").write_text(FAKE_GPUS)
    (folder / "use.py").write_text(PROGRAM)
    wrapper.write_text(WRAPPED.format(folder=folder))
    wrapper.chmod(0o755)
    folder.chmod(0o755)
    agent = None
    try:
        with Slurm(folder / "s", nodes=2, gpus=GPUS, settings=settings) as slurm:
            write_notices(folder)
            agent = start_agent(slurm, folder, "node0")
            yield slurm, folder
    finally:
        if agent is not None and agent.poll() is None:
            agent.kill()
            agent.wait()
        shutil.rmtree(folder, ignore_errors=True)


def write_notices(folder):
    facts = type("Facts", (), {"cluster": "lab"})()
    for name, text in slurm_files(facts).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def environment(slurm, folder, node):
    tests = str(Path(__file__).parents[1])
    own = {k: v for k, v in slurm.environment.items() if not k.startswith("HEADRACE")}
    return {
        **own, "HEADRACE_RUNTIME_DIR": str(folder / f"rt-{node}"),
        "HEADRACE_HISTORY": str(folder / "history"), "COLUMNS": "80", "NO_COLOR": "1",
        "PYTHONPATH": os.pathsep.join([str(folder / "fake"), tests]),
    }  # fmt: skip


def start_agent(slurm, folder, node, *, named=True):
    own = environment(slurm, folder, node) | ({"HEADRACE_NODE": node} if named else {})
    program = "from headrace.cli import main; main()"
    with (folder / f"agent-{node}.out").open("ab") as out:
        agent = subprocess.Popen(
            [sys.executable, "-c", program, "agent", "start", "--foreground"],
            env=own,
            stdout=out,
            stderr=out,
        )
    socket = folder / f"rt-{node}-agent/socket"
    until(socket.is_socket, 30)
    return agent


def cli(slurm, folder, *words, node="node0"):
    ended = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", *words],
        check=False, capture_output=True, text=True, timeout=60, env=environment(slurm, folder, node),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def clock(folder, job, context):
    return float((folder / f"{job}.{context}").read_text())


@pytest.fixture(scope="module")
def pairs():
    """Jobs that were run, and the truth of them; the last is what tests look at."""
    return []


@pytest.fixture
def jobs(cluster, pairs, request):
    """A job of ten seconds where an agent looks, and the same where none does; the first one's truth.

    Run anew for a test that is tried again: an agent that had no turn when they began or ended saw less.
    """
    if not pairs or getattr(request.node, "execution_count", 1) > 1:
        pairs.append(run_jobs(*cluster))
    return pairs[-1]


def run_jobs(slurm, folder):
    numbers = [
        slurm.sbatch(
            f"#!/bin/bash\n{sys.executable} {folder}/use.py {folder}/truth-$SLURMD_NODENAME.json\n",
            f"--nodelist={node}", f"--gpus-per-node={GPUS}", f"--mem={MEMORY_MIB}",
            f"--cpus-per-task={CPUS}", "--job-name=waster",
        )
        for node in ("node0", "node1")
    ]  # fmt: skip
    for job in numbers:
        assert slurm.wait_for_job(job) == "COMPLETED", slurm.said_of(job)
        until((folder / f"{job}.epilog_slurmd").exists, 20)
    truth = json.loads((folder / "truth-node0.json").read_text())
    truth["seconds"] = clock(folder, numbers[0], "epilog_slurmd") - clock(
        folder, numbers[0], "prolog_slurmd"
    )
    socket = folder / "rt-node0-agent/socket"
    until(lambda: numbers[0] not in ask_state(socket, written=True)["jobs"], 20)
    return numbers, truth


def booked_s(slurm, job):
    """How long Slurm's own list says that a job took: whole seconds."""
    completed = dict(
        part.split("=", 1)
        for line in (slurm.folder / "jobcomp.log").read_text().splitlines()
        if f"JobId={job} " in line
        for part in line.split()
        if "=" in part
    )
    begin, end = (
        time.mktime(time.strptime(completed[name], "%Y-%m-%dT%H:%M:%S"))
        for name in ("StartTime", "EndTime")
    )
    return end - begin


def test_a_job_of_ten_seconds_is_told_within_two_percent(cluster, jobs):
    slurm, folder = cluster
    (job, _), truth = jobs
    report = json.loads(cli(slurm, folder, "job-report", job, "--json"))
    assert report["cpu_s"] == near(truth["cpu_s"])
    assert report["seconds"] == near(truth["seconds"])
    assert report["cpu_use"] == near(truth["cpu_s"] / (CPUS * truth["seconds"]))
    assert report["memory_bytes"] == near(truth["memory_bytes"])
    assert report["memory_asked_bytes"] == MEMORY_MIB << 20
    assert report["memory_use"] == near(truth["memory_bytes"] / (MEMORY_MIB << 20))
    assert report["gpu_use"] == report["efficiency"] == near(GPU_BUSY / 100 / GPUS)
    assert report["gpu_memory_use"] == near((8 << 30) / (GPUS * 80 << 30))
    # The books count whole seconds: of 11 that they have, 10.4 were there to be seen. GPUs are not in them.
    seen = near(min(1.0, truth["seconds"] / booked_s(slurm, job)))
    assert (report["cpu_coverage"], report["memory_coverage"]) == (seen, seen)
    assert report["gpu_coverage"] == near(1.0)
    wasted = report["wasted_gpu_hours"]
    idle_s = GPUS * (1 - GPU_BUSY / 100 / GPUS) * truth["seconds"]
    # What of it waited for storage is inferred from the machine's pressure, which others make, too.
    assert (wasted["data"] + wasted["idle"]) * 3600 == near(idle_s)
    # It has all of the node's GPUs: none is kept from others.
    assert wasted["cpus"] == wasted["memory"] == 0
    advice = " ".join(report["advice"])
    assert "1 GPU: 1 of 2 never worked" in advice
    assert "--mem=1G" in advice
    text = cli(slurm, folder, "job-report", job)
    assert "next time" in text


def test_usage_agrees_with_the_books_and_withholds_what_nobody_saw(cluster, jobs, pairs):
    slurm, folder = cluster
    (seen, unseen), truth = jobs
    report = json.loads(cli(slurm, folder, "usage", "--from", "slurm", "--by", "job", "--json"))
    rows = {row["job_id"]: row for row in report["rows"]}
    assert rows[seen]["cpu_hours"] * 3600 == near(CPUS * booked_s(slurm, seen))
    assert rows[seen]["cpu_use"] == near(truth["cpu_s"] / (CPUS * truth["seconds"]))
    assert rows[seen]["efficiency"] == near(GPU_BUSY / 100 / GPUS)
    assert rows[unseen]["cpu_hours"] > 0
    assert rows[unseen]["cpu_coverage"] == 0
    assert rows[unseen]["efficiency"] is rows[unseen]["cpu_use"] is None
    for by, name in (("partition", "main"), ("user", "root"), ("hour", ":00")):
        table = cli(slurm, folder, "usage", "--from", "slurm", "--by", by, "--last", "2h")
        assert name in table or by == "user"
        assert max(map(len, table.splitlines())) <= 80, table
        count = f" {2 * len(pairs)} "
        cells = next(line for line in table.splitlines() if count in line).split()
        assert "-" in cells, table  # one of two jobs was seen
        assert "counts no GPUs" in " ".join(table.split())


def test_an_agent_that_cannot_know_its_name_says_so_and_whose_jobs_it_leaves_out(cluster):
    slurm, folder = cluster
    agent = start_agent(slurm, folder, "unnamed", named=False)
    try:
        job = slurm.sbatch("#!/bin/bash\nsleep 60\n", "--nodelist=node1")
        slurm.wait_for_job(job, "RUNNING")
        socket = folder / "rt-unnamed-agent/socket"
        assert "Slurm calls" in ask_state(socket)["node_why"]
        until(lambda: "node1" in ask_state(socket)["elsewhere"], 40)
        text = cli(slurm, folder, "agent", "status", node="unnamed")
        assert job not in ask_state(socket)["jobs"]
        assert "left out jobs of" in text
        assert "HEADRACE_NODE=NAME" in text
    finally:
        agent.terminate()
        agent.wait(20)
        slurm.cancel_all()
