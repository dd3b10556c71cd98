"""A real Slurm job on two nodes, with an agent as a step on each: its report ends its log, and is true."""

import json
import os
import re
import subprocess
import sys

import pytest

import headrace as hr
from headrace.telemetry import job_report, stalls
from insight.test_starving import PROGRAM, SAMPLE_BYTES, near

SCRIPT = """#!/bin/bash
export HEADRACE_HISTORY={folder}/history
srun --overlap --ntasks-per-node=1 bash -c '
  export HEADRACE_RUNTIME_DIR={folder}/rt-$SLURMD_NODENAME
  echo $SLURM_STEP_ID > {folder}/step-$SLURMD_NODENAME
  exec {python} {folder}/command.py agent' &
agents=$!
srun --overlap --ntasks-per-node=1 bash -c '
  export HEADRACE_RUNTIME_DIR={folder}/rt-$SLURMD_NODENAME
  for i in $(seq 600); do
    [ -S $HEADRACE_RUNTIME_DIR-agent-$SLURM_JOB_ID/socket ] && break
    sleep 0.1
  done
  exec {python} {folder}/train.py {folder}/s.hr 1e6 0.1 12 > {folder}/rank-$SLURMD_NODENAME.json'
# To the agents themselves: a signal to their srun would have them killed before they have written.
# Which of the two steps is theirs is known to them alone: both were begun at once.
scancel --signal=TERM $SLURM_JOB_ID.$(cat {folder}/step-* | head -n 1)
wait $agents
{python} {folder}/command.py job-report $SLURM_JOB_ID
"""


@pytest.fixture
def store(tmp_path):
    (tmp_path / "src").mkdir()
    for i in range(40):
        (tmp_path / "src" / f"{i:02d}.bin").write_bytes(os.urandom(SAMPLE_BYTES))
    hr.pack(tmp_path / "src", tmp_path / "s.hr")
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "command.py").write_text("from headrace.cli import main; main()")
    return tmp_path


def cli(folder, *words):
    ended = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", *words, "--json",
         "--history", str(folder / "history")],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_jobs_report_its_hours_and_what_it_lost(slurm, store):
    job = slurm.sbatch(
        SCRIPT.format(folder=store, python=sys.executable),
        "--nodes=2", "--gpus-per-node=2", "--job-name=train", f"--output={store}/log",
    )  # fmt: skip
    assert slurm.wait_for_job(job) == "COMPLETED", (store / "log").read_text()
    log = (store / "log").read_text()
    ranks = [json.loads(file.read_text()) for file in sorted(store.glob("rank-*.json"))]
    assert len(ranks) == 2
    waited_s = sum(rank["waited_s"] for rank in ranks)
    worked_s = sum(rank["worked_s"] for rank in ranks)

    report = job_report(store / "history", job)
    record = report.record
    assert record.measured, log
    assert len(record.nodes) == 2
    assert sum(record.waited.values()) == near(waited_s)
    assert record.total("worked_s") == near(worked_s)
    # A rank on each node, with its two GPUs.
    assert sum(record.lost.values()) == near(2 * waited_s)
    assert record.stall == near(waited_s / (waited_s + worked_s))
    # What was told before the first batch came says less.
    assert {"latency"} <= set(record.waited) <= {"latency", "storage"}
    assert f"job {job} (train)" in log
    shown = re.search(r"waited ([\d.]+) s, worked ([\d.]+) s", log)
    assert float(shown[1]) == near(waited_s)

    (row,) = [row for row in cli(store, "starving")["jobs"] if row["job_id"] == job]
    assert row["lost_gpu_hours"] * 3600 == near(2 * waited_s)
    assert stalls(store / "history")[job].share == near(waited_s / (waited_s + worked_s))

    # The books of this cluster are its list of completed jobs; all jobs of the tests are in it.
    usage = cli(store, "usage", "--from", "slurm")
    assert usage["source"] == "slurm"
    assert usage["total"]["lost_gpu_hours"] * 3600 == near(2 * waited_s)
    assert usage["total"]["jobs"] >= 1
    seconds = record.total("seconds") / 2
    assert usage["total"]["gpu_hours"] * 3600 >= 4 * (seconds - 2)
