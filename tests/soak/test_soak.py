"""The kill soak, short and whole; `make soak` prints the counts of the latter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def soak(tmp_path, *arguments):
    """Run it as a user would; returns what it counted."""
    counted = tmp_path / "soak.json"
    ended = subprocess.run(
        [sys.executable, "-m", "soak", "--json", counted, *arguments],
        check=False, capture_output=True, text=True, timeout=3000,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )  # fmt: skip
    assert counted.exists(), ended.stderr
    result = json.loads(counted.read_text())
    assert result["ok"], ended.stdout + ended.stderr
    assert ended.returncode == 0
    return result


def holds(result, kills):
    assert result["kills"] >= kills
    assert result["wrong"] == 0
    assert result["hangs"] == result["leftovers"] == result["problems"] == []
    assert not result["user_files_changed"]
    assert result["longest_call_s"] <= result["call_deadline_s"]
    # It was not for nothing: clients read over the daemon, and without it.
    assert result["node_batches"] > 0
    assert result["direct_batches"] > 0
    assert result["epochs"] > 0


def test_a_short_soak_ends_with_nothing_wrong_and_nothing_left(tmp_path):
    """R3, R4."""
    result = soak(tmp_path, "--kills", "12", "--seed", "7", "--no-torch")
    holds(result, 12)
    assert {"kill daemon", "kill plain"} <= set(result["counts"])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_hundred_kills(tmp_path):
    """R3, R4: of daemon, clients and torch's workers; all kinds of kills and stops happened."""
    result = soak(tmp_path, "--kills", "300", "--seed", "4")
    holds(result, 300)
    kinds = {"kill daemon", "kill plain", "kill resume", "kill torch", "kill worker"}
    kinds |= {"stop daemon past the deadline", "stop plain past the deadline"}
    kinds |= {"terminate daemon", "race of three daemons"}
    assert kinds <= set(result["counts"])
    assert result["worker_errors"] > 0
    assert result["resumes"] > 0
