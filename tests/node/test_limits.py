"""Small limits: a slower run or a clear error, and the daemon lives. Each test asserts that its limit bit."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace import runtime
from headrace.errors import NodeError
from headrace.node.daemon import ask_status, stop
from headrace.node.link import LinkLost
from headrace.node.wire import Ask, Hurry, ReplyStatus, Samples
from node.conftest import node_loader, report_of, seen, until
from node.test_hostile import opened

TESTS = Path(__file__).resolve().parents[1]


def in_namespace(*options, script=""):
    """A command that runs where mounts or clocks are its own; skips where the system forbids it."""
    command = ["unshare", "--mount", *options, "sh", "-c", f'{script}\nexec "$@"', "sh"]
    probe = subprocess.run([*command, "true"], check=False, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no namespaces here: {probe.stderr.strip()}")
    return command


def ran(command, *arguments, timeout=120):
    """What a Python program printed as JSON."""
    ended = subprocess.run(
        [*command, *arguments], check=False, capture_output=True, text=True, timeout=timeout,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


# A daemon in a thread, a loader over it, and one without.
BOTH = """
import json, os, sys
from pathlib import Path
import headrace as hr
from headrace.config import TierOptions
from headrace.runtime import runtime_folder
from node.conftest import be_patient, node_loader, report_of, seen, serving, until
be_patient()
store = hr.open(sys.argv[1])
alone = hr.loader(store, 32, seed=3)
expected = [seen(alone) for _ in range(2)]
alone.close()
results = {}
"""


def test_a_small_dev_shm_does_not_matter(packed, folder):
    script = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    program = BOTH + (
        "with serving(runtime_folder()):\n"
        "    loader = node_loader(store)\n"
        "    results['same'] = [seen(loader) for _ in range(2)] == expected\n"
        "    results['direct'] = report_of(loader).direct_batches\n"
        "    loader.close()\n"
        "results['shm'] = os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize\n"
        "results['left'] = os.listdir('/dev/shm')\n"
        "print(json.dumps(results))"
    )
    results = ran(in_namespace(script=script), sys.executable, "-c", program, packed)
    assert results == {"same": True, "direct": 0, "shm": 1 << 20, "left": []}


def test_a_full_disk_below_the_cache_folder(packed, folder, tmp_path):
    """R7: what fits is kept there, everything is delivered, the daemon lives."""
    (tmp_path / "disk").mkdir()
    script = f"mount -t tmpfs -o size=512k tmpfs {tmp_path / 'disk'}"
    program = BOTH + (
        "from headrace.plane import disk_cache\n"
        "disk_cache.disk_reserve = lambda _: 0\n"
        "disk = Path(sys.argv[2])\n"
        "tiers = TierOptions(cache_dir=str(disk / 'cache'), cache_bytes=1 << 30)\n"
        "with serving(runtime_folder(), ram_bytes=0, tiers=tiers) as server:\n"
        "    loader = node_loader(store)\n"
        "    results['same'] = [seen(loader) for _ in range(2)] == expected\n"
        "    results['direct'] = report_of(loader).direct_batches\n"
        "    loader.close()\n"
        "    def free():\n"
        "        used = os.statvfs(disk)\n"
        "        return used.f_bavail * used.f_frsize\n"
        "    until(lambda: free() < 256 << 10)\n"  # it is written to a little later
        "    results['free'] = free()\n"
        "print(json.dumps(results))"
    )
    results = ran(
        in_namespace(script=script), sys.executable, "-c", program, packed, tmp_path / "disk"
    )
    assert results["same"]
    assert results["direct"] == 0
    assert results["free"] < 256 << 10  # it was written to


def test_a_full_disk_below_the_runtime_folder(packed, folder, tmp_path):
    """R7: no daemon, an error that says why, nothing left; loaders read directly."""
    (tmp_path / "disk").mkdir()
    disk = tmp_path / "disk"
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {disk}; dd if=/dev/zero of={disk}/full bs=4k || true"
    )
    program = BOTH + (
        "import subprocess\n"
        "os.environ['HEADRACE_RUNTIME_DIR'] = sys.argv[2] + '/rt'\n"
        "program = 'from headrace.cli import main; main()'\n"
        "ended = subprocess.run([sys.executable, '-c', program, 'node', 'start', '--foreground'],\n"
        "    capture_output=True, text=True)\n"
        "results['code'], results['complaint'] = ended.returncode, ended.stderr\n"
        "results['left'] = [p for p in os.listdir(sys.argv[2]) if p != 'full']\n"
        "loader = node_loader(store)\n"
        "results['same'] = [seen(loader) for _ in range(2)] == expected\n"
        "results['node'] = report_of(loader).node_batches\n"
        "loader.close()\n"
        "print(json.dumps(results))"
    )
    results = ran(in_namespace(script=script), sys.executable, "-c", program, packed, disk)
    assert results["code"] != 0
    assert "No space left" in results["complaint"]
    assert "Traceback" not in results["complaint"]
    assert results["left"] == []
    assert (results["same"], results["node"]) == (True, 0)


def test_sixty_four_descriptors_are_enough_for_a_daemon_and_its_clients(folder, daemon, store):
    one = daemon(limits="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))")
    limit = Path(f"/proc/{one.process.pid}/limits").read_text()
    assert "Max open files            64 " in limit
    alone = hr.loader(store, 32, seed=3)
    expected = seen(alone)
    alone.close()
    loaders = [node_loader(store) for _ in range(8)]
    assert all(seen(loader) == expected for loader in loaders)
    assert sum(report_of(loader).node_batches for loader in loaders) > 0
    for loader in loaders:
        loader.close()
    until(one.serves)


def test_little_address_space_is_no_end_of_the_daemon(folder, daemon, store, link):
    """RLIMIT_AS: what cannot be had is not delivered; the daemon goes on."""
    one = daemon()
    pid = one.process.pid
    one_store = opened(link(), store)
    assert one_store == 1
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
    alone = hr.loader(store, 100, seed=3)
    expected = seen(alone)
    alone.close()
    loaders = [node_loader(store, 100) for _ in range(6)]
    assert all(seen(loader) == expected for loader in loaders)
    assert sum(report_of(loader).direct_batches for loader in loaders) > 0  # it bit
    for loader in loaders:
        loader.close()
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    until(one.serves)
    loader = node_loader(store, 100)
    assert seen(loader) == expected
    assert report_of(loader).node_batches > 0  # all is well again
    loader.close()


# -- memory of a control group ------------------------------------------------------------------


def memory_group():
    """This process's own memory group (cgroup v1), in which groups can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    pytest.skip("no memory control group (v1) here")
    return None


