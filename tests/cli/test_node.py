"""`headrace node`: started in the background, asked, stopped; nothing is left but the log."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

import headrace as hr
from node.conftest import until


@pytest.fixture
def runtime(monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(folder / "rt"))
    yield folder / "rt"
    shutil.rmtree(folder)


def test_a_daemon_in_the_background(run, runtime, packed_photos):
    none = run("node", "status", "--json")
    assert (none.code, none.document["running"]) == (1, False)
    assert run("node", "stop").code == 1
    started = run("node", "start", "--ram", "64M", "--window", "8M", "--json")
    assert started.code == 0, started.err
    pid = started.document["pid"]
    try:
        assert started.document["ram_bytes"] == 64 << 20
        assert os.getsid(pid) == pid  # it outlives the terminal
        again = run("node", "start", "--json")
        assert again.code == 3
        assert f"process {pid}" in again.document["error"]["message"]
        loader = hr.loader(packed_photos, 8, plane="node")
        assert sum(len(batch) for batch in loader) == 36
        state = run("node", "status", "--json").document
        assert state["pid"] == pid
        assert state["datasets"][0]["delivered_samples"] == 36
        assert [s["pid"] for s in state["sessions"]] == [os.getpid()]
        shown = run("node", "status").out
        assert "36 of 36 samples held" in shown
        assert "1 client of 1 job\n" in shown
        loader.close()
        assert "consumers wait" in shown
        until(lambda: "0 clients of 0 jobs" in run("node", "status").out)  # who asks is none
        until(lambda: "nobody reads it now" in run("node", "status").out)
        assert "consumers wait" not in run("node", "status").out
        assert f"process {pid} serves" in run("node", "logs").out
        assert len(run("node", "logs", "-n", "1", "--json").document["lines"]) == 1
    finally:
        stopped = run("node", "stop", "--json")
    assert stopped.document == {"pid": pid, "running": False}
    assert [p.name for p in runtime.iterdir()] == ["node.log"]
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize("ignored", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_was_started_to_ignore_a_signal_is_stopped_too(run, runtime, ignored):
    before = signal.signal(ignored, signal.SIG_IGN)  # as a launch does, and a shell's `&`
    try:
        pid = run("node", "start", "--ram", "16M", "--json").document["pid"]
    finally:
        signal.signal(ignored, before)
    stopped = run("node", "stop", "--json")
    run("node", "stop", "--force")
    assert stopped.document == {"pid": pid, "running": False}


def test_one_that_cannot_start_says_why(run, runtime):
    runtime.mkdir()
    runtime.chmod(0o755)
    ended = run("node", "start", "--json")
    assert ended.code == 3
    error = ended.document["error"]
    assert "mode 0755" in error["message"]
    assert error["next_step"].startswith(f"chmod 0700 {runtime}, or ")
    runtime.chmod(0o777)  # somebody else may have put something there
    error = run("node", "start", "--json").document["error"]
    assert error["next_step"].startswith("Remove it, or ")


def test_sizes_are_read_and_refused(run, runtime):
    from headrace.base.text import bytes_of

    assert [bytes_of(t) for t in ("1024", "8k", "1.5G", "2GiB", "1TB")] == [
        1024, 8192, 3 << 29, 2 << 30, 1 << 40,
    ]  # fmt: skip
    for wrong in ("much", "", "8X", "1e999"):
        assert run("node", "start", "--ram", wrong).code == 2
    assert not runtime.exists()


def test_units_name_the_options_of_start(run):
    texts = run("node", "unit", "--ram", "64G", "--json").document
    assert "node start --foreground --ram 64G" in texts["systemd"]
    assert "node start --foreground --ram 64G" in texts["slurm"]
    shown = run("node", "unit").out
    assert "[Service]" in shown
    assert "srun" in shown
