"""`headrace mount` and `unmount`: in the background, in the foreground, and what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from headrace.errors import MountError
from headrace.posix.mount.process import attach, detach, mounted_at
from tests_shared import until


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "view"
    path.mkdir()
    try:
        device = attach(str(path), "probe")
    except MountError as e:
        pytest.skip(f"no FUSE here: {e}")
    detach(str(path), lazy=True)
    os.close(device)
    yield path
    if mounted_at(str(path)) is not None:
        detach(str(path), lazy=True)


def test_in_the_background(run, folder, packed_photos):
    mounted = run("mount", packed_photos, folder, "--json")
    assert mounted.code == 0, mounted.out
    state = mounted.document["mount"]
    assert (state["samples"], state["folder"]) == (36, str(folder))
    assert os.getsid(state["pid"]) == state["pid"]  # it outlives the terminal
    assert sorted(os.listdir(folder)) == ["cats", "dogs", "owls"]
    again = run("mount", packed_photos, folder, "--json")
    assert again.code == 3
    assert "mounted here already" in again.document["error"]["message"]
    with (folder / "cats/1.png").open("rb"):
        busy = run("unmount", folder)
        assert busy.code == 3
        assert f"process {os.getpid()}" in busy.err
        assert "--lazy" in busy.err
    assert run("unmount", folder).out == f"{folder} is unmounted\n"
    none = run("unmount", folder, "--json")
    assert none.code == 3
    assert none.document["error"]["type"] == "MountError"


def test_in_the_foreground_until_interrupted(folder, packed_photos, tmp_path):
    program = [sys.executable, "-c", "from headrace.cli import main; main()", "mount"]
    log = tmp_path / "mount.log"
    with subprocess.Popen(
        [*program, "--foreground", "--json", "--log", str(log), str(packed_photos), str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert until(lambda: mounted_at(str(folder)) is not None and bool(os.listdir(folder)))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert json.loads(out)["mount"]["pid"] == process.pid
    assert f"36 samples at {folder}" in err
    assert log.read_text().endswith("ends\n")
    assert mounted_at(str(folder)) is None


@pytest.mark.parametrize(
    "options", [["--cache", "much"], ["--check-up-to", "x"], ["--timeout", "0"]]
)
def test_options_that_make_no_sense(run, tmp_path, options):
    ended = run("mount", tmp_path, tmp_path, *options)
    assert ended.code == 2, ended.err


def test_a_store_that_is_not_there(run, tmp_path):
    (tmp_path / "view").mkdir()
    ended = run("mount", tmp_path / "no.hr", tmp_path / "view")
    assert ended.code == 3
    assert "there is no store" in ended.err
