"""A host and a target over real sockets: who may connect, and what the control path finds."""

import socket
import time

import pytest

from fabric.conftest import HOST, NQN, OTHER_HOST, write_disk
from headrace.errors import FabricError
from headrace.fabric.command import DISCOVERY_NQN, LogPage, Status
from headrace.fabric.host import Host, HostOptions, discover
from headrace.fabric.identity import HostIdentity
from headrace.fabric.queue import CommandFailed
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target, TargetOptions
from tests_shared import until

QUICK = HostOptions(timeout_s=5)


def test_a_host_finds_controller_and_namespace(exported):
    with Host(exported.target.address, NQN, HOST, QUICK) as host:
        assert host.controller.model == "headrace"
        assert host.controller.subnqn == NQN
        namespaces = host.namespaces()
        assert list(namespaces) == [1]
        assert namespaces[1] == host.namespace(1)
        assert namespaces[1].blocks * 512 - 512 < len(exported.data) <= namespaces[1].blocks * 512
        assert len(host.log_page(LogPage.SMART, 512)) == 512
        with pytest.raises(FabricError, match="no namespace 2"):
            host.namespace(2)
    until(lambda: exported.target.figures()["associations"] == 0)


@pytest.mark.parametrize("hdgst", [False, True])
@pytest.mark.parametrize("ddgst", [False, True])
@pytest.mark.parametrize("taken", [False, True])
def test_digests_are_those_that_both_want(tmp_path, hdgst, ddgst, taken):
    write_disk(tmp_path / "disk")
    subsystem = Subsystem(NQN)
    subsystem.add(tmp_path / "disk")
    options = HostOptions(timeout_s=5, hdgst=hdgst, ddgst=ddgst)
    with (
        Target([subsystem], ("127.0.0.1", 0), TargetOptions(digests=taken)) as target,
        Host(target.address, NQN, HOST, options) as host,
    ):
        queues = host.open_queues(2)
        assert [q.qid for q in queues] == [1, 2]
        assert all(q.dgst == (hdgst | ddgst << 1 if taken else 0) for q in queues)
        assert not any(q.flow_control for q in queues)
        until(lambda: target.figures()["queues"] == 2)
        for queue in queues:
            queue.socket.close()
        until(lambda: target.figures()["queues"] == 0)


def test_discovery_names_only_what_the_host_may_use(tmp_path):
    write_disk(tmp_path / "disk")
    mine = Subsystem(NQN, hosts=[HOST.nqn])
    theirs = Subsystem(NQN + "-b", hosts=[OTHER_HOST.nqn])
    with Target([mine, theirs], ("127.0.0.1", 0)) as target:
        assert [(e.subnqn, e.address, e.port) for e in discover(target.address, HOST, QUICK)] == [
            (NQN, "127.0.0.1", target.address[1])
        ]
        assert [e.subnqn for e in discover(target.address, OTHER_HOST, QUICK)] == [NQN + "-b"]


def refused(target, subnqn, identity, options=QUICK):
    with pytest.raises(CommandFailed) as failed:
        Host(target.address, subnqn, identity, options)
    return failed.value.status & 0x7FF


def test_a_host_that_is_not_listed_is_refused(tmp_path):
    write_disk(tmp_path / "disk")
    subsystem = Subsystem(NQN, hosts=[HOST.nqn])
    subsystem.add(tmp_path / "disk")
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        assert refused(target, NQN, OTHER_HOST) == Status.CONNECT_INVALID_HOST
        assert target.figures()["connects_refused"] == 1
        with Host(target.address, NQN, HOST, QUICK) as host:
            assert host.namespaces()


def test_a_subsystem_that_is_not_there_is_refused(exported):
    assert refused(exported.target, NQN + "-x", HOST) == Status.CONNECT_INVALID_PARAMETERS


def test_a_second_host_with_the_same_identifier_is_refused(exported):
    twin = HostIdentity(OTHER_HOST.nqn, HOST.id)
    with Host(exported.target.address, NQN, HOST, QUICK):
        assert refused(exported.target, NQN, twin) == Status.CONNECT_INVALID_HOST
        with Host(exported.target.address, NQN, OTHER_HOST, QUICK):
            pass


