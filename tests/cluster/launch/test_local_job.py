"""A launch within a job of headrace's own executor: asked to stop, started again, resumed exactly."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import sys

import pytest

from cluster.launch.launching import MARK, TRAINER, seen_counts
from headrace.cluster.executor import JobState, Submission
from headrace.cluster.launch import rank_start
from headrace.cluster.local.executor import LocalExecutor
from headrace.telemetry import job_report
from tests_shared import until


def local_job(launch, photos, folder, log, *more, options=()):
    """An executor, and a job of two nodes that trains."""
    words = shlex.join(
        [
            sys.executable, "-c", "from headrace.cli import main; main()", "launch", "--local",
            str(launch.disk), "--framework", "plain", "--ranks-per-node", "1", *more, "--stage",
            str(photos), str(TRAINER), "checkpoints", "--log", str(log), "--pace", "0.1",
        ]
    )  # fmt: skip
    script = f"#!/bin/bash\nexport {MARK}={launch.mark}\nexec {words}\n"
    environment = {"HEADRACE_HISTORY": str(launch.folder / "history")}
    options = ("--nodes=2", "--ntasks-per-node=1", "--time=5", *options)
    executor = LocalExecutor(folder / "jobs")
    return executor, executor.submit(
        Submission(script.encode(), options, (), launch.folder, environment)
    )


def test_what_the_ranks_of_a_cancelled_job_did_last_is_in_its_report(launch, photos, tmp_path):
    """All of the job is signalled; who hears its ranks goes on until they left."""
    log = launch.folder / "log"
    executor, job = local_job(launch, photos, tmp_path, log)
    try:
        launch.wait_for_steps(log, 2, steps=2)
    finally:
        executor.cancel([job])
        (status,) = executor.wait([job], 120.0)[job]
    text = b"".join(executor.logs(job)).decode()
    assert status.state == JobState.CANCELLED, text
    assert "saved at step" in text
    assert (
        "; 36 samples staged" in text
    )  # staging hears of the end from the launch, not from the signal
    report = job_report(launch.folder / "history", job)
    assert report.record.total("samples") > 0, report.text()
    assert report.record.unended == 0, report.text()


def test_a_job_that_is_sent_usr1_starts_again_where_it_stopped(launch, photos, tmp_path):
    log = launch.folder / "log"
    executor, job = local_job(
        launch, photos, tmp_path, log, "--no-daemon", "--no-agent",
        options=("--requeue", "--open-mode=append"),
    )  # fmt: skip
    try:
        launch.wait_for_steps(log, 2, steps=2)
        executor.cancel([job], signal.SIGUSR1)
        executor.wait([job], 120.0)
    finally:
        text = b"".join(executor.logs(job)).decode()
        executor.cancel([job])
    (status,) = executor.status([job])[job]
    assert (status.state, status.restarts) == (JobState.COMPLETED, 1), text
    assert text.count("leaves at step") == 2, text
    assert f"job {job}: requeued, 2 nodes" in text
    (steps,) = re.findall(
        r"asked to start again \(SIGUSR1\); all ranks saved at step (\d+) and left", text
    )
    assert f"job {job}, restarted once: completed, 2 nodes" in text
    resumed = status.with_run().resumed
    assert resumed.startswith(f"resumed at step {steps} (epoch ")
    assert f"; {resumed}; epoch 1, position 36" in text
    assert (seen_counts(launch.folder / "checkpoints", 2) == 1).all()
    assert until(lambda: not launch.left(), 15.0), launch.left()


ASKS = """
import time
import headrace as hr
hr.cluster.should_stop()
print("begun", flush=True)
while not hr.cluster.should_stop():
    time.sleep(0.05)
print("saved", flush=True)
"""
DEAF = """
import time
print("begun", flush=True)
time.sleep(300)
"""


def torchrun_job(tmp_path, script):
    executor = LocalExecutor(tmp_path / "jobs")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "disk").mkdir()
    words = shlex.join(
        [
            sys.executable, "-c", "from headrace.cli import main; main()", "launch", "--local",
            str(tmp_path / "disk"), "--ranks-per-node", "2", "--no-daemon", "--no-agent", "train.py",
        ]
    )  # fmt: skip
    script = f"#!/bin/sh\nexec {words}\n".encode()
    (tmp_path / "tmp").mkdir()
    environment = {"TMPDIR": str(tmp_path / "tmp")}
    return executor, executor.submit(
        Submission(script, directory=tmp_path, environment=environment)
    )


@pytest.mark.parametrize(("script", "saved"), [(ASKS, 2), (DEAF, 0)], ids=["asks", "deaf"])
def test_a_job_under_torchrun_that_is_cancelled_ends_without_tracebacks(tmp_path, script, saved):
    """The executor signals all of a job's processes, torchrun among them."""
    pytest.importorskip("torch")
    executor, job = torchrun_job(tmp_path, script)
    out = tmp_path / f"slurm-{job}.out"
    try:
        assert until(lambda: out.exists() and out.read_text().count("begun") == 2, 120.0)
        executor.cancel([job])
        (status,) = executor.wait([job], 60.0)[job]
    finally:
        executor.cancel([job])
    text = out.read_text()
    assert status.state == JobState.CANCELLED
    assert text.count("saved") == saved
    assert "Traceback" not in text
    assert f"job {job}: cancelled, 1 node, 2 ranks" in text


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
        ("os._exit(75)", 1, "ended with status 1"),  # 75 would ask for a new start
        ("raise ValueError('no number')", 1, "ended with status 1: ValueError: no number"),
    ],
)
def test_a_job_under_torchrun_ends_with_the_status_of_the_rank_that_failed(
    tmp_path, end, status, words
):
    pytest.importorskip("torch")
    script = (
        "import os, time\nimport headrace as hr\nhr.cluster.should_stop()\n"
        f"if os.environ['RANK'] == '1':\n    {end}\ntime.sleep(300)\n"
    )
    executor, job = torchrun_job(tmp_path, script)
    try:
        (ended,) = executor.wait([job], 120.0)[job]
    finally:
        executor.cancel([job])
    text = (tmp_path / f"slurm-{job}.out").read_text()
    assert ended.exit_code == status, text
    assert f"headrace cluster resubmit {job}" in text
    (cause,) = (line for line in text.splitlines()[-2:] if "cause: " in line)
    assert ended.with_run().why in cause
    assert re.search(rf": rank 1 \(node {socket.gethostname()}\) {words}$", cause)
    assert text.count("Traceback") == ("raise" in end)
    assert not list((tmp_path / "tmp").iterdir())
    assert "Root Cause" not in text  # torchrun's own page about it


@pytest.mark.parametrize("own", [False, True])
def test_torchruns_logs_go_where_its_own_variable_says(monkeypatch, own):
    pytest.importorskip("torch")
    from torch.distributed import run

    given = []
    monkeypatch.setattr(run, "main", given.extend)
    monkeypatch.setattr(sys, "argv", ["rank_start", rank_start.TORCHRUN, "--nnodes=1"])
    monkeypatch.setenv("LOGLEVEL", "INFO")
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", "/tmp/run")
    monkeypatch.delenv("PET_LOG_DIR", raising=False)
    if own:
        monkeypatch.setenv("PET_LOG_DIR", "logs")
    rank_start.torchrun()
    assert given == [*([] if own else ["--log-dir=/tmp/run-torchrun"]), "--nnodes=1"]
