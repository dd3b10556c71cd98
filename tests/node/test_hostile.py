"""Clients that break the rules: each is shown the door, and the others notice nothing."""

import array
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.node import server as node_server
from headrace.node import wire
from headrace.node.link import LinkLost
from headrace.node.wire import (
    Ask,
    Hello,
    Hurry,
    Open,
    Opened,
    Release,
    ReplyStatus,
    Samples,
    StatusAsked,
    Welcome,
    encode,
)
from node.conftest import node_loader, report_of, seen, serving, until
from plane.conftest import SAMPLES

HELLO = encode(Hello(wire.PROTOCOL, "hostile"))


def raw(folder):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(folder.socket))
    return sock


def hung_up(sock):
    """Whether the daemon closes the connection, after whatever it says."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while sock.recv(65536):
            pass
    return True


@contextlib.contextmanager
def a_good_client(folder, store):
    """Runs beside the hostile one, and must get everything from the daemon."""
    loader = node_loader(store)
    iterator = iter(loader)
    next(iterator)
    yield
    assert sum(len(b) for b in iterator) == SAMPLES - 32
    assert report_of(loader).direct_batches == 0
    loader.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0),
        struct.pack("<I", 1 << 31),
        struct.pack("<I", wire.HELLO_BYTES_MAX + 1),  # small enough later, not before hello
        encode(StatusAsked(1)),  # before hello
        encode(Hello(99, "other version")),
        HELLO + HELLO,
        HELLO + encode(Welcome(ReplyStatus.OK, "", 1, 1, 1)),
        HELLO + struct.pack("<I", wire.FRAME_BYTES_MAX + 1),
        HELLO + encode(Ask(1, 1, bytes(8), [])),  # not opened
        HELLO + encode(Release([1])),
        HELLO + 2 * encode(StatusAsked(5)),  # replayed
        HELLO + encode(StatusAsked(5)) + encode(StatusAsked(4)),
    ],
    ids=range(13),
)
def test_what_breaks_the_protocol_ends_the_connection(folder, store, data):
    with serving(folder) as server, a_good_client(folder, store):
        before = server.describe()["protocol_errors"]
        sock = raw(folder)
        sock.sendall(data)
        assert hung_up(sock)
        sock.close()
        assert server.describe()["protocol_errors"] == before + 1


def test_another_version_is_told_so(folder):
    with serving(folder):
        sock = raw(folder)
        sock.sendall(encode(Hello(99, "x")))
        data = sock.recv(65536)
        (body,) = wire.Splitter().feed(data)
        assert wire.decode_reply(body).status is ReplyStatus.VERSION
        sock.close()


@given(st.lists(st.binary(max_size=200) | st.just(HELLO) | st.just(encode(StatusAsked(1)))))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_on_the_socket(garbage_server, garbage):
    """Whatever is said, the daemon lives and serves the next one."""
    folder, server = garbage_server
    sock = raw(folder)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for piece in garbage:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
    hung_up(sock)
    sock.close()
    assert server.describe()["pid"] == os.getpid()


@pytest.fixture
def garbage_server(folder, link):
    with serving(folder) as server:
        yield folder, server
        one = link()
        one.send(StatusAsked(one.new_ticket()))
        assert one.wait(wire.DaemonReport, 5).status is ReplyStatus.OK
        sessions = server.describe()["sessions_made"]
        assert sessions > 20  # they were there indeed


@given(st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_within_the_protocol(opened_server, data):
    """Well-formed messages with any numbers: answered, or the end of that connection."""
    folder, store, server = opened_server
    ticket = st.integers(1, 60)
    message = st.one_of(
        st.builds(
            Ask, ticket, st.integers(0, 3), st.binary(max_size=64), st.lists(ticket, max_size=3)
        ),
        st.builds(
            lambda t, i: Ask(t, 1, np.array(i, np.int64).tobytes(), []),
            ticket, st.lists(st.integers(-5, SAMPLES + 5), max_size=5),
        ),
        st.builds(Hurry, ticket),
        st.builds(Release, st.lists(ticket, max_size=3)),
        st.builds(wire.Abandon, st.lists(ticket, max_size=3)),
    )  # fmt: skip
    messages = data.draw(st.lists(message, max_size=8))
    sock = raw(folder)
    path = os.fsencode(store.path)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(HELLO + encode(Open(1, path, 1, store.fingerprint, [""], None)))
        for one in messages:
            sock.sendall(encode(one))
        sock.shutdown(socket.SHUT_WR)
    hung_up(sock)
    sock.close()
    until(lambda: not server.describe()["sessions"])
    until(lambda: not server.describe()["jobs"])  # nothing is held, nothing read


@pytest.fixture
def opened_server(folder, store):
    with serving(folder) as server:
        loader = node_loader(store)
        seen(loader)
        loader.close()
        until(lambda: not server.describe()["sessions"])
        yield folder, store, server


def test_a_slow_drip_ends_at_its_deadline(folder, store, monkeypatch):
    with serving(folder) as server, a_good_client(folder, store):
        monkeypatch.setattr(
            node_server, "MESSAGE_S", 0.3
        )  # now that the good one has said its hello
        drips = []
        for data in (b"", HELLO[:3], HELLO + HELLO[:3]):
            sock = raw(folder)
            sock.sendall(data)
            drips.append(sock)
        until(lambda: server.describe()["sessions_made"] >= 4)
        began = time.monotonic()
        for sock in drips:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(3):  # a byte now and then does not help
                    sock.send(b"\0")
                    time.sleep(0.05)
            assert hung_up(sock)
            sock.close()
        assert time.monotonic() - began < 10
        until(lambda: len(server.describe()["sessions"]) == 1)


def test_descriptors_of_a_client_are_not_taken(folder, store):
    with serving(folder) as server, a_good_client(folder, store):
        before = len(list(Path("/proc/self/fd").iterdir()))
        sock = raw(folder)
        fds = array.array("i", [0] * 50)
        sock.sendmsg([HELLO], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        sock.recv(100)
        assert len(server.describe()["sessions"]) == 2
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 10
        sock.close()


def test_more_clients_than_allowed_are_refused_and_read_directly(folder, store):
    with serving(folder, sessions_max=1) as server:
        first = node_loader(store)
        next(iter(first))
        second = node_loader(store)
        assert len(seen(second)) == 16
        assert report_of(second).direct_batches == 16
        assert "served already" in report_of(second).why
        assert server.describe()["refused"] == 1
        first.close()
        second.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_is_refused_by_the_kernels_word(folder, store):
    """P14: even where the folder lets it through."""
    code = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(10)\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s.connect(sys.argv[1]); data = s.recv(1000)\n"
        "sys.stdout.buffer.write(data); assert s.recv(1000) == b''"
    )
    with serving(folder) as server:
        folder.path.chmod(0o711)
        folder.path.parent.chmod(0o711)
        folder.socket.chmod(0o777)
        ended = subprocess.run(
            [sys.executable, "-c", code, folder.socket],
            check=False, capture_output=True, timeout=60,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr.decode()
        (body,) = wire.Splitter().feed(ended.stdout)
        assert wire.decode_reply(body).status is ReplyStatus.REFUSED
        assert server.describe()["refused"] == 1
        assert server.describe()["sessions"] == []
        folder.path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_daemon_of_another_user_is_not_believed(folder, store):
    """Somebody who got hold of the folder must not feed us."""
    code = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()\n"
        "print('listens', flush=True); sys.stdin.read()"
    )
    folder.path.mkdir(mode=0o700)
    folder.path.parent.chmod(0o711)
    os.chown(folder.path, 65534, 65534)
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"listens\n"
    os.chown(folder.path, 0, 0)
    loader = node_loader(store)
    seen(loader)
    assert "user 65534 listens there" in report_of(loader).why
    assert report_of(loader).node_batches == 0
    loader.close()
    process.communicate(timeout=10)
    folder.socket.unlink()


def opened(one, store):
    path = os.fsencode(store.path)
    one.send(Open(one.new_ticket(), path, 1, store.fingerprint, [""], None))
    return one.wait(Opened, 10).dataset


def test_a_client_that_never_gives_back_waits_and_others_do_not(folder, store, link):
    """Back-pressure: it holds its window and no more, until it says that it waits in vain."""
    window = 1 << 20
    with serving(folder, window_bytes=window) as server:
        greedy = link("greedy")
        number = opened(greedy, store)
        for k in range(40):
            indices = np.arange(k * 12, k * 12 + 12, dtype=np.int64) % SAMPLES
            greedy.send(Ask(greedy.new_ticket(), number, indices.tobytes(), []))
        until(lambda: _session(server, "greedy")["waiting"])
        with a_good_client(folder, store):
            pass
        until(lambda: not any(d["reading"] for d in server.describe()["datasets"]))
        session = _session(server, "greedy")
        assert session["waiting"] > 0
        assert 0 < session["held_bytes"] <= window * 9 // 8  # buffers are rounded up
        got = [greedy.wait(Samples, 10) for _ in range(session["leases"])]
        assert all(s.status is ReplyStatus.OK for s in got)
        last = max(s.ticket for s in got)
        greedy.send(Hurry(last + 1))
        busy = greedy.wait(Samples, 10)
        assert busy.status is ReplyStatus.BUSY
        assert busy.ticket == last + 1
        greedy.send(Release([s.ticket for s in got]))
        assert greedy.wait(Samples, 10).status is ReplyStatus.OK


def _session(server, job):
    (session_state,) = [s for s in server.describe()["sessions"] if s["job"] == job]
    return session_state


def test_a_consumer_that_keeps_everything_gets_everything(folder, store):
    """Its loader reads directly where the daemon has nothing to give."""
    with serving(folder, window_bytes=1 << 20):
        loader = node_loader(store)
        kept = list(loader)
        assert sorted(int(i) for b in kept for i in b.indices) == list(range(SAMPLES))
        report = report_of(loader)
        assert report.busy_batches > 0
        assert report.node_batches > 0
        assert report.attached
        loader.close()


def test_what_stands_behind_batches_that_nobody_takes_is_answered(folder, store, link):
    """The client has gone on to another epoch, and what it asked for before fills its window."""
    with serving(folder, window_bytes=1 << 20):
        one = link()
        number = opened(one, store)
        for part in np.array_split(np.arange(SAMPLES, dtype=np.int64), 8):
            one.send(Ask(one.new_ticket(), number, part.tobytes(), []))
        held = [one.wait(Samples, 10) for _ in range(2)]
        assert [s.status for s in held] == [ReplyStatus.OK] * 2  # and kept
        last = one._ticket
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            one.send(Hurry(last))
            answers = []
            with contextlib.suppress(IndexError):
                one.receive(0.2)
                while True:
                    answers.append(one._kept.popleft())
            replies = [a for a in answers if isinstance(a, Samples) and a.ticket == last]
            if replies:
                break
        assert replies[0].status is ReplyStatus.BUSY


def test_epochs_that_are_left_early_give_their_memory_back(folder, store):
    """However often: what nobody takes is the daemon's again, and nothing waits for it."""
    with serving(folder, window_bytes=1 << 20) as server:
        loader = node_loader(store, 16)
        for epoch in range(30):
            loader.set_epoch(epoch)
            for count, _ in enumerate(loader):
                if count == epoch % 5:
                    break
        assert sum(len(b[2]) for b in seen(loader)) > 0
        report = report_of(loader)
        assert report.attached
        assert report.node_batches > report.direct_batches
        until(lambda: server.describe()["sessions"][0]["waiting"] == 0)
        until(lambda: server.describe()["sessions"][0]["leases"] < 20)
        loader.close()


