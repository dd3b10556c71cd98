"""Processes that are killed or stopped at any moment: no wrong byte, no hang, nothing left behind.

Every test asserts that its fault happened.
"""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace as hr
from headrace import runtime
from headrace.errors import NodeError
from headrace.node import link, reads
from headrace.node.daemon import ask_status, stop
from headrace.node.link import ALIVE_S
from node import node_runner
from node.conftest import node_loader, report_of, seen, serving, until

RUNNER = Path(node_runner.__file__)


@pytest.fixture(scope="module")
def expected(packed):
    """What a run prints over three epochs, without a daemon."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        node_runner.main(packed, 3)
    return printed.getvalue().splitlines()


@pytest.fixture
def client(packed, folder):
    """Starts training runs in processes."""
    started = []

    def start(epochs=3, pause_s=0.0):
        environment = os.environ | {"HEADRACE_RUNTIME_DIR": str(folder.path)}
        started.append(
            subprocess.Popen(
                [sys.executable, RUNNER, packed, str(epochs), str(pause_s)],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for one in started:
        if one.poll() is None:
            one.send_signal(signal.SIGCONT)
            one.kill()
        one.communicate(timeout=20)


def state_of(process):
    """R, S, T (stopped), Z, ..."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def named_memory(process):
    """What a process has mapped or open below /dev/shm and /tmp, its own socket and lock apart."""
    root = Path(f"/proc/{process.pid}")
    names = [line.split(maxsplit=5)[-1] for line in (root / "maps").read_text().splitlines()]
    for fd in (root / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(fd.readlink()))
    return [name for name in names if name.startswith("/dev/shm") or "/psm_" in name]


def test_the_daemon_is_killed_and_comes_back_while_a_loader_reads(
    folder, daemon, store, monkeypatch
):
    monkeypatch.setattr(link, "RETRY_FIRST_S", 0.02)
    alone = seen(hr_loader(store, 4))
    first = daemon()
    loader = node_loader(store, 4, budget_bytes=1 << 20)  # so that not all is asked for at once
    iterator = iter(loader)
    got = [_of(next(iterator)) for _ in range(4)]
    assert report_of(loader).node_batches == 4
    first.end(signal.SIGKILL)
    assert first.process.returncode == -signal.SIGKILL
    began = time.monotonic()
    got += [_of(batch) for batch in iterator]
    assert time.monotonic() - began < link.ALIVE_S / 2  # at once, not after a deadline
    assert got == alone
    report = report_of(loader)
    assert not report.attached
    assert report.direct_batches > 0
    assert folder.socket.exists()  # stale indeed
    second = daemon()
    until(lambda: loader.stages[-1]._attaching._ready)
    loader.set_epoch(0)
    assert seen(loader) == alone
    report = report_of(loader)
    assert report.attached
    assert report.attachments == 2
    assert second.status()["datasets"][0]["delivered_samples"] > 0
    assert named_memory(second.process) == []
    loader.close()
    log = second.end()
    assert "took over from a daemon that was killed" in log
    assert not folder.path.exists()


def hr_loader(store, batch=32):
    return hr.loader(store, batch, seed=3)


def _of(b):
    return (b.epoch, b.position, b.indices.tolist(), b.labels.tolist(), [bytes(s) for s in b])


@pytest.mark.usefixtures("impatient")
def test_a_stopped_daemon_costs_its_clients_two_seconds_once(folder, daemon, store, monkeypatch):
    alone = seen(hr_loader(store, 4))
    one = daemon()
    loader = node_loader(store, 4, budget_bytes=1 << 20)
    iterator = iter(loader)
    got = [_of(next(iterator))]
    one.process.send_signal(signal.SIGSTOP)
    until(lambda: state_of(one.process) == "T")
    began = time.monotonic()
    got += [_of(batch) for batch in iterator]
    took_s = time.monotonic() - began
    assert got == alone
    report = report_of(loader)
    assert not report.attached
    assert report.direct_batches > 0
    assert took_s < ALIVE_S + 8
    monkeypatch.setattr(runtime, "STOP_S", 2.0)
    with pytest.raises(NodeError, match="does not end"):
        stop(folder)
    stop(folder, force=True)
    one.end(signal.SIGCONT)
    assert one.process.returncode == -signal.SIGKILL
    assert not folder.path.exists()
    loader.close()


def test_a_killed_client_gives_everything_back(folder, daemon, client, expected):
    one = daemon()
    run = client(epochs=100, pause_s=0.002)
    assert run.stdout.readline().strip() == expected[0]
    assert one.status()["sessions"][0]["pid"] == run.pid
    run.send_signal(signal.SIGKILL)
    run.wait()
    until(lambda: not [s for s in one.status()["sessions"] if s["pid"] == run.pid])
    # What was being read for it comes first.
    until(lambda: all(job["name"] == "status" for job in one.status()["jobs"]))
    after = client()
    lines = after.communicate(timeout=60)[0].splitlines()
    assert lines[:-1] == expected
    assert json.loads(lines[-1])["direct_batches"] == 0
    one.end()
    assert not folder.path.exists()


