"""`headrace cluster` on a real Slurm of four nodes with two GPUs each: run, batch, queue, init."""

import json
import os
import pty
import re
import subprocess
import sys
import time

import pytest

from tests_shared import until

PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()", "cluster"]


@pytest.fixture
def cluster(slurm, tmp_path, monkeypatch):
    """Runs `headrace cluster` where it finds the real Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words, code=0, text=None):
        ended = subprocess.run(
            [*PROGRAM, *map(str, words)],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        return ended

    return run


def submitted(ended):
    return re.fullmatch(r"Submitted batch job (\d+)\n", ended.stdout)[1]


SCRIPT = """#!/bin/bash
#SBATCH --output=out.txt
echo "on $SLURMD_NODENAME of $SLURM_JOB_NODELIST as $SLURM_JOB_NAME with $1"
srun bash -c 'echo "$SLURM_PROCID on $SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES"'
cat <<'EOF'
   kept: "ü" $HOME
EOF
"""


@pytest.mark.parametrize(
    ("gpus", "tasks"),
    [
        (2, ["0 on node0 sees 0,1", "1 on node0 sees 0,1"]),
        (4, ["0 on node0 sees 0,1", "1 on node0 sees 0,1", "2 on node1 sees 0,1", "3 on node1 sees 0,1"]),
        (3, ["0 on node0 sees 0", "1 on node0 sees 1", "2 on node1 sees 0"]),
    ],
)  # fmt: skip
def test_a_script_on_the_gpus_that_are_asked_for(cluster, slurm, tmp_path, gpus, tasks):
    (tmp_path / "my job.sh").write_text(SCRIPT)
    job = submitted(cluster("batch", "--gpus", gpus, "my job.sh", "a b"))
    assert slurm.wait_for_job(job) == "COMPLETED"
    lines = (tmp_path / "out.txt").read_text().splitlines()
    names = {2: "node0", 3: "node[0-1]", 4: "node[0-1]"}[gpus]
    assert lines[0] == f"on node0 of {names} as my job.sh with a b"
    assert sorted(lines[1 : 1 + gpus]) == tasks
    assert lines[-1] == '   kept: "ü" $HOME'


def test_what_dry_run_prints_is_what_runs(cluster, slurm, tmp_path):
    (tmp_path / "job.sh").write_text(SCRIPT)
    printed = cluster("batch", "--gpus", 2, "--dry-run", "job.sh")
    assert printed.stderr == "command: sbatch --parsable\n"
    assert slurm.command("squeue", "--noheader") == ""
    job = submitted(cluster("batch", "--gpus", 2, "job.sh"))
    kept = slurm.command("scontrol", "write", "batch_script", job, "-")
    assert kept.rstrip("\0\n") == printed.stdout.rstrip("\n")
    slurm.wait_for_job(job)


def test_the_snapshot_is_the_clusters_own(cluster):
    data = json.loads(
        cluster("batch", "--gpus", 8, "--dry-run", "--json", "-", text="#!/bin/sh\ntrue\n").stdout
    )
    assert data["layout"]["nodes"] == 4
    assert data["layout"]["gpus_per_node"] == 2
    assert data["layout"]["cpus_per_task"] == 4
    refused = cluster("batch", "--gpus", 9, "-", code=3, text="#!/bin/sh\ntrue\n")
    assert "4 nodes with GPUs, up to 2 each" in refused.stderr
    assert "--gpus 8" in refused.stderr
    assert (
        "Did you mean debug?"
        in cluster("batch", "-g1", "-p", "debgu", "-", code=3, text="#!/bin/sh\n").stderr
    )


def test_arrays_dependencies_and_the_queue(cluster, slurm, tmp_path):
    (tmp_path / "job.sh").write_text(
        "#!/bin/sh\necho $SLURM_ARRAY_TASK_ID > task.$SLURM_ARRAY_TASK_ID\n"
    )
    first = submitted(
        cluster("batch", "--gpus", 1, "--array", "1-3", "--slurm=--begin=now+1hour", "job.sh")
    )
    second = submitted(
        cluster("batch", "--gpus", 8, "-d", f"afterok:{first}", "-J", "later", "job.sh")
    )
    why = {second: "waits for another job", f"{first}_[1-3]": "its time to begin has not come"}

    def queue():
        board = json.loads(cluster("queue", "--json").stdout)
        return board, {row["job"]: row for row in board["waiting"]}

    # Slurm names no reason before its scheduler has looked at a job.
    assert until(lambda: {job: row["why"] for job, row in queue()[1].items()} == why)
    board, waiting = queue()
    assert board["running"] == []
    assert waiting[second]["gpus"] == 8
    assert board["totals"]["waiting"] == 4
    slurm.command("scontrol", "update", f"jobid={first}", "starttime=now")
    assert slurm.wait_for_job(second) == "COMPLETED"
    assert sorted(p.name for p in tmp_path.glob("task.?")) == ["task.1", "task.2", "task.3"]


def test_the_queue_shows_real_gpu_numbers(cluster, slurm, tmp_path):
    one = slurm.sbatch("#!/bin/sh\nsleep 60\n", "--gres=gpu:1", "-J", "one", "--nodelist=node2")
    slurm.wait_for_job(one, "RUNNING")
    two = slurm.sbatch("#!/bin/sh\nsleep 60\n", "--gres=gpu:1", "-J", "two", "--nodelist=node2")
    slurm.wait_for_job(two, "RUNNING")
    slurm.command("scancel", one)
    slurm.wait_for_job(one)
    until(lambda: json.loads(cluster("queue", "--json").stdout)["totals"]["gpus_used"] == 1, 10)
    board = json.loads(cluster("queue", "--node", "node2", "--json", "--save", "seen.json").stdout)
    assert board["nodes"][0]["gpu_jobs"] == [None, two]
    assert board["running"][0]["gpu_indices"] == {"node2": [1]}
    shown = cluster("queue", "--from", "seen.json").stdout
    assert re.search(r"^node2 +mixed +·1 h100", shown, re.MULTILINE)
    assert re.search(rf"^{two} .* node2\[1\]", shown, re.MULTILINE)


def test_a_command_in_the_foreground_runs_once_and_ends_as_it_ends(cluster):
    ended = cluster(
        "run",
        "--gpus",
        4,
        "--",
        "sh",
        "-c",
        "echo one; srun sh -c 'echo $SLURM_PROCID'; exit 7",
        code=7,
    )
    lines = ended.stdout.split()
    assert lines[0] == "one"
    assert sorted(lines[1:]) == ["0", "1", "2", "3"]
    assert "4 GPUs on 2 nodes of main, 4 CPUs a task" in ended.stderr


def test_a_shell_has_a_terminal(slurm, tmp_path, monkeypatch):
    """As a user types: the prompt's shell sees the job, and its exit gives the nodes back."""
    monkeypatch.setenv("PS1", "$ ")
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [*PROGRAM, "run", "--gpus", "2"])
    said = b""

    def read_until(text):
        nonlocal said
        deadline = time.monotonic() + 30
        while text not in said:
            assert time.monotonic() < deadline, said
            try:
                said += os.read(fd, 4096)
            except OSError:
                break
        assert text in said, said

    try:
        read_until(b"Granted job allocation")
        os.write(fd, b'test -t 0 && echo "gpus=$SLURM_GPUS_ON_NODE:" tty$((40+2))\n')
        read_until(b"gpus=2: tty42")
        os.write(fd, b"exit 3\n")
        read_until(b"Relinquishing")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    finally:
        os.close(fd)
    assert until(lambda: slurm.command("squeue", "--noheader") == "", 20)


