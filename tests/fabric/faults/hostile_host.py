"""A host that makes one mistake at our target, on an admin queue or on an I/O queue.

Whatever it was, the target says what in a TermReq, closes the connection, and serves others.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from fabric.conftest import HOST, NQN, OTHER_HOST
from fabric.faults.tally import count
from headrace.fabric.command import CONNECT_DATA, Sqe, connect_command
from headrace.fabric.host import Host, HostOptions
from headrace.fabric.pdu import (
    COMMON,
    Format,
    Pdu,
    PduSplitter,
    Rules,
    Type,
    encode,
    icreq,
    read_term_req,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.conftest import Exported

PLACES = ("admin", "io")
READ = Sqe(2, cid=3, nsid=1, sgl_type=0x5A, sgl_length=512)
DIGESTS = Format(True, True)


def common(type_: int, flags: int = 0, hlen: int = 0, pdo: int = 0, plen: int = 0) -> bytes:
    """A common header, right or wrong."""
    return COMMON.pack(type_, flags, hlen, pdo, plen)


def command(sqe: Sqe = READ, form: Format | None = None) -> bytes:
    """A CapsuleCmd."""
    return encode(Type.CAPSULE_CMD, sqe.pack(), form=form)


@contextlib.contextmanager
def line(target: Exported, place: str, dgst: int = 0) -> Iterator[socket.socket]:
    """A connected queue's socket: ICReq and Connect were right."""
    if place == "admin":
        with socket.create_connection(target.target.address, timeout=20) as sock:
            sock.sendall(icreq(dgst))
            assert sock.recv(128, socket.MSG_WAITALL)[11] == dgst
            data = CONNECT_DATA.pack(HOST.id, 0xFFFF, NQN.encode(), HOST.nqn.encode())
            form = Format(bool(dgst & 1), bool(dgst & 2))
            sqe = connect_command(0, 32, flow_control=False)
            sock.sendall(encode(Type.CAPSULE_CMD, sqe.pack(), data, form=form))
            assert len(sock.recv(28 if dgst & 1 else 24, socket.MSG_WAITALL)) >= 24
            yield sock
        return
    options = HostOptions(timeout_s=20, hdgst=bool(dgst & 1), ddgst=bool(dgst & 2))
    with Host(target.target.address, NQN, OTHER_HOST, options) as host:
        queue = host.open_queues(1)[0]
        assert queue.dgst == dgst
        queue.socket.settimeout(20)
        with queue.socket:
            yield queue.socket


def heard(sock: socket.socket, dgst: int = 0) -> list[Pdu]:
    """All PDUs until the target closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            received += chunk
    rules = Rules(to_host=True, hdgst=bool(dgst & 1), ddgst=bool(dgst & 2), data_max=1 << 20)
    return list(PduSplitter(rules).feed(received))


def check_term(target: Exported, place: str, message: bytes, said: str, dgst: int = 0) -> list[Pdu]:
    """Sends a mistake; returns what the target sent before its TermReq."""
    with line(target, place, dgst) as sock:
        sock.sendall(message)
        pdus = heard(sock, dgst)
    assert pdus, "the target closed without a word"
    assert pdus[-1].type is Type.C2H_TERM_REQ
    assert read_term_req(pdus[-1].header).startswith(said)
    count("mistakes of hosts")
    check_alive(target)
    return pdus[:-1]


def check_alive(target: Exported) -> None:
    """Another host is served."""
    with Host(target.target.address, NQN, HOST, HostOptions(timeout_s=20)) as host:
        assert host.namespaces()