@pytest.fixture
def group():
    """A group of processes with little memory; empty again after the test."""
    group = memory_group() / f"headrace-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no group can be made: {e}")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text().split())
    group.rmdir()


def test_a_memory_limit_is_kept_to_and_nobody_is_killed(folder, group, daemon, tmp_path, link):
    """DESIGN 4.4: the daemon sizes itself by its control group, whatever its clients hold."""
    limit = 192 << 20
    (group / "memory.limit_in_bytes").write_text(str(limit))
    assert int((group / "memory.limit_in_bytes").read_text()) == limit
    path = tmp_path / "large.hr"
    block = np.random.default_rng(1).bytes(4 << 20)
    hr.pack(((f"{i}", block, 0) for i in range(75)), path)  # 300 MiB
    # ram_bytes and windows are what a user asked for on a larger machine.
    one = daemon(
        limits=f"import os\nopen('{group}/cgroup.procs', 'w').write(str(os.getpid()))",
        ram_bytes=1 << 30, yielding=True,
    )  # fmt: skip
    assert str(one.process.pid) in (group / "cgroup.procs").read_text().split()
    with hr.open(path) as store:
        keepers = [link(f"job-{n}") for n in range(4)]
        answers = []
        for keeper in keepers:
            number = opened(keeper, store)
            for k in range(15):  # holds all that it is given
                wire = np.arange(5 * k, 5 * k + 5, dtype=np.int64).tobytes()
                keeper.send(Ask(keeper.new_ticket(), number, wire, []))
            last = keeper._ticket
            for ticket in range(last - 14, last + 1):
                keeper.send(Hurry(ticket))
                with contextlib.suppress(LinkLost):
                    answers.append(keeper.wait(Samples, 1.0).status)
        loader = node_loader(store, 5)
        assert sum(len(b) for b in loader) == 75
        loader.close()
    assert one.process.poll() is None
    control = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    assert control["oom_kill"] == "0"
    assert ReplyStatus.OK in answers
    assert ReplyStatus.BUSY in answers or ReplyStatus.FAILED in answers  # it could not give all
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    assert peak <= limit
    state = one.status()
    assert sum(job["held_bytes"] for job in state["jobs"]) < limit