def test_a_stopped_client_holds_up_nobody(folder, daemon, client, expected):
    one = daemon(window_bytes=1 << 20)
    stopped = client(epochs=10_000)  # more than the pipe takes: it does not end by itself
    assert stopped.stdout.readline().strip() == expected[0]
    stopped.send_signal(signal.SIGSTOP)
    until(lambda: state_of(stopped) == "T")
    after = client()
    lines = after.communicate(timeout=60)[0].splitlines()
    assert lines[:-1] == expected
    assert json.loads(lines[-1])["direct_batches"] == 0
    assert state_of(stopped) == "T"
    held = [s["held_bytes"] for s in one.status()["sessions"] if s["pid"] == stopped.pid]
    assert held[0] <= (1 << 20) * 9 // 8
    stopped.send_signal(signal.SIGCONT)
    assert stopped.stdout.readline().strip() == expected[1]  # it goes on


def test_a_client_that_died_is_seen_although_its_child_keeps_the_socket(folder, daemon, packed):
    one = daemon()
    code = (
        "import os, sys, time, headrace as hr\n"
        "store = hr.open(sys.argv[1]); loader = hr.loader(store, 20, plane='node')\n"
        "iterator = iter(loader); batch = next(iterator)\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True); time.sleep(60)\n"
        "time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, packed], stdout=subprocess.PIPE, text=True)
    child = int(run.stdout.readline())
    assert [s["pid"] for s in one.status()["sessions"] if s["leases"]] == [run.pid]
    run.kill()
    run.wait()
    os.kill(child, 0)  # lives, and has the socket
    until(lambda: run.pid not in [s["pid"] for s in one.status()["sessions"]])
    os.kill(child, signal.SIGKILL)
    run.stdout.close()


def test_random_kills_of_daemon_and_clients(folder, daemon, client, expected):
    """A small version of the soak: every line that anybody prints is right, all runs end."""
    rng = random.Random(1)
    one, kills = daemon(), 0
    runs = [client(epochs=3, pause_s=0.004) for _ in range(2)]
    for _ in range(2):
        time.sleep(rng.uniform(0.05, 0.6))
        one.end(signal.SIGKILL)
        kills += one.process.returncode == -signal.SIGKILL
        one = daemon()
    victim = client(epochs=3, pause_s=0.01)
    assert victim.stdout.readline()
    victim.kill()
    victim.wait()
    for run in runs:
        out, err = run.communicate(timeout=60)
        lines = out.splitlines()
        assert lines[:-1] == expected, err
    assert kills == 2
    assert victim.returncode == -signal.SIGKILL
    one.end()
    assert not folder.path.exists()


def test_two_daemons_started_at_once_one_rules(folder, daemon):
    both = [daemon(wait=False) for _ in range(2)]
    until(lambda: any(one.process.poll() is not None for one in both))
    (ruler,) = [one for one in both if one.process.poll() is None]
    until(ruler.serves)
    for one in both:
        if one is not ruler:
            _, log = one.process.communicate(timeout=20)
            assert one.process.returncode == 1
            assert b"a node daemon runs already" in log
    assert ask_status(folder)["pid"] == ruler.process.pid
    ruler.end()
    assert ruler.process.returncode == 0
    assert not folder.path.exists()


def test_memory_that_cannot_be_had_is_no_end(folder, daemon, store):
    """Shared buffers above 16 KiB are refused by the system: clients read directly."""
    one = daemon(
        limits="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))"
    )
    alone = seen(hr_loader(store))
    loader = node_loader(store)
    assert seen(loader) == alone
    report = report_of(loader)
    assert report.attached
    assert report.direct_batches == len(alone)
    (data,) = one.status()["datasets"]
    assert data["failed_batches"] == len(alone)  # it was refused indeed
    assert one.process.poll() is None
    loader.close()


# Clients that the daemon cannot take in hold their places while they are patient.
@pytest.mark.usefixtures("impatient")
def test_few_descriptors_are_no_end(folder, daemon, store):
    """Both sides run out of files: batches are read directly, nothing hangs."""
    one = daemon(limits="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))")
    alone = seen(hr_loader(store))
    loaders = [node_loader(store) for _ in range(20)]
    iterators = [iter(loader) for loader in loaders]
    first = [[_of(next(iterator)) for iterator in iterators] for _ in range(3)]
    assert all(row == [alone[k]] * 20 for k, row in enumerate(first))
    direct = sum(report_of(loader).direct_batches for loader in loaders)
    assert direct > 0  # some were refused, or could not be served
    assert one.process.poll() is None
    for loader in loaders:
        loader.close()
    until(one.serves)


def test_no_daemon_is_no_delay_and_one_that_comes_is_found(folder, store, monkeypatch):
    monkeypatch.setattr(link, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(link, "RETRY_MAX_S", 0.05)
    alone = seen(hr_loader(store))
    loader = node_loader(store)
    began = time.monotonic()
    assert seen(loader) == alone
    assert time.monotonic() - began < reads.FIRST_S / 2
    assert report_of(loader).why == "no node daemon runs"
    with serving(folder):
        until(lambda: loader.stages[-1]._attaching._ready)
        loader.set_epoch(0)
        assert seen(loader) == alone
        assert report_of(loader).node_batches == len(alone)
    loader.close()
