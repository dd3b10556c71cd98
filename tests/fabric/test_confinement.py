"""A confined target serves, and does nothing else."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fabric.conftest import HOST, NQN, OTHER_HOST, write_disk
from headrace.errors import FabricError
from headrace.fabric import pdu as wire
from headrace.fabric.command import Admin, Completion, Feature, LogPage, Sqe
from headrace.fabric.confinement import Confinement, confine_calls
from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import Host, HostOptions, discover
from headrace.fabric.queue import Queue
from tests_shared import until

_NAMESPACE_NOTICES = 1 << 8

SECCOMP = platform.machine() in {"x86_64", "aarch64"}


class Confined:
    """The process of confined.py."""

    def __init__(self, walls, *paths):
        program = Path(__file__).with_name("confined.py")
        self.process = subprocess.Popen(
            [sys.executable, program, walls, NQN, *paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.walls = self.answer()
        self.address = tuple(self.walls["address"])

    def answer(self):
        return json.loads(self.process.stdout.readline() or "null")

    def ask(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.answer()

    def url(self, nsid=1):
        return f"nvme+tcp://127.0.0.1:{self.address[1]}/{NQN}?ns={nsid}"

    def end(self):
        """The exit status, and what was said on stderr."""
        _, said = self.process.communicate(timeout=20)
        return self.process.returncode, said


@pytest.fixture
def disks(tmp_path):
    return [
        (tmp_path / name, write_disk(tmp_path / name, seed)) for seed, name in enumerate("ab", 1)
    ]


@pytest.fixture
def confined(disks):
    made = Confined("all", *(path for path, _ in disks))
    yield made
    assert made.end() == (0, "")


def check(confined, data, nsid=1, **host):
    options = EngineOptions(host=HostOptions(timeout_s=5, **host))
    with FabricEngine(HOST, options) as fabric:
        fabric.open(confined.url(nsid))
        dest = np.zeros(len(data), np.uint8)
        found = fabric.read_many(confined.url(nsid), np.array([0]), np.array([len(data)]), dest)
        assert found.tolist() == [len(data)]
        assert np.array_equal(dest, data)


@pytest.mark.skipif(not SECCOMP, reason="no filter for this architecture")
def test_nothing_but_serving_is_possible(confined, disks):
    path, data = disks[0]
    said = confined.ask("probe")
    assert confined.walls["seccomp"], "this kernel has no seccomp"
    for thread in ("main", "thread"):
        assert {
            name for name, how in said[thread].items() if how not in {"EPERM", "EACCES"}
        } == set()
        assert said[thread]["execute"] == "EPERM"
    assert np.array_equal(np.fromfile(path, np.uint8), data)  # nothing happened to it
    assert not Path(f"{path}.new").exists()
    assert confined.ask("read") == data[:16].tobytes().hex()  # what was open is


def test_landlock_alone_keeps_files_and_processes_out_of_reach(disks):
    made = Confined("files", *(path for path, _ in disks))
    said = made.ask("probe")
    assert made.end() == (0, "")
    if not made.walls["landlock"]:
        assert subprocess.run(["grep", "-qw", "landlock", "/proc/kallsyms"], check=False).returncode
        pytest.skip("this kernel has no Landlock")
    assert not made.walls["seccomp"]
    for thread in ("main", "thread"):
        refused = {name for name, how in said[thread].items() if how == "EACCES"}
        assert refused >= {"read /etc/passwd", "open what is exported again", "create", "remove"}
        assert refused >= {"write what is exported", "list", "execute"}


@pytest.mark.skipif(not SECCOMP, reason="no filter for this architecture")
def test_seccomp_alone_refuses_every_other_call(disks):
    made = Confined("calls", *(path for path, _ in disks))
    said = made.ask("probe")
    assert made.walls == {**made.walls, "landlock": 0, "seccomp": True}
    assert set(said["main"].values()) == set(said["thread"].values()) == {"EPERM"}
    assert made.end() == (0, "")


@pytest.mark.parametrize("hdgst", [False, True])
@pytest.mark.parametrize("ddgst", [False, True])
def test_reads_with_digests_and_without(confined, disks, hdgst, ddgst):
    for nsid, (_, data) in enumerate(disks, 1):
        check(confined, data, nsid, hdgst=hdgst, ddgst=ddgst)


def test_cold_reads_start_threads(confined, disks):
    path, data = disks[0]
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    check(confined, data)
    assert confined.ask("figures")["reads"] >= 1
    # tmpfs cannot tell what is cold, and a cache that was not dropped is not.
    if confined.ask("figures")["reads_cold"]:
        assert confined.ask("probe")["thread"]["fork"] == "EPERM"


def test_hosts_come_and_go_and_discover(confined, disks):
    _, data = disks[0]
    for _ in range(3):
        check(confined, data)
    with (
        Host(confined.address, NQN, HOST) as one,
        Host(confined.address, NQN, OTHER_HOST) as two,
    ):
        assert set(one.namespaces()) == set(two.namespaces()) == {1, 2}
        assert len(one.log_page(LogPage.SMART, 512)) == 512
        assert [entry.subnqn for entry in discover(confined.address, HOST)] == [NQN]
    with pytest.raises(FabricError, match="connect invalid parameters"):
        Host(confined.address, f"{NQN}-other", HOST)


def test_a_lost_connection_is_made_anew(confined, disks):
    _, data = disks[0]
    options = EngineOptions(host=HostOptions(timeout_s=5), command_timeout_s=5)
    with FabricEngine(HOST, options) as fabric:
        fabric.open(confined.url())
        (peer,) = fabric._peers.values()
        peer.host._admin._socket.shutdown(2)  # its target ends the association
        until(lambda: fabric.figures()["reconnects"])
        dest = np.zeros(len(data), np.uint8)
        found = fabric.read_many(confined.url(), np.array([0]), np.array([len(data)]), dest)
        assert found.tolist() == [len(data)]
        assert np.array_equal(dest, data)


class Listening(Queue):
    """A host's queue that asks for an asynchronous event, which stays live while other commands come and go."""

    _EVENT_CID = 0xF000

    def ask_event(self):
        self.events = []
        sqe = Sqe(Admin.ASYNC_EVENT, cid=self._EVENT_CID)
        self._send(wire.encode(wire.Type.CAPSULE_CMD, sqe.pack(), form=self._format))

    def _take(self, pdu, *expected):
        end = wire.COMMON.size + 16
        if (event := Completion.unpack(pdu.header[end - 16 : end])).cid != self._EVENT_CID:
            return super()._take(pdu, *expected)
        self.events.append(event)
        return None


def test_a_namespace_goes_and_hosts_are_told(confined, monkeypatch):
    monkeypatch.setattr("headrace.fabric.host.Queue", Listening)
    with Host(confined.address, NQN, HOST) as host:
        notices = Sqe(Admin.SET_FEATURES, cdw10=Feature.ASYNC_EVENTS, cdw11=_NAMESPACE_NOTICES)
        host._command(notices, what="Set Features")
        with host._lock:
            host._admin.ask_event()
        assert set(host.namespaces()) == {1, 2}
        assert not host._admin.events
        assert confined.ask("remove 2") is None
        until(lambda: set(host.namespaces()) == {1} and host._admin.events)


def test_hostile_bytes_end_one_connection(confined, disks):
    queue = Queue(confined.address, offered=0, timeout_s=5)
    queue._socket.sendall(b"\xff" * 128)
    until(lambda: confined.ask("figures")["connections"] == 0)
    queue.close()
    check(confined, disks[0][1])


def test_without_what_it_builds_on_there_is_no_wall():
    nothing = Confinement()
    assert confine_calls(nothing) == nothing
    assert str(nothing).startswith("none")
    assert str(Confinement(no_new_privileges=True, landlock=3)) == "no new privileges, Landlock 3"