# -- clocks ------------------------------------------------------------------------------------------


def test_a_daemon_whose_clocks_are_elsewhere_serves_the_same(folder, packed, tmp_path):
    """Monotonic and boot time of the daemon differ from the client's by years: nothing is compared."""
    command = in_namespace(
        "--time", "--fork", "--monotonic", "100000000", "--boottime", "100000000"
    )
    program = BOTH + (
        "import subprocess, time\n"
        "from node.conftest import DaemonProcess, until\n"
        "one = DaemonProcess(runtime_folder())\n"
        "os.environ['X'] = ''\n"
        "print(json.dumps({'pid': one.process.pid, 'now': time.monotonic()}), flush=True)\n"
        "sys.stdin.read(); one.end()"
    )
    process = subprocess.Popen(
        [*command, sys.executable, "-c", program, packed], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(TESTS)},
    )  # fmt: skip
    there = json.loads(process.stdout.readline())
    try:
        assert there["now"] > time.monotonic() + 9e7
        with hr.open(packed) as store:
            alone = hr.loader(store, 32, seed=3)
            expected = seen(alone)
            alone.close()
            loader = node_loader(store)
            assert seen(loader) == expected
            assert report_of(loader).direct_batches == 0
            state = ask_status(loader.stages[-1]._attaching.folder)
            assert 0 <= state["uptime_s"] < 100
            loader.close()
            # Deadlines run by a clock that only goes on: half a hello is waited for as long as ever.
            with socket.socket(socket.AF_UNIX) as drip:
                drip.settimeout(20)
                began = time.monotonic()
                drip.connect(str(folder.socket))
                drip.send(b"\x05")
                assert drip.recv(1) == b""
                assert 4 < time.monotonic() - began < 20
    finally:
        process.communicate("", timeout=60)


def test_nothing_of_the_daemon_looks_at_a_clock_that_can_be_set():
    """Jumps of the wall clock cannot matter where nobody reads it."""
    import ast

    import headrace.node

    wall = {"time", "time_ns", "now", "today", "utcnow", "gmtime", "localtime"}
    modules = sorted(Path(headrace.node.__file__).parent.rglob("*.py"))
    assert len(modules) > 10
    places, monotonic = [], 0
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in {"time", "datetime", "date"} and node.attr in wall:
                    places.append(f"{path.name}:{node.lineno}")
                monotonic += (node.value.id, node.attr) == ("time", "monotonic")
    assert places == []
    assert monotonic > 5


# -- a daemon that is stuck ---------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_a_stuck_daemon_whose_queue_is_full_can_be_killed_and_costs_clients_nothing_more(
    folder, daemon, store, monkeypatch
):
    one = daemon()
    one.process.send_signal(signal.SIGSTOP)
    waiting = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(5000):
            sock = socket.socket(socket.AF_UNIX)
            waiting.append(sock)
            sock.setblocking(False)
            sock.connect(str(folder.socket))
        raise AssertionError("the queue is never full")
    loader = node_loader(store)
    began = time.monotonic()
    assert sum(len(b[2]) for b in seen(loader)) == len(store)
    assert time.monotonic() - began < 15
    assert report_of(loader).node_batches == 0
    loader.close()
    with pytest.raises((NodeError, LinkLost)):
        ask_status(folder)
    monkeypatch.setattr(runtime, "STOP_S", 2.0)
    with pytest.raises(NodeError, match="does not end"):
        stop(folder)
    assert stop(folder, force=True) == one.process.pid
    one.process.wait(20)
    assert one.process.returncode == -signal.SIGKILL
    for sock in waiting:
        sock.close()
    assert not folder.path.exists()