def test_an_io_queue_of_another_host_is_refused(exported):
    with Host(exported.target.address, NQN, HOST, QUICK) as host:
        mine, host.identity = host.identity, OTHER_HOST
        with pytest.raises(CommandFailed) as failed:
            host.open_queues(1)
        assert failed.value.status & 0x7FF == Status.CONNECT_INVALID_PARAMETERS
        host.identity = mine
        host.open_queues(1)[0].socket.close()


def test_associations_are_bounded(exported, tmp_path):
    with (
        Target([exported.subsystem], ("127.0.0.1", 0), TargetOptions(associations_max=1)) as target,
        Host(target.address, NQN, HOST, QUICK),
    ):
        assert refused(target, NQN, OTHER_HOST) == Status.CONNECT_CONTROLLER_BUSY


def test_a_host_that_falls_silent_is_dropped_with_its_queues(exported):
    options = HostOptions(timeout_s=5, kato_ms=1000)
    host = Host(exported.target.address, NQN, HOST, options)
    queue = host.open_queues(1)[0]
    time.sleep(3.0)  # kept alive meanwhile: a second later than it may be silent
    assert host.failure is None
    host._closing.set()  # its keep-alive thread ends: the host hangs
    host._keeper.join()
    until(lambda: exported.target.figures()["associations"] == 0)
    until(lambda: exported.target.figures()["queues"] == 0)
    assert queue.socket.recv(1) == b""
    queue.socket.close()
    host._admin.close()


def test_keep_alive_finds_a_target_that_is_gone(exported):
    host = Host(exported.target.address, NQN, HOST, HostOptions(timeout_s=5, kato_ms=200))
    exported.target.close()
    until(lambda: host.failure is not None)
    with pytest.raises(FabricError):
        host.namespaces()
    host.close()


def test_a_namespace_that_goes_is_told_and_its_reads_are_refused(exported, tmp_path):
    write_disk(tmp_path / "second", seed=2)
    exported.subsystem.add(tmp_path / "second")
    with Host(exported.target.address, NQN, HOST, QUICK) as host:
        assert list(host.namespaces()) == [1, 2]
        exported.subsystem.remove(2)
        assert list(host.namespaces()) == [1]


def test_half_open_connections_are_bounded_and_others_are_served(exported):
    options = TargetOptions(handshakes_max=16)
    with Target([exported.subsystem], ("127.0.0.1", 0), options) as target:
        idle = [socket.create_connection(target.address) for _ in range(200)]
        with Host(target.address, NQN, HOST, QUICK) as host:
            assert host.namespaces()
        until(lambda: target.figures()["connections"] <= 17, 5)  # sooner than their time ends
        for each in idle:
            each.close()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(FabricError, match=r"127.0.0.1:\d+"):
        Host(address, NQN, HOST, QUICK)


def test_what_listens_is_no_target():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(FabricError, match="answer"),
    ):
        Host(server.getsockname(), NQN, HOST, HostOptions(timeout_s=0.3))


def test_the_discovery_subsystem_has_no_io_queues(exported):
    with Host(exported.target.address, DISCOVERY_NQN, HOST, QUICK) as host:
        assert host.controller.kind == 2
        with pytest.raises(CommandFailed):
            host.open_queues(1)


def test_a_port_that_is_taken(exported):
    with pytest.raises(FabricError, match="cannot listen"):
        Target([], exported.target.address)


@pytest.mark.parametrize(
    "nqn", ["", "nqn", "nqn.2026-11", "iqn.2026-11.io.x:y", "nqn.2026-11.io.x:" + "y" * 300]
)
def test_names_that_are_no_nqn(nqn):
    with pytest.raises(ValueError, match="no NQN"):
        HostIdentity(nqn, bytes(range(16)))
    with pytest.raises(ValueError, match="no NQN"):
        Subsystem(nqn)


def test_what_cannot_be_exported(tmp_path):
    subsystem = Subsystem(NQN)
    (tmp_path / "empty").touch()
    with pytest.raises(FabricError, match="empty"):
        subsystem.add(tmp_path / "empty")
    with pytest.raises(FabricError, match="neither"):
        subsystem.add(tmp_path)
    with pytest.raises(FabricError, match="No such file"):
        subsystem.add(tmp_path / "missing")
    assert subsystem.namespaces == {}
