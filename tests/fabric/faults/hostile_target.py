"""A target that makes mistakes at our host, on an admin queue or on an I/O queue, and then behaves.

Whatever it was, our host says what in a TermReq and closes the connection. An admin queue's mistake
is a `ProtocolError`; after an I/O queue's the engine connects anew and reads again: right bytes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fabric.conftest import HOST, NQN
from fabric.faults.tally import count
from headrace.base.lifetime import Closing
from headrace.errors import ProtocolError
from headrace.fabric.command import Admin, Completion, NamespaceIdentity, Sqe
from headrace.fabric.controller import (
    Admission,
    Association,
    ConnectRequest,
    Controller,
    HostConnection,
)
from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import Host, HostOptions
from headrace.fabric.pdu import (
    DATA,
    LAST,
    Format,
    PduSplitter,
    Rules,
    Type,
    encode,
    read_term_req,
)
from tests_shared import until

if TYPE_CHECKING:
    from collections.abc import Callable

    Mistake = Callable[[Sqe, Format], bytes]

BLOCKS = 256
CONTENT = np.random.default_rng(5).integers(0, 256, BLOCKS * 512, dtype=np.uint8)


def response(sqe: Sqe, form: Format, **fields: int) -> bytes:
    """A CapsuleResp."""
    completion = Completion(**{"cid": sqe.cid, **fields})
    return encode(Type.CAPSULE_RESP, completion.pack(), form=form)


def data_of(sqe: Sqe) -> bytes:
    """What a Read asks for; zeros for anything else."""
    if sqe.opcode != 2:
        return bytes(sqe.sgl_length)
    first = (sqe.cdw10 | sqe.cdw11 << 32) * 512
    return CONTENT[first : first + ((sqe.cdw12 & 0xFFFF) + 1) * 512].tobytes()


def c2h(sqe: Sqe, form: Format, **wrong: int) -> bytes:
    """A C2HData with all of a command's data; `wrong`: cccid, datao, datal, flags, nbytes."""
    data = data_of(sqe)
    data = data[: wrong.get("nbytes", len(data))].ljust(wrong.get("nbytes", 0), b"\0")
    body = DATA.pack(
        wrong.get("cccid", sqe.cid), 0, wrong.get("datao", 0), wrong.get("datal", len(data))
    )
    return encode(Type.C2H_DATA, body, data, wrong.get("flags", LAST), form)


def right(sqe: Sqe, form: Format) -> bytes:
    """The right answer to a Read."""
    return c2h(sqe, form) + response(sqe, form)


