"""Queue: a host's side of one connection while it carries control commands, on a blocking socket.

One command at a time, with a deadline. An I/O queue is connected here and then handed over (`detach`) to
the native data path.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import AuthenticationFailed, FabricError, ProtocolError
from headrace.fabric import chap
from headrace.fabric import pdu as wire
from headrace.fabric.chap_exchange import ChapRefused
from headrace.fabric.command import (
    CONNECT_DATA,
    Completion,
    Fabrics,
    Sqe,
    Status,
    connect_command,
    fabrics_command,
    status_text,
)
from headrace.fabric.pdu import Fatal, PduFault, Type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.fabric.chap_exchange import Exchange
    from headrace.fabric.identity import HostIdentity

_CIDS = 0xFFFF  # 0xFFFF itself should not be used
_DATA_MAX = 1 << 20
_NO_FLOW_CONTROL = 0xFFFF
_LAST = 4


class CommandFailed(FabricError):
    """A controller answered a command with an error."""

    status: int = 0  # as in the completion, without the phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedQueue:
    """An I/O queue that is ready for its data path. Who takes it closes the socket."""

    socket: socket.socket
    qid: int
    entries: int
    dgst: int
    cpda: int
    flow_control: bool


class Queue:
    """Connects a socket and exchanges ICReq and ICResp.

    Args:
        address: host name or number, and port.
        offered: digests to offer: `HDGST | DDGST`.
        timeout_s: for every exchange.

    Raises:
        FabricError: nobody answers.
        ProtocolError: who answers does not speak NVMe/TCP.
    """

    def __init__(self, address: tuple[str, int], *, offered: int, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._splitter = wire.PduSplitter(
            wire.Rules(to_host=True, established=False, data_max=_DATA_MAX)
        )
        self._cid = 0
        self._flow_control = True
        try:
            self._socket = socket.create_connection(address, timeout=timeout_s)
        except OSError as e:
            raise FabricError(
                f"{self}: {e.strerror or e}.", next_step="Is the target running, and the port open?",
                errno=e.errno,
            ) from e  # fmt: skip
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._send(wire.icreq(offered))
            reply = self._next_pdu(time.monotonic() + timeout_s)
            with self._judging():
                self.parameters = wire.read_icresp(reply.header, offered)
        except BaseException:
            self.close()
            raise
        dgst = self.parameters.dgst
        self._splitter.rules = wire.established(self._splitter.rules, dgst)
        self._format = wire.Format(
            bool(dgst & wire.HDGST), bool(dgst & wire.DDGST), self.parameters.alignment
        )

    def __str__(self) -> str:
        return f"NVMe/TCP target {self.address[0]}:{self.address[1]}"

    def connect(
        self,
        identity: HostIdentity,
        subnqn: str,
        *,
        qid: int,
        entries: int,
        cntlid: int,
        kato_ms: int = 0,
    ) -> Completion:
        """Sends Connect for a queue; raises CommandFailed if the controller refuses."""
        data = CONNECT_DATA.pack(identity.id, cntlid, subnqn.encode(), identity.nqn.encode())
        sqe = connect_command(qid, entries, flow_control=qid == 0, kato_ms=kato_ms)
        connected = self.command(sqe, data=data, what=f"Connect to {subnqn} as {identity.nqn}")[0]
        self._flow_control = connected.sqhd != _NO_FLOW_CONTROL
        return connected

    def authenticate(self, exchange: Exchange) -> None:
        """Proves to the controller who we are, and has it prove itself if the exchange asks for that.

        Raises AuthenticationFailed if one side does not believe the other.
        """
        try:
            self._converse(exchange)
        except FabricError as e:
            if e.errno not in {errno.ECONNRESET, errno.EPIPE}:
                raise
            # Linux ends the connection at a wrong secret, often before its answer has left.
            raise AuthenticationFailed(
                f"{self} closed the connection instead of believing this host.",
                next_step="Do host and target have the same DH-HMAC-CHAP secret for this host's NQN?",
            ) from e

    def _converse(self, exchange: Exchange) -> None:
        self._auth_send(exchange.start())
        while not exchange.done:
            try:
                answer = exchange.take(self._auth_receive())
            except ChapRefused as refused:
                self.close()
                raise AuthenticationFailed(
                    f"{self} does not believe this host: {refused}.",
                    next_step="Do host and target have the same DH-HMAC-CHAP secret for this host's NQN?",
                ) from None
            except chap.MessageFault as fault:
                with contextlib.suppress(FabricError):
                    self._auth_send(exchange.farewell() or b"")
                self.close()
                raise AuthenticationFailed(
                    f"{self} did not prove who it is: {fault}.",
                    next_step="Is it the right target, and does it have the controller's secret?",
                ) from None
            if answer is not None:
                self._auth_send(answer)

    def _auth_send(self, message: bytes) -> None:
        dwords = chap.AUTH_DWORDS.pack(chap.SPSP_CHAP, chap.SPSP_CHAP, chap.SECP_NVME, len(message))
        sqe = fabrics_command(Fabrics.AUTH_SEND, dwords, len(message))
        self.command(sqe, data=message, what="Authentication Send")

    def _auth_receive(self) -> bytes:
        dwords = chap.AUTH_DWORDS.pack(
            chap.SPSP_CHAP, chap.SPSP_CHAP, chap.SECP_NVME, chap.MESSAGE_BYTES_MAX
        )
        sqe = fabrics_command(Fabrics.AUTH_RECEIVE, dwords)
        what = "Authentication Receive"
        return self.command(sqe, expect=chap.MESSAGE_BYTES_MAX, less=True, what=what)[1]

    def command(
        self, sqe: Sqe, *, data: bytes = b"", expect: int = 0, less: bool = False, what: str = ""
    ) -> tuple[Completion, bytes]:
        """Sends a command and waits for its completion.

        Args:
            sqe: its CID is filled in; so is the SGL, where `expect` bytes are to come.
            data: goes in the capsule.
            expect: bytes that the controller returns.
            less: it may return fewer.
            what: for the error's message.

        Raises:
            CommandFailed: the controller answered with an error.
            FabricError: the connection or its time ended.
            ProtocolError: the controller breaks the protocol.
        """
        self._cid = (self._cid + 1) % _CIDS
        sqe = sqe._replace(cid=self._cid)
        if expect:
            sqe = sqe._replace(sgl_type=0x5A, sgl_length=expect)
        self._send(wire.encode(Type.CAPSULE_CMD, sqe.pack(), data, form=self._format))
        deadline_s = time.monotonic() + self._timeout_s
        received = bytearray()
        while True:
            pdu = self._next_pdu(deadline_s)
            with self._judging():
                completion = self._take(pdu, received, expect, less)
            if completion is None:
                continue
            if completion.status:
                raise CommandFailed(
                    f"{self}: {what or f'command {sqe.opcode:#04x}'} failed: "
                    f"{status_text(completion.status)}.",
                    status=completion.status,
                )
            with self._judging():
                if len(received) != expect and not less:
                    raise PduFault(Fatal.SEQUENCE_ERROR, 22, "success before all data came")
            return completion, bytes(received)

    def detach(self, *, qid: int, entries: int, connected: Completion) -> ConnectedQueue:
        """Hands the socket over to a data path."""
        taken, self._socket = self._socket, socket.socket()
        self._socket.close()
        if self._splitter.left():
            taken.close()
            raise ProtocolError(f"{self} sent data that nobody asked for on queue {qid}.")
        taken.settimeout(None)
        return ConnectedQueue(
            socket=taken, qid=qid, entries=entries, dgst=self.parameters.dgst,
            cpda=self.parameters.pda, flow_control=connected.sqhd != _NO_FLOW_CONTROL,
        )  # fmt: skip

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    # -- PDUs -------------------------------------------------------------------------------------

    def _take(
        self, pdu: wire.Pdu, received: bytearray, expect: int, less: bool
    ) -> Completion | None:
        """One PDU of the controller's: our completion, or None where more is to come."""
        if pdu.type is Type.C2H_DATA:
            return self._take_data(pdu, received, expect, less)
        if pdu.type is not Type.CAPSULE_RESP:
            raise PduFault(Fatal.SEQUENCE_ERROR, 0, f"{pdu.type.name}: this host sends no data")
        completion = Completion.unpack(pdu.header[wire.COMMON.size : wire.COMMON.size + 16])
        if completion.cid != self._cid:
            raise PduFault(Fatal.INVALID_HEADER_FIELD, 20, f"CID {completion.cid} is not live")
        return completion

    def _take_data(
        self, pdu: wire.Pdu, received: bytearray, expect: int, less: bool
    ) -> Completion | None:
        """Data of our command; with SUCCESS, no response follows."""
        cccid, _, datao, datal = wire.DATA.unpack_from(pdu.header, wire.COMMON.size)
        if cccid != self._cid:
            raise PduFault(Fatal.INVALID_HEADER_FIELD, 8, f"CCCID is {cccid}, {self._cid} is live")
        if datao != len(received) or datao + datal > expect:
            raise PduFault(Fatal.OUT_OF_RANGE, 12, f"data at {datao}, expected {len(received)}")
        last = bool(pdu.layout.flags & _LAST)
        if (datao + datal == expect) != last and not (less and last):
            raise PduFault(Fatal.INVALID_HEADER_FIELD, 1, "LAST_PDU disagrees with the data")
        if not pdu.intact:
            raise CommandFailed(
                f"{self}: the data digest is wrong.", status=int(Status.TRANSIENT_TRANSPORT)
            )
        received += pdu.data
        if not pdu.layout.flags & wire.SUCCESS:
            return None
        if self._flow_control:
            raise PduFault(Fatal.INVALID_HEADER_FIELD, 1, "SUCCESS while flow control is on")
        return Completion(self._cid)

    def _next_pdu(self, deadline_s: float) -> wire.Pdu:
        received = b""
        while True:
            with self._judging():
                pdu = next(self._splitter.feed(received), None)  # the rest stays in the splitter
            if pdu is not None:
                break
            received = b""
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self.close()
                raise FabricError(f"{self} did not answer within {self._timeout_s} s.")
            self._socket.settimeout(left_s)
            try:
                received = self._socket.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError as e:
                raise FabricError(f"{self}: {e.strerror or e}.", errno=e.errno) from e
            if not received:
                raise FabricError(f"{self} closed the connection.", errno=errno.ECONNRESET)
        if pdu.type is Type.C2H_TERM_REQ:
            self.close()
            raise ProtocolError(f"{self} ended the connection: {wire.read_term_req(pdu.header)}.")
        return pdu

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """A fault ends the connection."""
        try:
            yield
        except PduFault as fault:
            with contextlib.suppress(OSError):
                self._socket.sendall(wire.term_req(fault, self._splitter.header, from_host=True))
            self.close()
            raise ProtocolError(f"{self} broke the protocol: {fault}.") from fault

    def _send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(data)
        except OSError as e:
            raise FabricError(f"{self}: {e.strerror or e}.", errno=e.errno) from e
