"""`headrace cluster` without Slurm: the same scripts and commands as processes of this machine."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cluster.executor import executor
from tests_shared import until

PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()", "cluster"]


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Runs `headrace cluster` with the local executor, its jobs in a folder of the test's."""
    monkeypatch.setenv("HEADRACE_EXECUTOR", "local")
    monkeypatch.setenv("HEADRACE_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)

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


SCRIPT = """#!/bin/bash
#SBATCH --output=out-%j.txt
#HEADRACE --job-name=mine
echo "$HEADRACE_JOB_NAME has $HEADRACE_JOB_GPUS_PER_NODE on $HEADRACE_JOB_NODES with $1"
"""


def test_a_script(local, tmp_path):
    (tmp_path / "job.sh").write_text(SCRIPT)
    ended = local("batch", "--gpus", 4, "job.sh", "a b")
    job = re.fullmatch(r"Submitted batch job (\S+)\n", ended.stdout)[1]
    runs_jobs = executor("local")
    status = runs_jobs.wait([job], 30)[job][0]
    assert (status.state, status.name, status.exit_code) == ("COMPLETED", "mine", 0)
    said = (tmp_path / f"out-{job}.txt").read_text()
    assert re.fullmatch(r"mine has 4 on \S+ with a b\n", said)
    if "no GPUs" in ended.stderr:
        assert "the 4 asked for are processes here" in ended.stderr


def test_the_queue_shows_them(local, tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.05; done\n")
    first = local("batch", "-g", 1, "-J", "first", "job.sh").stdout.split()[-1]
    second = local("batch", "-g", 1, "-d", f"afterok:{first}", "job.sh").stdout.split()[-1]
    try:
        board = json.loads(local("queue", "--json").stdout)
        assert [(row["job"], row["name"]) for row in board["running"]] == [(first, "first")]
        assert [(row["job"], row["why"]) for row in board["waiting"]] == [
            (second, "waits for another job")
        ]
        assert board["nodes"][0]["jobs"] == [first]
        assert board["nodes"][0]["cpus_allocated"] >= 1
        shown = local("queue").stdout
        assert "first" in shown
        assert all(line == line.rstrip() for line in shown.splitlines())
        assert ("GPU" in shown) == bool(board["totals"]["gpus"])
    finally:
        (tmp_path / "go").touch()
    executor("local").wait([first, second], 30)
    assert json.loads(local("queue", "--json").stdout)["totals"]["running"] == 0


def test_jobs_of_other_folders_are_shown_with_their_folder(local, tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "other").mkdir()
    jobs = [local("batch", "-D", folder, "job.sh").stdout.split()[-1] for folder in (".", "other")]
    executor("local").wait(jobs, 30)
    here, other = (line.split()[2] for line in local("status").stdout.splitlines()[1:])
    assert (here, other[-6:]) == (".", "/other")
    assert "FOLDER" not in local("status", jobs[0]).stdout
    known = json.loads(local("status", "--json").stdout)["jobs"]
    assert [Path(job["folder"]) for job in known] == [tmp_path, tmp_path / "other"]


def test_of_jobs_that_are_over_the_last_ones_are_shown(local, tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")
    jobs = [local("batch", "job.sh").stdout.split()[-1] for _ in range(12)]
    local("wait", *jobs)
    everything = local("status", "--all")
    assert [line.split()[0] for line in everything.stdout.splitlines()[1:]] == jobs
    assert len(json.loads(local("status", "--json").stdout)["jobs"]) == len(jobs)
    shown = local("status")
    lines = [line.split()[0] for line in shown.stdout.splitlines()[1:]]
    assert len(lines) == 10
    assert set(lines) < set(jobs)
    assert "2 more ended before: headrace cluster status --all" in shown.stderr
    assert len(local("status", *jobs).stdout.splitlines()) == 13


def test_status_and_queue_name_the_same_nodes_and_no_more_cpus_than_there_are(local, tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.05; done\n")
    begun = local("batch", "--nodes", 2, "--cpus", len(os.sched_getaffinity(0)), "job.sh")
    assert f"the nodes, {socket.gethostname()}-[0-1], are all this machine." in begun.stderr
    job = begun.stdout.split()[-1]
    try:
        status = executor("local").status([job])[job][0]
        board = json.loads(local("queue", "--json").stdout)
        (row,), (node,) = board["running"], board["nodes"]
        assert row["nodes"] == list(status.nodes) == [f"{node['name']}-{i}" for i in range(2)]
        assert row["cpus"] == node["cpus"] == node["cpus_allocated"]
        assert node["jobs"] == [job]
        assert (
            len(json.loads(local("queue", "--json", "--node", node["name"]).stdout)["running"]) == 1
        )
    finally:
        (tmp_path / "go").touch()
    executor("local").wait([job], 30)


def test_an_array_of_a_script_from_windows(local, tmp_path):
    text = "#!/bin/sh\r\n#SBATCH -o out.%a\r\necho task\r\n"
    ended = local("batch", "-g", 1, "-a", "0-2", "-", text=text)
    job = ended.stdout.split()[-1]
    assert {s.state for s in executor("local").wait([job], 30)[job]} == {"COMPLETED"}
    assert [(tmp_path / f"out.{i}").read_text() for i in range(3)] == ["task\n"] * 3


def test_several_nodes_are_all_this_machine(local):
    ended = local(
        "run",
        "--gpus",
        8,
        "--nodes",
        4,
        "--",
        "sh",
        "-c",
        "env | grep ^HEADRACE_JOB_ | sort; exit 5",
        code=5,
    )
    told = dict(line.split("=", 1) for line in ended.stdout.splitlines())
    assert told["HEADRACE_JOB_NODES"] == ",".join(f"{socket.gethostname()}-{i}" for i in range(4))
    assert told["HEADRACE_JOB_GPUS_PER_NODE"] == told["HEADRACE_JOB_TASKS_PER_NODE"] == "2"
    assert told["HEADRACE_JOB_NAME"] == "sh"


def test_a_command_that_is_not_there(local):
    assert "no-such-program" in local("run", "-g", 1, "--", "no-such-program", code=3).stderr


def test_a_command_in_its_environment_and_folder(local, tmp_path):
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/activate").write_text("export FROM=venv\n")
    (tmp_path / "there").mkdir()
    ended = local(
        "run",
        "-g",
        1,
        "--venv",
        tmp_path / "env",
        "-D",
        "there",
        "--",
        "sh",
        "-c",
        "echo $FROM; pwd",
    )
    assert ended.stdout.split() == ["venv", str(tmp_path / "there")]


def test_a_shell_has_a_terminal(local, tmp_path):
    """As a user types it; Ctrl-C reaches what runs in the shell, not the shell."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*PROGRAM, "run", "--gpus", "2"])
    said = b""

    def read_until(text):
        nonlocal said
        deadline = time.monotonic() + 30
        while text not in said:
            assert time.monotonic() < deadline, said
            said += os.read(fd, 4096)

    try:
        os.write(
            fd,
            b"test -t 0 && echo gpus=$HEADRACE_JOB_GPUS_PER_NODE tty$((40+2)); sleep 100; echo st$((1))ll\n",
        )
        read_until(b"gpus=2 tty42")
        time.sleep(0.2)
        os.write(fd, b"\x03")
        os.write(fd, b"echo aga$((1))n; exit 4\n")
        read_until(b"aga1n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    finally:
        os.close(fd)


def test_what_ends_the_command_ends_it_whole(local):
    process = subprocess.Popen(
        [*PROGRAM, "run", "-g", "1", "--", "sleep", "100"], stderr=subprocess.PIPE, text=True
    )
    words = Path(f"/proc/{process.pid}/cmdline")
    assert until(lambda: words.read_bytes().startswith(b"sleep"), 20)
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    process.stderr.close()


def test_without_sbatch_it_says_that_this_machine_runs_it(local, monkeypatch):
    monkeypatch.delenv("HEADRACE_EXECUTOR")
    monkeypatch.setenv("PATH", "/nowhere")
    ended = local("run", "-g", 1, "--dry-run", "--", "true")
    assert "there is no Slurm here (no sbatch): this machine runs it" in ended.stderr
    assert ended.stdout == "true\n"