def test_a_command_that_is_interrupted_gives_its_nodes_back(slurm, tmp_path):
    process = subprocess.Popen(
        [*PROGRAM, "run", "--gpus", "2", "--", "sleep", "100"], stderr=subprocess.DEVNULL
    )
    assert until(
        lambda: slurm.command("squeue", "--noheader", "--format=%T").strip() == "RUNNING", 20
    )
    process.terminate()
    process.wait(20)
    assert until(lambda: slurm.command("squeue", "--noheader") == "", 20)


def test_init_writes_a_file_that_holds(cluster, tmp_path):
    cluster("init")
    text = (tmp_path / "config/headrace/site.yaml").read_text()
    assert "cluster: lab" in text
    assert "#     4 x 2 h100, 8 CPUs, 16 GiB" in text
    (tmp_path / "config/headrace/site.yaml").write_text(text + 'cpus_per_gpu: 3\ntime: "20"\n')
    printed = cluster("batch", "-g", 2, "--dry-run", "-", text="#!/bin/sh\ntrue\n").stdout
    assert "#SBATCH --cpus-per-task=3\n" in printed
    assert "#SBATCH --time=00:20:00\n" in printed
    assert "is there already" in cluster("init", code=3).stderr


def test_a_script_from_windows_runs(cluster, slurm, tmp_path):
    (tmp_path / "w.sh").write_bytes(b"#!/bin/bash\r\n#SBATCH -o out.txt\r\necho fine\r\n")
    ended = cluster("batch", "-g", 1, "w.sh")
    assert "lines end as on Windows" in ended.stderr
    assert slurm.wait_for_job(submitted(ended)) == "COMPLETED"
    assert (tmp_path / "out.txt").read_text() == "fine\n"


def test_a_script_of_another_program_runs_behind_its_environment(cluster, slurm, tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").write_text("export FROM_VENV=yes\n")
    body = "import os, sys\nprint(os.environ['FROM_VENV'], sys.argv[1:])\n"
    text = f"#!/usr/bin/env python3\n#SBATCH -o out.txt\n{body}"
    (tmp_path / "job.py").write_text(text)
    job = submitted(cluster("batch", "-g", 1, "--venv", tmp_path / "venv", "job.py", "a b"))
    assert slurm.wait_for_job(job) == "COMPLETED"
    assert (tmp_path / "out.txt").read_text() == "yes ['a b']\n"


def test_without_a_controller_the_error_says_so(cluster, slurm, tmp_path):
    slurm.stop_controller()
    for words in (("queue",), ("batch", "-g", 1, "-"), ("init", "-o", "-")):
        ended = cluster(*words, code=3, text="#!/bin/sh\ntrue\n")
        assert "slurmctld" in ended.stderr
        assert "Traceback" not in ended.stderr
