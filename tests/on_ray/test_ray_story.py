"""Jobs on a real Ray, by the commands that they have on Slurm; the first one's story is `cluster.story`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.launch.launching import MARK, Launch, processes_with
from cluster.story import check_page, tell
from tests_shared import until

PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()"]


@pytest.fixture
def run(ray_cluster, tmp_path, monkeypatch):
    """Runs `headrace`, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def call(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [*PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=300, check=False
        )
        assert ended.returncode == code, ended.stderr + ended.stdout
        assert "Traceback" not in ended.stderr
        return ended

    return call


def test_the_story_of_a_job_on_ray(ray_cluster, tmp_path, request):
    launch = Launch(tmp_path)
    log = tell("ray", launch, ray_cluster.kill_node)
    check_page("ray", log, tmp_path, request.config)


def test_a_job_of_ray_that_is_cancelled_leaves_nothing(run, tmp_path):
    launch = Launch(tmp_path)
    Path("job.sh").write_text(
        f"#!/bin/bash\nexport {MARK}={launch.mark}\n"
        f"{shlex.join(PROGRAM)} launch --framework plain --local {launch.disk} --no-agent --no-daemon "
        "sh -c 'touch began.$RANK; sleep 300'\n"
    )
    job = run("cluster", "batch", "--nodes", 2, "--tasks-per-node", 1, "job.sh").stdout.split()[-1]
    assert until(lambda: len(list(tmp_path.glob("began.*"))) == 2, 90.0)
    run("cluster", "cancel", job)
    assert "cancelled" in run("cluster", "wait", job, code=1).stdout
    assert until(lambda: not processes_with(launch.mark), 15.0), processes_with(launch.mark)
    assert "Submitted batch job" in run("cluster", "resubmit", job).stdout


def test_a_job_of_ray_whose_launch_failed_says_which_rank_did(run):
    launch = f"{shlex.join(PROGRAM)} launch --framework plain --no-agent --no-daemon"
    Path("job.sh").write_text(f"#!/bin/bash\n{launch} sh -c 'exit 9'\n")
    job = run("cluster", "batch", "--nodes", 1, "job.sh").stdout.split()[-1]
    (status,) = json.loads(run("cluster", "wait", job, "--json", code=1).stdout)["jobs"]
    assert status["why"] == f"rank 0 (node {status['nodes'][0]}) ended with status 9"


def test_a_job_that_may_have_fewer_nodes_goes_on_at_once_with_those_left(
    run, ray_cluster, tmp_path
):
    launch = Launch(tmp_path)
    Path("job.sh").write_text(
        f"#!/bin/bash\nexport {MARK}={launch.mark}\n"
        f"{shlex.join(PROGRAM)} launch --framework plain --nodes 2-3 --local {launch.disk} --no-agent "
        "--no-daemon sh -c 'touch began.$WORLD_SIZE.$RANK; test $WORLD_SIZE = 2 || sleep 300'\n"
    )
    words = ("--nodes", 3, "--tasks-per-node", 1, "-o", "out.txt", "job.sh")
    job = run("cluster", "batch", *words).stdout.split()[-1]
    assert until(lambda: len(list(tmp_path.glob("began.3.*"))) == 3, 90.0)
    nodes = json.loads(run("cluster", "status", job, "--json").stdout)["jobs"][0]["nodes"]
    ray_cluster.kill_node(nodes[1])
    assert "completed" in run("cluster", "wait", job, "--timeout-s", 120).stdout
    assert len(list(tmp_path.glob("began.2.*"))) == 2
    assert f"node {nodes[1]} is lost" in Path("out.txt").read_text()
    assert until(lambda: not processes_with(launch.mark), 15.0), processes_with(launch.mark)


def test_a_command_in_the_foreground_ends_as_it_does_on_ray(run):
    ended = run(
        "cluster",
        "run",
        "--nodes",
        1,
        "--",
        "sh",
        "-c",
        "echo $HEADRACE_JOB_SCHEDULER; exit 3",
        code=3,
    )
    assert ended.stdout == "ray\n"


def test_a_function_is_a_job_of_ray(run, tmp_path):
    Path("call.py").write_text(
        "import sys\nimport headrace as hr\n\n"
        "def square(x):\n    return x * x\n\n"
        "if __name__ == '__main__':\n"
        "    jobs = hr.cluster.map_array(square, [3, 4], time='5m')\n"
        "    print([job.result(timeout_s=90) for job in jobs])\n"
    )
    ended = subprocess.run(
        [sys.executable, "call.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == "[9, 16]\n", ended.stderr
