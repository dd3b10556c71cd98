"""`headrace top` and `headrace grafana`: on a terminal, in a pipe, as JSON, and with no daemon."""

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import sys
import time

import pytest

import headrace as hr
from headrace.runtime import RuntimeFolder
from node.conftest import folder, serving, until

folder = folder  # noqa: PLW0127 - a fixture


@pytest.fixture
def busy(folder, packed_photos, monkeypatch):
    """A daemon with one job that reads."""
    from headrace.node import notes

    monkeypatch.setattr(notes, "PERIOD_S", 0.02)
    monkeypatch.setenv("HEADRACE_JOB", "alpha")
    with serving(folder) as server:
        loader = hr.loader(packed_photos, 4, plane="node")
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        until(
            lambda: (
                server._jobs["alpha"].counted and server._jobs["alpha"].totals.consumed_batches >= 5
            )
        )
        yield server
        loader.close()


def test_without_a_daemon_it_says_what_to_do(run, folder):
    ended = run("top", "--once")
    assert ended.code == 1
    assert ended.out.startswith(f"no node daemon runs in {folder.path}. Start one: headrace node ")
    assert "HEADRACE_PLANE=node" in ended.out
    assert run("top").code == 1
    assert run("top", "--json").document == {"running": False, "folder": str(folder.path)}


def test_beside_a_launch_its_daemon_is_shown_and_named(run, folder, monkeypatch):
    local, own = folder.path.parent, folder.path.with_name("own")
    own.mkdir()
    launched = RuntimeFolder(local / f"headrace-launch-{os.geteuid()}" / "abc-0" / "run")
    launched.path.mkdir(parents=True, mode=0o700)
    monkeypatch.delenv("HEADRACE_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    monkeypatch.setenv("TMPDIR", str(local))
    other = RuntimeFolder(launched.path.parents[1] / "def-0" / "run")
    other.path.mkdir(parents=True, mode=0o700)
    (other.path / "socket").touch()
    with serving(launched):
        ended = run("top", "--once", "--interval", "0.1")
        document = run("top", "--json", "--interval", "0.1").document
    shutil.rmtree(own)
    shutil.rmtree(launched.path.parents[1])
    assert ended.code == 0
    assert "no job uses it" in ended.out
    assert "HEADRACE_PLANE=node" in ended.out
    assert "what its ranks wait for otherwise: headrace starving --last 10m\n" in ended.out
    assert f"another launch's: HEADRACE_RUNTIME_DIR={other.path} headrace top" in ended.out.replace(
        "\n", ""
    )
    assert document["running"]


def test_a_launchs_folder_that_is_not_safe_hides_nothing(run, folder, monkeypatch):
    local, own = folder.path.parent, folder.path.with_name("own")
    own.mkdir()
    unsafe = local / f"headrace-launch-{os.geteuid()}" / "abc-0" / "run"
    unsafe.mkdir(parents=True)
    unsafe.chmod(0o755)
    (unsafe / "socket").touch()
    monkeypatch.delenv("HEADRACE_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    monkeypatch.setenv("TMPDIR", str(local))
    ended = run("top", "--once", "--interval", "0.1")
    shutil.rmtree(own)
    shutil.rmtree(unsafe.parents[1])
    assert (ended.code, ended.out.partition(" in ")[0]) == (1, "no node daemon runs")


def test_once_in_a_pipe_is_plain(run, busy):
    ended = run("top", "--once", "--interval", "0.1")
    assert ended.code == 0
    assert "\x1b" not in ended.out
    assert "alpha" in ended.out
    assert "1 client, 1 job" in ended.out


def test_a_controller_is_shown_beside_the_daemon_or_alone(run, folder, monkeypatch):
    from headrace.control.client import Client
    from insight.test_planes import flow, plane, state

    asked = []

    def document(self, method, path, body=None):
        asked.append((self.endpoint.url, method, path))
        return state(plane("node1", {"storage": 1.0}, [flow("vit")]))

    monkeypatch.setattr(Client, "document", document)
    arguments = ("top", "--controller", "unix:/run/control", "--interval", "0.1")
    found = run(*arguments, "--json").document
    assert (found["running"], found["controller"]["planes"][0]["name"]) == (False, "node1")
    assert asked == [("unix:/run/control", "GET", "/v1/state")] * 2
    assert "node1" in run(*arguments, "--once").out
    with serving(folder):
        shown = run(*arguments, "--once").out
    assert shown.index("no job uses it") < shown.index("controller   epoch 3")


def test_a_controller_that_is_not_there_is_an_error(run, folder):
    ended = run("top", "--once", "--controller", "own")
    assert ended.code == 3
    assert "no controller listens" in ended.err
    assert "headrace control start" in ended.err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_impossible_intervals(run, folder, interval):
    assert run("top", "--interval", interval).code == 2


def test_on_a_terminal_it_is_a_screen_that_ctrl_c_ends(busy):
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.environ.update({"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"})
            code = "from headrace.cli import main; main()"
            os.execv(sys.executable, [sys.executable, "-c", code, "top", "--interval", "0.1"])
        finally:
            os._exit(127)
    shown, sent = b"", False
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and select.select([terminal], [], [], 30)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # Linux: the other side is closed
                break
            shown += data
            if not sent and shown.count(b"SAMPLES/S") >= 3:
                os.kill(child, signal.SIGINT)
                sent = True
    finally:
        os.close(terminal)
        with contextlib.suppress(ProcessLookupError):
            if not sent:
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert sent
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"alpha" in shown
    assert b"Traceback" not in shown
    assert shown.index(b"\x1b[?1049h") < shown.index(b"\x1b[?1049l")  # what was there comes back


def test_the_dashboard_is_exported(run, tmp_path):
    shown = json.loads(run("grafana", "export").out)
    written = run("grafana", "export", "-o", tmp_path / "headrace.json", "--json").document
    assert json.loads((tmp_path / "headrace.json").read_text()) == shown
    assert written["bytes"] == (tmp_path / "headrace.json").stat().st_size
    assert shown["title"] == "headrace"


def test_the_alerts_are_exported(run, tmp_path):
    run("grafana", "alerts", "-o", tmp_path / "alerts.yaml")
    assert (tmp_path / "alerts.yaml").read_text() == run("grafana", "alerts").out
