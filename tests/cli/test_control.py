"""`headrace control` and `headrace policy` as a user sees them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

POLICY = "jobs: {a: {cap: {bytes_per_s: 5M}}}\n"


@pytest.fixture
def place():
    """A short folder; the controller in it is stopped after the test."""
    folder = Path(tempfile.mkdtemp(prefix="hrc-"))
    yield folder
    run(folder, "control", "stop", "--force")
    shutil.rmtree(folder)


def run(place, *arguments, given=None):
    program = [sys.executable, "-c", "from headrace.cli import main; main()"]
    return subprocess.run(
        [*program, *arguments], cwd=place, check=False, capture_output=True, text=True, input=given,
        env=os.environ | {"HEADRACE_RUNTIME_DIR": str(place / "rt")}, timeout=60,
    )  # fmt: skip


def as_json(place, *arguments, code=0, given=None):
    ended = run(place, *arguments, "--json", given=given)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return json.loads(ended.stdout)


def test_a_controller_is_started_asked_given_a_policy_and_stopped(place):
    (place / "p.yaml").write_text(POLICY)
    assert as_json(place, "control", "status", code=1) == {
        "running": False, "folder": str(place / "rt-control"),
    }  # fmt: skip
    assert as_json(place, "control", "start", "--db", "c.db")["epoch"] == 1
    assert "a controller runs already" in run(place, "control", "start", "--db", "c.db").stderr
    shown = run(place, "policy", "diff", "p.yaml")
    assert shown.returncode == 1
    assert shown.stdout == ("+ jobs.a.cap.bytes_per_s: 5M\nnothing was applied; version 0 holds\n")
    assert "jobs.a: nothing of this job reads now" in shown.stderr
    assert as_json(place, "policy", "apply", "p.yaml", "--dry-run")["applied"] is False
    assert as_json(place, "policy", "apply", "p.yaml")["version"] == 1
    assert run(place, "policy", "diff", "p.yaml", "--dry-run").returncode == 0
    got = run(place, "policy", "get").stdout
    assert "bytes_per_s: 5M" in got
    assert (
        as_json(place, "policy", "apply", "-", given=got)["changes"] == []
    )  # what it prints, it takes
    wrong = as_json(place, "policy", "apply", "-", given="jbos: 1", code=3)
    assert wrong["error"]["message"].endswith("did you mean 'jobs'?")
    state = as_json(place, "control", "status")
    assert state["running"]
    assert state["policy_version"] == 1
    assert "policy 1, 0 planes" in run(place, "control", "status").stdout
    assert "rules with epoch 1" in run(place, "control", "logs").stdout
    assert as_json(place, "control", "stop")["running"] is False
    assert [p.name for p in (place / "rt-control").iterdir()] == ["control.log"]


def test_without_a_controller_the_next_step_is_named(place):
    (place / "p.yaml").write_text(POLICY)
    ended = run(place, "policy", "apply", "p.yaml")
    assert ended.returncode == 3
    assert "next: Start it: headrace control start." in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--listen", "tcp:0.0.0.0:1"], "anybody could ask"),
        (["--listen", "nowhere"], "expected unix:/PATH or tcp:HOST:PORT"),
        (["--tls-cert", "x"], "go together"),
    ],
)
def test_a_controller_that_anybody_could_ask_is_not_started(place, arguments, problem):
    ended = run(place, "control", "start", "--db", "c.db", *arguments)
    assert ended.returncode == 2
    assert problem in ended.stderr
