"""Hosts and targets that authenticate over real sockets: who gets in, on each queue, and who does not."""

import contextlib
import logging
import socket
import threading
import traceback

import numpy as np
import pytest

from fabric.chap import reference
from fabric.conftest import HOST, NQN, OTHER_HOST, write_disk
from fabric.faults.tally import count
from headrace.errors import AuthenticationFailed, FabricError
from headrace.fabric.chap import AUTH_DWORDS, DhGroup, Parties
from headrace.fabric.chap_exchange import Exchange
from headrace.fabric.command import (
    AUTHREQ_ASCR,
    AUTHREQ_ATR,
    DISCOVERY_NQN,
    Admin,
    Completion,
    Fabrics,
    Sqe,
    Status,
    fabrics_command,
)
from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import Host, HostOptions, discover
from headrace.fabric.identity import Hash, HostIdentity, HostSecret, Secret
from headrace.fabric.pdu import Type, encode, icresp
from headrace.fabric.queue import CommandFailed, Queue
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target, TargetOptions
from tests_shared import until

FAST = (DhGroup.NULL,)
PARTIES = Parties(HOST.nqn, NQN)
A, B, C = (reference.secret_text(bytes(range(at, at + 32)), 1) for at in (1, 60, 120))


def options(**more):
    return HostOptions(**{"timeout_s": 5, "dhchap_groups": FAST, **more})


@contextlib.contextmanager
def serving(tmp_path, hosts, secret=None, **more):
    path = tmp_path / "disk"
    data = write_disk(path)
    subsystem = Subsystem(NQN, hosts, secret=secret)
    subsystem.add(path)
    with Target([subsystem], ("127.0.0.1", 0), TargetOptions(**more)) as target:
        target.data = data
        yield target
    subsystem.close()


@pytest.fixture
def target(tmp_path):
    with serving(
        tmp_path, {HOST.nqn: HostSecret.read(A, B), OTHER_HOST.nqn: HostSecret.read(C)}
    ) as it:
        yield it


@pytest.mark.parametrize("group", [DhGroup.NULL, DhGroup.FFDHE2048, DhGroup.FFDHE3072])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("digests", [False, True])
def test_the_right_secrets(target, group, both, digests):
    given = options(dhchap_secret=A, dhchap_controller_secret=B if both else None,
                    dhchap_groups=(group,), hdgst=digests, ddgst=digests)  # fmt: skip
    with Host(target.address, NQN, HOST, given) as host:
        assert list(host.namespaces()) == [1]
        queues = host.open_queues(2)
        until(lambda: target.figures()["queues"] == 2)
        for queue in queues:
            queue.socket.close()


@pytest.mark.parametrize("hash_", Hash)
def test_every_hash(target, hash_):
    with Host(target.address, NQN, HOST, options(dhchap_secret=A, dhchap_hashes=(hash_,))) as host:
        assert host.namespaces()


def test_an_engine_reads_and_reconnects(target, tmp_path):
    url = f"nvme+tcp://127.0.0.1:{target.address[1]}/{NQN}?ns=1"
    given = options(dhchap_secret=A, dhchap_controller_secret=B)
    with FabricEngine(HOST, EngineOptions(host=given, give_up_s=30)) as engine:
        engine.open(url)
        dest = np.zeros(100_000, np.uint8)
        read = (np.array([777]), np.array([100_000]), dest)
        assert engine.read_many(url, *read).tolist() == [100_000]
        assert np.array_equal(dest, target.data[777:100_777])
        target._loop.call_soon(lambda: target._close(next(iter(target._joined.values())).line))
        until(lambda: engine.figures()["reconnects"] == 1)
        assert engine.read_many(url, *read, 20.0).tolist() == [100_000]


def test_one_secret_for_all_hosts(tmp_path):
    """It is transformed for each name: hosts with one secret prove different things."""
    with serving(tmp_path, None, HostSecret.read(A)) as target:
        for identity in (HOST, OTHER_HOST):
            with Host(target.address, NQN, identity, options(dhchap_secret=A)) as host:
                assert host.namespaces()
        with pytest.raises(AuthenticationFailed):
            Host(target.address, NQN, HOST, options(dhchap_secret=C))


REFUSED = {
    "no secret": (HOST, {}, "this host has no secret"),
    "wrong": (HOST, {"dhchap_secret": C}, "does not believe this host"),
    "another host's": (OTHER_HOST, {"dhchap_secret": A}, "does not believe this host"),
    "wrong controller's": (
        HOST, {"dhchap_secret": A, "dhchap_controller_secret": C}, "does not know the secret",
    ),
    "controller has none": (
        OTHER_HOST, {"dhchap_secret": C, "dhchap_controller_secret": B}, "does not believe",
    ),
}  # fmt: skip