def test_jobs_have_a_window_too(folder, store, link):
    with serving(folder, window_bytes=8 << 20, job_window_bytes=1 << 20) as server:
        first, second, other = link("job"), link("job"), link("other")
        numbers = [opened(one, store) for one in (first, second, other)]
        everything = np.arange(SAMPLES, dtype=np.int64)
        for one, number in zip((first, second, other), numbers, strict=True):
            for part in np.array_split(everything, 20):
                one.send(Ask(one.new_ticket(), number, part.tobytes(), []))
        until(
            lambda: (
                not any(d["reading"] for d in server.describe()["datasets"])
                and _session(server, "other")["waiting"] > 0
            )
        )
        held = {job["name"]: job["held_bytes"] for job in server.describe()["jobs"]}
        assert 0 < held["job"] <= (1 << 20) * 9 // 8
        assert 0 < held["other"] <= (1 << 20) * 9 // 8  # its own
        first.close()  # what it held is the other's now
        got = [second.wait(Samples, 10) for _ in range(3)]
        assert [s.status for s in got] == [ReplyStatus.OK] * 3


def test_a_client_that_does_not_listen_costs_a_bounded_amount(folder, store, monkeypatch):
    """It asks and asks, and never reads an answer."""
    monkeypatch.setattr(node_server, "OUT_BYTES_MAX", 100_000)
    with serving(folder) as server, a_good_client(folder, store):
        sock = raw(folder)
        sock.sendall(HELLO)
        sock.settimeout(3.0)
        asked = 0
        with contextlib.suppress(TimeoutError, BlockingIOError):
            for ticket in range(1, 100_000):
                sock.sendall(encode(StatusAsked(ticket)))
                asked += 1
        assert asked < 90_000  # it was stopped
        (deaf,) = until(lambda: [one for one in tuple(server._connections) if one.choked])
        assert deaf._out_bytes < 100_000 + (256 << 10) // 8 * 3000
        sock.close()
        until(lambda: deaf not in server._connections)