class HostileTarget(Closing):
    """Serves a namespace of known bytes.

    Args:
        admin: what answers the first Identify instead of what is right.
        io: the same of an I/O queue's first commands.
        times: how many of those.
        dgst: that are agreed to.
        fatal: a mistake ends its connection.
        send: sends what goes to I/O queues.
    """

    def __init__(
        self,
        *,
        admin: Mistake | None = None,
        io: Mistake | None = None,
        times: int = 1,
        dgst: int = 0,
        fatal: bool = True,
        send: Callable[[socket.socket, bytes], None] = socket.socket.sendall,
    ) -> None:
        self.made = 0
        """Mistakes."""
        self.terms: list[str] = []
        """What hosts said of them."""
        self._admin, self._io, self._times, self._dgst = admin, io, times, dgst
        self._fatal, self._send = fatal, send
        self._controllers: dict[int, Controller] = {}
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.url = f"nvme+tcp://127.0.0.1:{self.address[1]}/{NQN}?ns=1"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends all connections."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[0].join()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._serve_control(sock)
            sock.shutdown(socket.SHUT_RDWR)

    def _serve_control(self, sock: socket.socket) -> None:
        connection = HostConnection(self._admit, self._dgst)
        while not connection.closing and (received := sock.recv(1 << 16)):
            form = Format(bool(connection.dgst & 1), bool(connection.dgst & 2))
            sqe = Sqe.unpack(received[8:72])
            ready = connection.controller is not None and connection.controller.ready
            if self._admin and ready and not self.made and sqe.opcode == Admin.IDENTIFY:
                self.made += 1
                sock.sendall(self._admin(sqe, form))
                self._listen(sock, connection.dgst)
                return
            connection.take(received, 0.0)
            sock.sendall(bytes(connection.output))
            connection.output.clear()
            if connection.handed_over:
                self._serve_io(sock, connection, form)
                return

    def _admit(self, request: ConnectRequest) -> Admission:
        if request.qid:
            return Admission(result=request.cntlid, controller=self._controllers[request.cntlid])
        cntlid = len(self._controllers) + 1
        namespaces = {
            1: SimpleNamespace(identity=NamespaceIdentity(BLOCKS, 512, uid=uuid.UUID(int=7)))
        }
        association = Association(
            hostnqn=request.hostnqn, hostid=request.hostid, subnqn=request.subnqn, serial="hostile",
            cntlid=cntlid, kato_ms=0, namespaces=lambda: namespaces,
        )  # fmt: skip
        self._controllers[cntlid] = Controller(association, 0.0)
        return Admission(result=cntlid, controller=self._controllers[cntlid])

    def _serve_io(self, sock: socket.socket, connection: HostConnection, form: Format) -> None:
        splitter = PduSplitter(Rules(to_host=False, hdgst=form.hdgst, ddgst=form.ddgst))
        received = connection.left()
        mute = False  # answers after the mistake would have the host reset the connection
        while True:
            together: list[Sqe] = []
            for pdu in splitter.feed(received):
                if pdu.type is Type.H2C_TERM_REQ:
                    self.terms.append(read_term_req(pdu.header))
                    return
                sqe = Sqe.unpack(pdu.header[8:72])
                if self._io and self.made < self._times:
                    self.made += 1
                    mute = self._fatal
                    self._send(sock, self._io(sqe, form))
                elif not mute:
                    together.append(sqe)
            if together:
                self._send(sock, self.answer(together, form))
            if not (received := sock.recv(1 << 16)):
                return

    def answer(self, commands: list[Sqe], form: Format) -> bytes:
        """What is right for commands that came together."""
        return b"".join(right(sqe, form) for sqe in commands)

    def _listen(self, sock: socket.socket, dgst: int) -> None:
        """What the host says of a mistake."""
        received = b""
        while chunk := sock.recv(1 << 16):
            received += chunk
        for pdu in PduSplitter(Rules(to_host=False, hdgst=bool(dgst & 1))).feed(received):
            if pdu.type is Type.H2C_TERM_REQ:
                self.terms.append(read_term_req(pdu.header))


def options(dgst: int = 0) -> HostOptions:
    """Of hosts that offer these digests."""
    return HostOptions(timeout_s=10, hdgst=bool(dgst & 1), ddgst=bool(dgst & 2))


def engine(dgst: int = 0, **more: float) -> FabricEngine:
    """One queue, so that mistakes are counted."""
    return FabricEngine(HOST, EngineOptions(host=options(dgst), **{"queues": 1, **more}))


def check_reads(fabric: FabricEngine, url: str, count: int = 3) -> None:
    """Ranges arrive as they are."""
    offsets = np.arange(count) * 1000 + 3
    lengths = np.full(count, 900)
    dest = np.zeros(count * 900, np.uint8)
    assert fabric.read_many(url, offsets, lengths, dest, 20.0).tolist() == lengths.tolist()
    wanted = np.concatenate([CONTENT[at : at + 900] for at in offsets])
    assert np.array_equal(dest, wanted)


def check_term(place: str, mistake: Mistake, said: str, dgst: int = 0) -> None:
    """Our host finds a mistake, says what it is, and delivers no wrong byte."""
    if place == "admin":
        with HostileTarget(admin=mistake, dgst=dgst) as target:
            with pytest.raises(ProtocolError, match="broke the protocol"):
                Host(target.address, NQN, HOST, options(dgst))
            target._threads[1].join(10)
    else:
        with HostileTarget(io=mistake, dgst=dgst) as target, engine(dgst) as fabric:
            fabric.open(target.url)
            check_reads(fabric, target.url)
            figures = fabric.figures()
            assert figures["lost_queues"] == figures["reconnects"] == 1
            assert figures["failed"] == 0
            until(lambda: target.terms)
    assert target.made == 1
    assert len(target.terms) == 1
    assert target.terms[0].startswith(said), target.terms
    count("mistakes of targets")
