"""The local executor's own: limits, requeue, killed keepers, restarts of everything; and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cluster.executor_tests import lives
from headrace.cluster import processes
from headrace.cluster.executor import JobState, Submission
from headrace.cluster.local.executor import LocalExecutor
from headrace.cluster.local.jobs import JobsFolder
from headrace.cluster.local.keeper import KEEPER_MARK
from headrace.errors import ClusterError, ClusterRequestError
from headrace.machine.host import start_time
from tests_shared import until


@pytest.fixture
def ex(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_LOCAL_GPUS", "2")
    made = LocalExecutor(tmp_path / "jobs")
    yield made
    # Whatever a test did: no keeper is left.
    assert until(lambda: not keepers(tmp_path)), keepers(tmp_path)


def keepers(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                said = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if KEEPER_MARK.encode() in said and str(folder).encode() in said:
                found.append(int(process.name))
    return found


def submit(ex: LocalExecutor, folder: Path, script: str, *options: str) -> str:
    text = f"#!/bin/bash\n{script}\n".encode()
    return ex.submit(Submission(text, options, directory=folder))


def end(ex, job):
    (status,) = ex.wait([job], 30)[job]
    return status


def pid_in(path: Path) -> int:
    assert until(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def test_a_job_that_is_too_long_is_ended_after_a_warning(ex, tmp_path):
    script = "trap 'echo warned' USR1; sleep 300 & echo $! >inner; while :; do wait; done"
    job = submit(ex, tmp_path, script, "--time=0:04", "--signal=B:USR1@0", "--output=o")
    ended = end(ex, job)
    assert ended.state == JobState.TIMEOUT
    assert ended.exit_code is None
    assert 3.9 < ended.ended_s - ended.started_s < 12
    assert not lives(pid_in(tmp_path / "inner"))


def test_the_warning_comes_in_time(ex, tmp_path):
    script = "trap 'echo saved; exit 0' USR1; while :; do sleep 0.05; done"
    job = submit(ex, tmp_path, script, "--time=1", "--signal=B:USR1@56")
    assert end(ex, job).state == JobState.COMPLETED
    assert b"".join(ex.logs(job)) == b"saved\n"


def test_what_ignores_sigterm_is_killed(ex, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_KILL_WAIT_S", "0.3")
    job = submit(ex, tmp_path, "trap '' TERM; echo $$ >me; while :; do sleep 0.05; done")
    pid = pid_in(tmp_path / "me")
    ex.cancel([job])
    assert end(ex, job).state == JobState.CANCELLED
    assert not lives(pid)


def test_what_a_script_leaves_behind_ends_with_it(ex, tmp_path):
    away = "setsid sh -c '(sleep 300 & echo $! >away)' </dev/null >/dev/null 2>&1 &"
    job = submit(ex, tmp_path, f"{away}\nuntil test -s away; do sleep 0.02; done")
    assert end(ex, job).state == JobState.COMPLETED
    assert not lives(pid_in(tmp_path / "away"))


def test_jobs_outlive_the_process_that_submitted_them(ex, tmp_path):
    program = f"""
        from pathlib import Path
        from headrace.cluster.executor import Submission
        from headrace.cluster.local.executor import LocalExecutor
        ex = LocalExecutor(Path({str(ex.jobs.path)!r}))
        where = Path({str(tmp_path)!r})
        print(ex.submit(Submission(b"#!/bin/sh\\nsleep 0.5; echo fine\\n", directory=where)), flush=True)
        import os, signal
        os.killpg(os.getpgid(0), signal.SIGKILL)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=False, capture_output=True, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    job = ended.stdout.strip()
    assert end(ex, job).state == JobState.COMPLETED
    assert b"".join(ex.logs(job)) == b"fine\n"


def test_a_killed_keeper_is_noticed_and_nothing_of_its_job_stays(ex, tmp_path):
    job = submit(ex, tmp_path, "setsid sleep 300 & echo $! >inner; echo $$ >outer; wait")
    inner, outer = pid_in(tmp_path / "inner"), pid_in(tmp_path / "outer")
    (keeper,) = keepers(tmp_path)
    os.kill(keeper, signal.SIGKILL)
    ended = end(ex, job)
    assert (ended.state, ended.reason) == (JobState.NODE_FAIL, "the keeper was killed")
    assert not lives(inner)
    assert not lives(outer)