def test_a_daemon_that_lies_is_left(folder, store, monkeypatch):
    """Offsets outside of the batch, a buffer that never came: direct reads, no crash."""
    from headrace.node import session

    honest = session._samples
    lies = [
        {"buffer": 10**6},
        {"nbytes": 1 << 40},
        {"offsets": np.full(32, 1 << 62).tobytes()},
        {"lengths": np.full(32, -1).tobytes()},
        {"labels": b""},
        {"offsets": bytes(32 * 8 - 1)},
    ]
    for lie in lies:
        lied = threading.Event()

        def samples(*given, lie=lie, lied=lied):
            import msgspec

            lied.set()
            return msgspec.structs.replace(honest(*given), **lie)

        monkeypatch.setattr(session, "_samples", samples)
        with serving(folder):
            loader = node_loader(store)
            assert sum(len(b[2]) for b in seen(loader)) == SAMPLES
            assert lied.is_set()
            assert report_of(loader).node_batches == 0
            loader.close()


@pytest.mark.usefixtures("impatient")
def test_a_socket_that_says_nothing_does_not_hold_up_anybody(folder, store):
    folder.path.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder.socket))
        silent.listen(1)
        from headrace.node.link import Link

        with pytest.raises(LinkLost, match="within 2 s"):
            Link(folder, "x")
    folder.socket.unlink()


def test_who_is_refused_before_he_speaks_hears_why(folder, monkeypatch):
    """The daemon hangs up at once: hello may fail, what it said before is there all the same."""
    from headrace.errors import NodeError
    from headrace.node import link

    with serving(folder, sessions_max=1) as server:
        first = raw(folder)
        until(lambda: server.describe()["sessions_made"] == 1)
        real = link.connect

        def late(path):
            sock = real(path)
            until(lambda: server.describe()["refused"] == 1)
            return sock

        monkeypatch.setattr(link, "connect", late)
        with pytest.raises(NodeError, match="served already"):
            link.Link(folder, "second")
        first.close()
