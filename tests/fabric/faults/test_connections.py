"""Hosts that take up a target's connections, memory or time: others are served all the while."""

import contextlib
import logging
import resource
import socket
import struct
import time
from pathlib import Path

import pytest

from fabric.conftest import HOST, NQN, OTHER_HOST
from fabric.faults.hostile_host import READ, check_alive, command, line
from fabric.faults.tally import count
from headrace.fabric import target as target_module
from headrace.fabric.command import Admin, Sqe
from headrace.fabric.host import Host, HostOptions
from headrace.fabric.identity import HostIdentity
from headrace.fabric.pdu import icreq
from headrace.fabric.queue import CommandFailed
from tests_shared import until

WANTED = 10_000
SPARE = 700
"""Descriptors for the target's own ends (at most 512 handshakes) and for all else."""
MEMORY_MAX = 96 << 20


def memory() -> int:
    """Resident bytes of this process, where target and hostile hosts live together."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def descriptors():
    """As many as the system gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def reset(sock):
    """Ends a connection with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_10_000_half_open_connections(target, descriptors):
    """They send the half of an ICReq, or nothing, and stay."""
    number = min(WANTED, descriptors - SPARE - len(list(Path("/proc/self/fd").iterdir())))
    if number < WANTED:
        print(f"{number} half-open connections instead of {WANTED}: RLIMIT_NOFILE is {descriptors}")
    assert number > 200
    before = memory()
    with contextlib.ExitStack() as opened:
        most = 0
        for each in range(number):
            sock = opened.enter_context(socket.create_connection(target.target.address, timeout=30))
            if each % 2:
                with contextlib.suppress(OSError):  # older ones are closed meanwhile
                    sock.sendall(icreq(0)[:64])
            if each % 1000 == 999:
                check_alive(target)
                most = max(most, target.target.figures()["connections"])
        until(lambda: target.target.figures()["connections"] <= 513, 10)
        check_alive(target)
        grown = memory() - before
    assert 0 < most <= 520
    assert grown < MEMORY_MAX
    count("half-open connections", number, number)
    print(f"at most {most} of them at once, {grown >> 10} KiB more")


def test_hosts_that_do_not_read_their_data(target):
    """What a target holds for a queue is bounded, whatever the host asks for."""
    before = memory()
    asked = READ._replace(sgl_length=1 << 20, cdw12=2047)
    stuck = 0
    with contextlib.ExitStack() as opened:
        options = HostOptions(timeout_s=20, hdgst=False, ddgst=False, entries=1024)
        host = opened.enter_context(Host(target.target.address, NQN, OTHER_HOST, options))
        for queue in host.open_queues(8):
            sock = opened.enter_context(queue.socket)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(1)
            for cid in range(256):
                sock.sendall(command(asked._replace(cid=cid)))
            stuck += 1
        until(lambda: target.target.figures()["queues"] == 8)
        time.sleep(0.2)  # it reads ahead what it may
        check_alive(target)
        grown = memory() - before
    assert grown < MEMORY_MAX  # of 2 GiB that were asked for
    until(lambda: target.target.figures()["queues"] == 0)
    count("slow readers", stuck, stuck)
    print(f"{grown >> 20} MiB held for 2048 MiB that were asked for and not read")


def test_a_host_that_does_not_read_its_admin_answers(target, caplog):
    """However many commands lie in the sockets before the target sees them: it holds few answers."""
    caplog.set_level(logging.INFO, "headrace.fabric")
    before, sent = memory(), 0
    with line(target, "admin") as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(command(Sqe(0x7F, 0, 0, cdw11=0x14, cdw12=0x460001)))
        with pytest.raises(ConnectionError):
            while memory() - before < MEMORY_MAX:
                sock.sendall(command(Sqe(Admin.IDENTIFY, 1, 0, 0, 4096, 0x5A, 1)))
                sent += 1
        until(lambda: target.target.figures()["associations"] == 0)
    assert sent > 1000
    assert "the host does not read what it asked for" in caplog.text
    check_alive(target)
    count("slow readers")


def test_a_host_that_sends_a_byte_now_and_then(target, monkeypatch):
    """Its time ends, however busy it seems."""
    monkeypatch.setattr(target_module, "HANDSHAKE_S", 2.0)
    dripped = 0
    with socket.create_connection(target.target.address, timeout=0.1) as sock:
        for byte in icreq(0):
            try:
                sock.sendall(bytes((byte,)))
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                dripped += 1
            except OSError:
                break
        else:
            pytest.fail("the target waits for ever")
    assert dripped > 3
    until(lambda: target.target.figures()["connections"] == 0)
    check_alive(target)
    count("slow drips")


def test_a_host_that_drips_commands_into_an_io_queue(target):
    """It holds its own queue alone."""
    with line(target, "io") as sock:
        for byte in command()[:40]:
            sock.sendall(bytes((byte,)))
            time.sleep(0.002)
        check_alive(target)
        sock.sendall(command()[40:])
        assert len(sock.recv(24 + 512, socket.MSG_WAITALL)) == 536
    count("slow drips")


STAGES = [
    "nothing",
    "half ICReq",
    "ICReq",
    "half Connect",
    "admin",
    "half command",
    "io",
    "io busy",
]


@pytest.mark.parametrize("stage", STAGES)
def test_a_host_that_resets_its_connection(target, stage):
    for _ in range(5):
        if stage in {"admin", "half command", "io", "io busy"}:
            place = "io" if stage.startswith("io") else "admin"
            with line(target, place) as sock:
                if stage == "half command":
                    sock.sendall(command()[:30])
                if stage == "io busy":
                    many = READ._replace(sgl_length=1 << 20, cdw12=2047)
                    sock.sendall(b"".join(command(many._replace(cid=cid)) for cid in range(30)))
                reset(sock)
        else:
            sock = socket.create_connection(target.target.address, timeout=20)
            sent = {
                "half ICReq": icreq(0)[:50],
                "ICReq": icreq(0),
                "half Connect": icreq(0) + b"\4\0H",
            }
            sock.sendall(sent.get(stage, b""))
            reset(sock)
    until(lambda: target.target.figures()["connections"] == 0)
    until(lambda: target.target.figures()["queues"] == 0)
    until(lambda: target.target.figures()["associations"] == 0)
    check_alive(target)
    count("resets by hosts", 5, 5)


def test_two_hosts_with_one_identifier(target):
    """The second is refused while the first is there, and let in when it is gone."""
    twin = HostIdentity(OTHER_HOST.nqn, HOST.id)
    refused = 0
    with Host(target.target.address, NQN, HOST, HostOptions(timeout_s=20)) as host:
        for _ in range(5):
            with pytest.raises(CommandFailed, match="connect invalid host"):
                Host(target.target.address, NQN, twin, HostOptions(timeout_s=20))
            refused += 1
        assert host.namespaces()
    until(lambda: target.target.figures()["associations"] == 0)
    with Host(target.target.address, NQN, twin, HostOptions(timeout_s=20)) as host:
        assert host.namespaces()
    count("twins of hosts", refused, target.target.figures()["connects_refused"])


@pytest.mark.parametrize(
    "subnqn", [NQN + "-x", NQN[:-1], NQN.upper(), "nqn.2014-08.org.nvmexpress:x"]
)
def test_a_wrong_nqn(target, subnqn):
    with pytest.raises(CommandFailed, match="connect invalid parameters"):
        Host(target.target.address, subnqn, HOST, HostOptions(timeout_s=20))
    check_alive(target)
    count("wrong names", 1, target.target.figures()["connects_refused"])