def test_a_job_whose_keeper_was_killed_starts_again_if_it_may(ex, tmp_path):
    script = "echo $HEADRACE_JOB_RESTARTS >>runs; echo $$ >me; test $HEADRACE_JOB_RESTARTS = 1 || sleep 300"
    job = submit(ex, tmp_path, script, "--requeue")
    pid_in(tmp_path / "me")
    os.kill(keepers(tmp_path)[0], signal.SIGKILL)
    ended = end(ex, job)
    assert (ended.state, ended.restarts) == (JobState.COMPLETED, 1)
    assert (tmp_path / "runs").read_text() == "0\n1\n"


def test_exit_75_starts_a_job_again_if_it_may(ex, tmp_path):
    script = "echo run $HEADRACE_JOB_RESTARTS $HEADRACE_JOB_REQUEUE; test $HEADRACE_JOB_RESTARTS = 2 || exit 75"
    job = submit(ex, tmp_path, script, "--requeue", "--open-mode=append")
    assert (end(ex, job).state, end(ex, job).restarts) == (JobState.COMPLETED, 2)
    assert b"".join(ex.logs(job)) == b"run 0 1\nrun 1 1\nrun 2 1\n"
    other = submit(ex, tmp_path, "exit 75")
    assert (end(ex, other).state, end(ex, other).exit_code) == (JobState.FAILED, 75)


def test_a_signal_that_comes_before_the_script_reaches_it(ex, tmp_path):
    script = "#!/usr/bin/env python3\nimport signal\nprint(signal.sigwait([signal.SIGUSR1]), flush=True)\n"
    # Its parent blocks the signal for it: it may come before the script's first line.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        job = ex.submit(Submission(script.encode(), directory=tmp_path))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    ex.cancel([job], signal.SIGUSR1)
    assert end(ex, job).state == JobState.COMPLETED
    assert b"".join(ex.logs(job)) == b"10\n"


def test_gpus_are_given_one_by_one_and_waited_for(ex, tmp_path):
    script = (
        "echo $CUDA_VISIBLE_DEVICES >gpu.$HEADRACE_JOB_ID; until test -e go; do sleep 0.02; done"
    )
    jobs = [submit(ex, tmp_path, script, "--gpus=1") for _ in range(2)]
    third = submit(
        ex, tmp_path, "echo $CUDA_VISIBLE_DEVICES", "--gpus=8"
    )  # more than there are: all
    said = sorted(pid_in(tmp_path / f"gpu.{job}") for job in jobs)
    if os.cpu_count() > 1:
        assert said == [0, 1]
    assert [s.reason for s in ex.status([third])[third]] == ["Resources"]
    (tmp_path / "go").touch()
    assert end(ex, third).state == JobState.COMPLETED
    assert b"".join(ex.logs(third)) == b"0,1\n"
    ex.wait(jobs, 30)


def test_a_job_knows_what_it_was_given(ex, tmp_path):
    options = (
        "--nodes=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--gres=gpu:h100:2",
        "--time=5",
    )
    job = submit(
        ex, tmp_path, "env | grep ^HEADRACE_JOB_ | grep -v -e KEY -e END_S | sort", *options
    )
    assert end(ex, job).nodes == tuple(f"{socket.gethostname()}-{i}" for i in range(4))
    assert b"".join(ex.logs(job)).decode().splitlines() == [
        "HEADRACE_JOB_CPUS_PER_NODE=6",
        "HEADRACE_JOB_CPUS_PER_TASK=3",
        "HEADRACE_JOB_GPUS_PER_NODE=2",
        f"HEADRACE_JOB_ID={job}",
        "HEADRACE_JOB_NAME=sbatch",
        f"HEADRACE_JOB_NODES={socket.gethostname()}-[0-3]",
        "HEADRACE_JOB_NODE_INDEX=0",
        "HEADRACE_JOB_REQUEUE=0",
        "HEADRACE_JOB_RESTARTS=0",
        "HEADRACE_JOB_TASKS_PER_NODE=2",
    ]