@pytest.mark.parametrize("group", [DhGroup.NULL, DhGroup.FFDHE2048])
@pytest.mark.parametrize("name", REFUSED)
def test_who_is_refused(target, name, group):
    identity, given, told = REFUSED[name]
    with pytest.raises(AuthenticationFailed, match=told) as refused:
        Host(target.address, NQN, identity, options(**given, dhchap_groups=(group,)))
    assert refused.value.next_step
    until(lambda: target.figures()["associations"] == 0)
    with Host(target.address, NQN, HOST, options(dhchap_secret=A)) as host:
        assert host.namespaces()


def test_a_host_that_is_not_listed_has_nothing_to_prove(target):
    stranger = HostIdentity("nqn.2026-11.io.example:stranger", bytes(range(9, 25)))
    with pytest.raises(CommandFailed) as refused:
        Host(target.address, NQN, stranger, options(dhchap_secret=A))
    assert refused.value.status & 0x7FF == Status.CONNECT_INVALID_HOST


def test_a_target_that_does_not_authenticate_is_refused_by_a_host_that_wants_it(tmp_path):
    with serving(tmp_path, None) as target:
        with pytest.raises(AuthenticationFailed, match="does not authenticate at all"):
            Host(target.address, NQN, HOST, options(dhchap_secret=A, dhchap_controller_secret=B))
        with Host(target.address, NQN, HOST, options(dhchap_secret=A)) as host:
            assert host.namespaces()


def test_a_secure_channel_is_not_spoken(target, monkeypatch):
    monkeypatch.setattr("headrace.fabric.command.AUTHREQ_ATR", AUTHREQ_ASCR)
    with pytest.raises(AuthenticationFailed, match="secure channel"):
        Host(target.address, NQN, HOST, options(dhchap_secret=A))


def test_discovery_asks_for_nothing(target):
    assert [e.subnqn for e in discover(target.address, HOST, options())] == [NQN]
    with Host(target.address, DISCOVERY_NQN, HOST, options(dhchap_secret=A)) as host:
        assert host.controller.kind == 2


# -- before authentication ------------------------------------------------------------------------


def connected(target, identity=HOST, qid=0, cntlid=0xFFFF):
    queue = Queue(target.address, offered=0, timeout_s=5)
    try:
        return queue, queue.connect(identity, NQN, qid=qid, entries=32, cntlid=cntlid).result
    except CommandFailed:
        queue.close()
        raise


def status_of(queue, sqe, data=b"", expect=0):
    with pytest.raises(CommandFailed) as failed:
        queue.command(sqe, data=data, expect=expect)
    return failed.value.status & 0x7FF


