"""`headrace scaling`: one command, 1, 2, 4 and 8 ranks, here and on Slurm; the job is one that learns less."""

import json
import os
import subprocess
import sys

import pytest

from .jobs import tools

JOB = """#!/bin/bash
#SBATCH --time=5
tasks=${SLURM_NTASKS_PER_NODE:-$HEADRACE_JOB_TASKS_PER_NODE}
exec headrace launch --framework plain --no-daemon --no-agent --ranks-per-node "$tasks" train.py "$@"
"""
# Four times as fast on eight ranks, and six points worse: what must not look like success.
TRAIN = """
import json, os, sys
ranks = int(os.environ["WORLD_SIZE"])
assert sys.argv[1] == "--checkpoints" and sys.argv[3:] == ["--epochs", "2"], sys.argv
accuracy = 0.76 if ranks < 8 else 0.70
for epoch in range(2):
    if os.environ["RANK"] == "0":
        seconds = 8 / ranks ** (2 / 3)
        print(json.dumps({"epoch": epoch, "samples": 800, "seconds": seconds, "accuracy": accuracy}))
"""


@pytest.fixture(params=["local", "slurm"])
def name(request, tmp_path, monkeypatch):
    """An executor's name; its commands are found from here on."""
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    monkeypatch.setenv("HEADRACE_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.setenv("PATH", f"{tools(tmp_path / 'tools')}:{os.environ['PATH']}")
    return request.param


@pytest.mark.timeout(400)
def test_h12_one_command_makes_the_table_and_says_that_accuracy_fell(name, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.sh").write_text(JOB)
    (project / "train.py").write_text(TRAIN)
    ended = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", "scaling",
         "--project", project, "--executor", name, "--out", tmp_path / "out", "--json",
         "--", "--epochs", "2"],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr  # a finding: it learns less
    table = json.loads(ended.stdout)
    rows = table["rows"]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8]
    assert [row["state"] for row in rows] == ["COMPLETED"] * 4
    assert [row["nodes"] for row in rows] == ([1, 1, 1, 1] if name == "local" else [1, 1, 1, 2])
    assert [round(row["training_per_s"]) for row in rows] == [100, 159, 252, 400]
    assert rows[-1]["efficiency"] == pytest.approx(0.5)
    assert [row["accuracy_fell"] for row in rows] == [False, False, False, True]
    (finding,) = table["findings"]
    assert "6.00 points below" in finding
    assert json.loads((tmp_path / "out" / "scaling.json").read_text())["rows"] == rows
    assert finding in (tmp_path / "out" / "scaling.txt").read_text()