def test_a_job_that_submits_another_does_not_take_it_along(ex, tmp_path):
    program = (
        "from pathlib import Path\nfrom headrace.cluster.executor import Submission\n"
        "from headrace.cluster.local.executor import LocalExecutor\n"
        f"ex = LocalExecutor(Path({str(ex.jobs.path)!r}))\n"
        "script = b'#!/bin/sh\\ntouch began; sleep 1; echo fine\\n'\n"
        "print(ex.submit(Submission(script, directory=Path.cwd())))\n"
    )
    (tmp_path / "submit.py").write_text(program)
    outer = submit(
        ex, tmp_path, f"{sys.executable} submit.py >inner; until test -e began; do sleep 0.02; done"
    )
    assert end(ex, outer).state == JobState.COMPLETED
    inner = (tmp_path / "inner").read_text().strip()
    assert end(ex, inner).state == JobState.COMPLETED
    assert b"".join(ex.logs(inner)) == b"fine\n"


def test_a_script_that_cannot_run_says_why(ex, tmp_path):
    job = ex.submit(Submission(b"#!/no/such/program\n", directory=tmp_path))
    ended = end(ex, job)
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 127)
    assert "No such file" in ended.reason
    job = submit(ex, tmp_path, "true", "--output=none/such/folder")
    assert "No such file" in end(ex, job).reason
    with pytest.raises(ClusterError, match="No such file"):
        list(ex.logs(job))


def test_crlf_and_other_mistakes_are_refused_with_what_to_do(ex, tmp_path):
    with pytest.raises(ClusterRequestError, match="CRLF"):
        ex.submit(Submission(b"#!/bin/sh\r\ntrue\r\n", directory=tmp_path))
    with pytest.raises(ClusterRequestError, match="is zero"):
        ex.submit(Submission(b"#!/bin/sh\n\0", directory=tmp_path))
    with pytest.raises(ClusterRequestError, match="no local job 99"):
        submit(ex, tmp_path, "true", "--dependency=afterok:99")
    with pytest.raises(ClusterRequestError, match="--begin is done by Slurm alone"):
        submit(ex, tmp_path, "true", "--begin=now+60")


def test_others_may_not_look_into_the_folder(ex, tmp_path):
    submit_and_end = submit(ex, tmp_path, "true")
    end(ex, submit_and_end)
    assert ex.jobs.path.stat().st_mode & 0o077 == 0
    ex.jobs.path.chmod(0o755)
    with pytest.raises(ClusterError, match=r"mode 0755(.|\n)*chmod 0700"):
        submit(ex, tmp_path, "true")


def test_a_damaged_state_is_an_error_that_names_it(ex, tmp_path):
    job = submit(ex, tmp_path, "true")
    end(ex, job)
    (ex.jobs.path / job / "state.json").write_text("{")
    with pytest.raises(ClusterError, match=r"state\.json"):
        ex.status([job])


def test_processes_below_one_are_found_and_signalled_by_when_they_began():
    with subprocess.Popen(["sh", "-c", "sleep 300 & wait"]) as process:
        assert until(lambda: len(processes.descendants(process.pid)) == 1)
        ((below, began),) = processes.descendants(process.pid).items()
        assert process.pid in processes.descendants(os.getpid())
        assert not processes.send(below, began + 1, signal.SIGKILL)  # another one of that number
        assert processes.send(below, began, signal.SIGKILL)
    assert start_time(below) is None
    assert not processes.send(below, began, signal.SIGKILL)  # gone: no error


def test_each_machine_has_its_own_jobs(tmp_path):
    assert JobsFolder.of_user({"HEADRACE_JOBS_DIR": "/a"}).path == Path("/a")
    state = JobsFolder.of_user({"XDG_STATE_HOME": str(tmp_path)}).path
    assert state == tmp_path / "headrace/jobs" / socket.gethostname()
    assert JobsFolder.of_user({}).path.is_relative_to(Path.home())


def test_no_two_folders_of_a_user_have_jobs_of_one_number(ex, tmp_path):
    other = LocalExecutor(tmp_path / "other")
    jobs = [submit(each, tmp_path, "true") for each in (ex, other, ex)]
    assert jobs == sorted(set(jobs), key=int)
    for each, job in zip((ex, other, ex), jobs, strict=True):
        end(each, job)


def test_old_jobs_are_forgotten(ex, tmp_path):
    job = submit(ex, tmp_path, "true")
    end(ex, job)
    over = ex.jobs.path / job / "over"
    assert until(over.exists)
    os.utime(over, (0, 0))
    end(ex, submit(ex, tmp_path, "true"))
    assert ex.status([job]) == {job: []}
    assert not over.parent.exists()
