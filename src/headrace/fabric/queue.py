"""Queue: a host's side of one connection while it carries control commands; what proves who it is.

One command at a time, with a deadline. An I/O queue is connected here and then handed over (`detach`) to the
native data path.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import _native
from headrace.errors import AuthenticationFailed, FabricError, ProtocolError, VolumeError
from headrace.fabric import chap
from headrace.fabric.chap_exchange import ChapRefused
from headrace.fabric.command import (
    CONNECT_DATA,
    SGL_TRANSPORT,
    Completion,
    Fabrics,
    Sqe,
    connect_command,
    fabrics_command,
    status_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.fabric.chap_exchange import Exchange
    from headrace.fabric.identity import HostIdentity

_NO_FLOW_CONTROL = 0xFFFF


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
        with self._naming():
            self.native = _native.FabricControlQueue(
                address[0], address[1], dgst=offered, timeout_s=timeout_s
            )
        self.close = self.native.close

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
        self.native.set_flow_control(connected.sqhd != _NO_FLOW_CONTROL)
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
        return self.command(sqe, expect=chap.MESSAGE_BYTES_MAX, what="Authentication Receive")[1]

    def command(
        self, sqe: Sqe, *, data: bytes = b"", expect: int = 0, what: str = ""
    ) -> tuple[Completion, bytes]:
        """Sends a command and waits for its completion.

        Args:
            sqe: its CID is filled in; so is the SGL, where `expect` bytes are to come.
            data: goes in the capsule.
            expect: bytes that the controller returns.
            what: for the error's message.

        Raises:
            CommandFailed: the controller answered with an error.
            FabricError: the connection or its time ended.
            ProtocolError: the controller breaks the protocol.
        """
        if expect:
            sqe = sqe._replace(sgl_type=SGL_TRANSPORT, sgl_length=expect)
        what = what or f"command {sqe.opcode:#04x}"
        with self._naming():
            status, result, sqhd, received = self.native.command(sqe.pack(), data, expect, what)
        if status:
            raise CommandFailed(f"{self}: {what} failed: {status_text(status)}.", status=status)
        return Completion(sqe.cid, status, result, sqhd), received

    def detach(self, *, qid: int, entries: int, connected: Completion) -> ConnectedQueue:
        """Hands the socket over to a data path."""
        taken = socket.socket(fileno=self.native.detach())
        taken.setblocking(True)
        return ConnectedQueue(
            socket=taken, qid=qid, entries=entries, dgst=self.native.dgst, cpda=self.native.cpda,
            flow_control=connected.sqhd != _NO_FLOW_CONTROL,
        )  # fmt: skip

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Native code's errors, by what they mean here."""
        try:
            yield
        except VolumeError as e:
            kind = ProtocolError if e.errno == errno.EPROTO else FabricError
            raise kind(e.message, errno=e.errno) from None