COMMANDS = {
    "Property Get": fabrics_command(Fabrics.PROPERTY_GET, bytes(24)),
    "Property Set": fabrics_command(
        Fabrics.PROPERTY_SET, bytes(4) + b"\x14" + bytes(3) + b"\1" + bytes(15)
    ),
    "Identify": Sqe(Admin.IDENTIFY, cdw10=1),
    "Set Features": Sqe(Admin.SET_FEATURES, cdw10=7),
    "Get Log Page": Sqe(Admin.GET_LOG_PAGE, cdw10=0x70),
    "Keep Alive": Sqe(Admin.KEEP_ALIVE),
    "Async Event": Sqe(Admin.ASYNC_EVENT),
    "Connect": fabrics_command(Fabrics.CONNECT, bytes(24)),
    "Read": Sqe(2, nsid=1),
    "Vendor": Sqe(0xC0),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_else_is_answered_before_authentication(target, name):
    queue, result = connected(target)
    assert result >> 17 == 1
    assert status_of(queue, COMMANDS[name]) == Status.AUTHENTICATION_REQUIRED
    queue.close()


def test_an_io_queue_authenticates_for_itself(target):
    """A connected one without its own proof reads nothing, though the admin queue gave one."""
    with Host(target.address, NQN, HOST, options(dhchap_secret=A)) as host:
        queue, result = connected(target, qid=1, cntlid=host.cntlid)
        assert result >> 17 == 1
        assert status_of(queue, Sqe(2, nsid=1)) == Status.AUTHENTICATION_REQUIRED
        assert target.figures()["queues"] == 0
        queue.close()
        until(lambda: target.figures()["connections"] == 1)
        queues = host.open_queues(1)  # the number is free again
        assert queues[0].qid == 1
        queues[0].socket.close()


def test_an_io_queue_s_wrong_proof_is_refused(target):
    with Host(target.address, NQN, HOST, options(dhchap_secret=A)) as host:
        host._chap = options(dhchap_secret=C).chap(host._chap.parties)
        with pytest.raises(AuthenticationFailed):
            host.open_queues(1)
        assert target.figures()["queues"] == 0
        assert host.namespaces()  # the association lives


def auth(fctype, message=b"", spsp=(1, 1), secp=0xE9, length=None, sgl=None):
    length = len(message) if length is None else length
    sqe = fabrics_command(fctype, AUTH_DWORDS.pack(*spsp, secp, length), len(message))
    return sqe if sgl is None else sqe._replace(**sgl)


NEGOTIATE = reference.negotiate(1)
SEND, RECEIVE = Fabrics.AUTH_SEND, Fabrics.AUTH_RECEIVE
WRONG_FIELDS = {
    "SECP": (auth(SEND, NEGOTIATE, secp=0xEA), Status.INVALID_FIELD),
    "SPSP0": (auth(SEND, NEGOTIATE, spsp=(0, 1)), Status.INVALID_FIELD),
    "SPSP1": (auth(SEND, NEGOTIATE, spsp=(1, 2)), Status.INVALID_FIELD),
    "TL 0": (auth(SEND, NEGOTIATE, length=0), Status.INVALID_FIELD),
    "TL below": (auth(SEND, NEGOTIATE, length=71), Status.SGL_LENGTH_INVALID),
    "TL above": (auth(SEND, NEGOTIATE, length=2**32 - 1), Status.SGL_LENGTH_INVALID),
    "SGL length": (auth(SEND, NEGOTIATE, sgl={"sgl_length": 71}), Status.SGL_LENGTH_INVALID),
    "SGL type": (auth(SEND, NEGOTIATE, sgl={"sgl_type": 0x5A}), Status.SGL_LENGTH_INVALID),
    "receive SECP": (auth(RECEIVE, secp=0, length=4096), Status.INVALID_FIELD),
    "receive SPSP": (auth(RECEIVE, spsp=(0, 0), length=4096), Status.INVALID_FIELD),
    "AL 0": (auth(RECEIVE, length=0), Status.INVALID_FIELD),
    "AL below": (auth(RECEIVE, length=4), Status.INVALID_FIELD),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_a_wrong_field_of_the_command_is_refused_and_the_exchange_lives(target, name):
    sqe, status = WRONG_FIELDS[name]
    queue, _ = connected(target)
    if name.startswith(("receive", "AL")):
        sqe = sqe._replace(sgl_type=0x5A, sgl_length=int.from_bytes(sqe.dwords[4:8], "little"))
        assert status_of(queue, sqe) == status
    else:
        assert status_of(queue, sqe, NEGOTIATE) == status
    queue.authenticate(Exchange(options(dhchap_secret=A).chap(PARTIES), 5))
    queue.close()


def test_who_does_not_authenticate_has_little_time(tmp_path):
    with serving(tmp_path, {HOST.nqn: HostSecret.read(A)}, authentication_s=3.0) as target:
        queue, _ = connected(target)
        queue._socket.settimeout(20)
        assert queue._socket.recv(1) == b""
        queue.close()
        until(lambda: target.figures()["associations"] == 0)


def test_who_has_not_authenticated_stands_in_nobody_s_way(tmp_path):
    """Neither as an association, nor with another host's identifier, nor as a connection."""
    thief = HostIdentity(OTHER_HOST.nqn, HOST.id)
    hosts = {HOST.nqn: HostSecret.read(A), thief.nqn: HostSecret.read(C)}
    with serving(tmp_path, hosts, associations_max=1, handshakes_max=8) as target:
        idle = [connected(target, thief)[0] for _ in range(30)]
        assert target.figures()["associations"] <= 9
        with Host(target.address, NQN, HOST, options(dhchap_secret=A)) as host:
            assert host.namespaces()
            with pytest.raises(CommandFailed) as failed:
                connected(target, thief)
            assert failed.value.status & 0x7FF == Status.CONNECT_INVALID_HOST
            # One that connected before, and proves who it is meanwhile, comes too late.
            thief_chap = options(dhchap_secret=C).chap(PARTIES._replace(hostnqn=thief.nqn))
            with pytest.raises(FabricError):
                idle[-1].authenticate(Exchange(thief_chap, 1))
            assert host.namespaces()
        for queue in idle:
            queue.close()


def test_authenticating_again_on_the_admin_queue(target):
    with Host(target.address, NQN, HOST, options(dhchap_secret=A)) as host:
        host._admin.authenticate(Exchange(host._chap, 9))
        assert host.namespaces()
        wrong = options(dhchap_secret=C).chap(host._chap.parties)
        with pytest.raises(AuthenticationFailed):
            host._admin.authenticate(Exchange(wrong, 10))
        until(lambda: target.figures()["associations"] == 0)


# -- what a target might do to a host -------------------------------------------------------------


def test_a_target_that_falls_silent_is_an_error_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock, _ = server.accept()
            with sock:
                sock.recv(128, socket.MSG_WAITALL)
                sock.sendall(icresp(0, 4096))
                sock.recv(72 + 1024, socket.MSG_WAITALL)
                sock.sendall(encode(Type.CAPSULE_RESP, Completion(1, 0, AUTHREQ_ATR | 1).pack()))
                while sock.recv(4096):
                    pass  # takes the AUTH_Negotiate and answers nothing

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(FabricError, match="did not answer within"):
            Host(server.getsockname(), NQN, HOST, options(dhchap_secret=A, timeout_s=0.3))
        thread.join(10)
        assert not thread.is_alive()


def test_no_secret_in_logs_errors_or_traces(tmp_path, caplog):
    """At DEBUG, over all ways to be refused, both secrets and what was derived of them."""
    forbidden = set()
    for text, nqn in ((A, HOST.nqn), (B, NQN), (C, HOST.nqn)):
        key = Secret(text).key(nqn)
        forbidden |= {text, text[10:40], key.hex(), repr(key), repr(key)[4:24]}
        forbidden |= {Secret(text)._bytes.hex(), repr(Secret(text)._bytes)}
    shown = []
    with (
        caplog.at_level(logging.DEBUG),
        serving(tmp_path, {HOST.nqn: HostSecret.read(A, B)}) as target,
    ):
        for given in (
            {},
            {"dhchap_secret": C},
            {"dhchap_secret": A, "dhchap_controller_secret": C},
        ):
            try:
                Host(target.address, NQN, HOST, options(**given))
            except AuthenticationFailed as e:
                shown += [repr(e), str(vars(e)), "".join(traceback.format_exception(e))]
        until(lambda: target.figures()["associations"] == 0)
        with Host(target.address, NQN, HOST, options(dhchap_secret=A)) as host:
            shown += [repr(host.options), repr(host._chap), repr(vars(host))]
            shown += [repr(vars(joined)) for joined in target._joined.values()]
    shown.append(caplog.text)
    assert "does not know the secret" in caplog.text
    assert len(shown) > 10
    for text in forbidden:
        assert not [each for each in shown if text in each]


def test_the_socket_closes_after_a_failure(target):
    queue, _ = connected(target)
    queue.command(auth(SEND, b"\0" * 16), data=b"\0" * 16)
    message = queue._auth_receive()
    assert message[:2] == b"\0\xf1"
    assert queue._socket.recv(1) == b""
    queue.close()
    assert isinstance(queue._socket, socket.socket)


class Recorder:
    """A proxy of one connection, and what the host said."""

    def __init__(self, address):
        self.said = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._thread = threading.Thread(target=self._serve, args=(address,))
        self._thread.start()

    def _serve(self, address):
        near, _ = self._server.accept()
        with near, socket.create_connection(address) as far:
            back = threading.Thread(target=self._back, args=(far, near))
            back.start()
            while received := near.recv(1 << 16):
                self.said += received
                far.sendall(received)
            far.shutdown(socket.SHUT_WR)
            back.join()

    @staticmethod
    def _back(far, near):
        with contextlib.suppress(OSError):
            while received := far.recv(1 << 16):
                near.sendall(received)

    def close(self):
        self._thread.join(10)
        self._server.close()


@pytest.mark.parametrize("group", [DhGroup.NULL, DhGroup.FFDHE2048])
def test_a_recorded_connection_cannot_be_played_again(target, group):
    """Every byte that a host sent, sent once more by who heard it."""
    recorder = Recorder(target.address)
    given = options(dhchap_secret=A, dhchap_controller_secret=B, dhchap_groups=(group,),
                    hdgst=False, ddgst=False, kato_ms=0)  # fmt: skip
    with Host(recorder.address, NQN, HOST, given) as host:
        assert host.namespaces()
    recorder.close()
    until(lambda: target.figures()["associations"] == 0)
    heard = b""
    with socket.create_connection(target.address, timeout=10) as sock, contextlib.suppress(OSError):
        sock.sendall(recorder.said)
        sock.shutdown(socket.SHUT_WR)
        while received := sock.recv(1 << 16):
            heard += received
    assert b"\0\xf1" in heard  # AUTH_Failure1
    assert b"headrace".ljust(40) not in heard  # the model, of Identify
    until(lambda: target.figures()["associations"] == 0)
    count("replayed connections")
