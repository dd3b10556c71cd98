"""Whole programs under `headrace run`: the same bytes, from where the service has put them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.conftest import until
from node.files.conftest import make_files, settle

PROGRAM = """
import hashlib, random, sys, time
paths = open(sys.argv[1]).read().split()
for epoch in range(int(sys.argv[2])):
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read())
        time.sleep(float(sys.argv[3]))
    print(digest.hexdigest())
"""


@pytest.fixture
def run(tmp_path, folder):
    """Runs the program above over some files; (what it printed, the report)."""
    paths = make_files(tmp_path / "data", 300, 4000)
    settle()
    listed = tmp_path / "listed"
    listed.write_text("\n".join(str(paths[k * 7 % 300]) for k in range(300)))

    def start(*options, epochs=1, pause_s=0.0):
        report = tmp_path / "report.json"
        headrace = str(Path(sys.executable).parent / "headrace")
        ended = subprocess.run(
            [
                headrace, "run", "--root", str(tmp_path / "data"), "--report", str(report), *options,
                "--", sys.executable, "-c", PROGRAM, str(listed), str(epochs), str(pause_s),
            ],
            env=os.environ | {"HEADRACE_RUNTIME_DIR": str(folder.path)},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.split(), json.loads(report.read_text())["daemon"]

    start.listed = listed
    return start


def test_the_second_epoch_and_the_next_run_open_copies(run, daemon):
    one = daemon()
    printed, report = run("--simulate", "nfs", epochs=2)
    assert len(set(printed)) == 1
    assert sum(report["opens"].values()) == 600
    assert report["learned"]
    assert report["refused"] == report["hostile"] == 0
    until(lambda: one.status()["files"]["roots"][0]["copies"] == 300)
    again, report = run("--simulate", "nfs")
    assert again == printed[:1]
    assert report["opens"]["ram"] == 300
    assert one.status()["files"]["roots"][0]["source_files"] == 300


def test_a_given_order_is_followed(run, daemon):
    daemon()
    printed, report = run("--order", str(run.listed), epochs=2, pause_s=0.0005)
    assert len(set(printed)) == 1
    assert (report["order"], report["divergences"]) == ("given", 0)
    assert report["opens"]["ram"] == 0  # a local disk: nothing is copied
    assert report["ahead_files"] + report["ahead_hot_files"] >= 300
