"""Connections of a target while they carry control commands.

A connection takes bytes and gives bytes: handshake (ICReq, Connect), then the admin queue of an association,
or an I/O queue that is handed over to the native data path. It knows no sockets: `take` is given what was
received and `output` is to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.fabric.chap import (
    AUTH_DWORDS,
    MESSAGE_BYTES_MAX,
    SECP_NVME,
    SPSP_CHAP,
)
from headrace.fabric.command import (
    ADMIN_CAPSULE_DATA_MAX,
    AUTHREQ_ATR,
    CATTR_NO_FLOW_CONTROL,
    CONNECT_DATA,
    CONNECT_DWORDS,
    DO_NOT_RETRY,
    SGL_IN_CAPSULE,
    SGL_TRANSPORT,
    Admin,
    Completion,
    Fabrics,
    Sqe,
    Status,
    text,
)
from headrace.fabric.controller import ENTRIES_MAX, CommandReply
from headrace.fabric.pdu import (
    COMMON,
    DATA,
    DDGST,
    HDGST,
    LAST,
    Fatal,
    Format,
    PduFault,
    PduSplitter,
    Rules,
    Type,
    encode,
    established,
    icresp,
    read_icreq,
    read_term_req,
    term_req,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.fabric.chap_exchange import Gate
    from headrace.fabric.controller import Controller
    from headrace.fabric.pdu import Pdu

MAXH2CDATA = 128 << 10
_ADMIN_ENTRIES_MAX = 256
_NO_FLOW_CONTROL = 0xFFFF


class ConnectRequest(NamedTuple):
    """What a Connect asks for."""

    qid: int
    entries: int
    flow_control: bool
    kato_ms: int
    hostid: bytes
    cntlid: int
    subnqn: str
    hostnqn: str


class Admission(NamedTuple):
    """The answer to a Connect."""

    status: int = 0
    result: int = 0
    """CNTLID; what was invalid, where it was refused."""
    controller: Controller | None = None
    gate: Gate | None = None
    """The queue is of no use before this host has authenticated on it."""


class HostConnection:
    """One connection of a host.

    Args:
        admit: answers Connect.
        digests: that we take if the host offers them.
    """

    def __init__(
        self, admit: Callable[[ConnectRequest], Admission], digests: int = HDGST | DDGST
    ) -> None:
        self.output = bytearray()
        self.closing = False
        """No more is taken: close when `output` is sent."""
        self.why = ""
        self.request: ConnectRequest | None = None
        """What was admitted."""
        self.controller: Controller | None = None
        self.gate: Gate | None = None
        self.dgst = digests
        self.hpda = 0
        self._admit = admit
        self._splitter = PduSplitter(
            Rules(to_host=False, established=False, capsule_data_max=ADMIN_CAPSULE_DATA_MAX,
                  data_max=MAXH2CDATA)
        )  # fmt: skip
        self._format = Format()
        self._commands = 0
        self._live: set[int] = set()

    @property
    def handed_over(self) -> bool:
        """An I/O queue is connected: the data path takes the socket, when `output` is sent."""
        return self.request is not None and self.request.qid > 0 and self.admitted

    @property
    def admitted(self) -> bool:
        """Its Connect was taken, and the host is who it says, where that is asked for."""
        if self.request is None or self.closing:
            return False
        return self.gate is None or self.gate.authenticated

    def left(self) -> bytes:
        """Bytes that came after an I/O queue's Connect."""
        return self._splitter.left()

    def take(self, received: bytes, now_s: float) -> None:
        """Takes bytes of the host's; see `output` and `closing` afterwards."""
        if self.closing:
            return
        try:
            for pdu in self._splitter.feed(received):
                if pdu.type is Type.IC_REQ:
                    self._open(pdu)
                elif pdu.type is Type.CAPSULE_CMD:
                    self._command(pdu, now_s)
                elif pdu.type is Type.H2C_TERM_REQ:
                    self.why = f"the host ended the connection: {read_term_req(pdu.header)}"
                    self.output.clear()
                    self.closing = True
                else:
                    what = "TTAG of an H2CData that nobody asked for"
                    raise PduFault(Fatal.INVALID_HEADER_FIELD, 10, what)  # noqa: TRY301 - as `feed` does
                if self.closing or self.handed_over:
                    return
        except PduFault as fault:
            self.why = str(fault)
            self.output += term_req(fault, self._splitter.header, from_host=False)
            self.closing = True

    def send_events(self) -> None:
        """Puts completed event requests into `output`."""
        if self.controller is not None and not self.closing:
            for completion in self.controller.completed_events():
                self._complete(completion)

    # -- PDUs -------------------------------------------------------------------------------------

    def _open(self, pdu: Pdu) -> None:
        asked = read_icreq(pdu.header)
        self.dgst &= asked.dgst
        self.hpda = asked.pda
        self._splitter.rules = established(self._splitter.rules, self.dgst)
        self._format = Format(bool(self.dgst & HDGST), bool(self.dgst & DDGST), asked.alignment)
        self.output += icresp(self.dgst, MAXH2CDATA)

    def _command(self, pdu: Pdu, now_s: float) -> None:
        sqe = Sqe.unpack(pdu.header[COMMON.size : COMMON.size + 64])
        if sqe.cid in self._live or sqe.cid == 0xFFFF:
            raise PduFault(Fatal.INVALID_HEADER_FIELD, 10, f"CID {sqe.cid} is live")
        self._commands += 1
        if not pdu.intact:
            self._complete(Completion(sqe.cid, Status.TRANSIENT_TRANSPORT))
            return
        if self.request is None:
            self._connect(sqe, pdu.data)
            return
        assert self.controller is not None
        if self.gate is not None and self._at_gate(self.gate, sqe, pdu.data):
            self.controller.heard(now_s)
            return
        reply = self.controller.handle(sqe, now_s)
        if reply is None:
            self._live.add(sqe.cid)
        else:
            self._reply(sqe.cid, reply)
        self.send_events()
        self.closing = self.closing or self.controller.disconnecting

    def _connect(self, sqe: Sqe, data: bytes) -> None:
        """The first command must be a Connect."""
        if sqe.opcode != Admin.FABRICS or sqe.nsid & 0xFF != Fabrics.CONNECT:
            self._reply(sqe.cid, CommandReply(Status.COMMAND_SEQUENCE_ERROR | DO_NOT_RETRY))
            self.why = "the first command is no Connect"
            self.closing = True
            return
        admission = self._judge(sqe, data)
        if admission.status:
            self._reply(sqe.cid, CommandReply(admission.status | DO_NOT_RETRY, admission.result))
            self.why = self.why or "Connect was refused"
            self.closing = True
            return
        self.controller, self.gate = admission.controller, admission.gate
        assert self.request is not None
        sqhd = None if self.request.flow_control else _NO_FLOW_CONTROL
        asked = AUTHREQ_ATR if self.gate is not None else 0
        self._complete(Completion(sqe.cid, 0, admission.result | asked), sqhd)

    def _judge(self, sqe: Sqe, data: bytes) -> Admission:
        recfmt, qid, sqsize, cattr, kato_ms = CONNECT_DWORDS.unpack(sqe.dwords)
        if recfmt:
            return Admission(Status.CONNECT_INCOMPATIBLE_FORMAT)
        if len(data) != CONNECT_DATA.size:
            return Admission(Status.SGL_LENGTH_INVALID)
        entries_max = _ADMIN_ENTRIES_MAX if qid == 0 else ENTRIES_MAX
        if not 1 <= sqsize < entries_max:
            return Admission(Status.CONNECT_INVALID_PARAMETERS, 44)  # SQSIZE's place in the SQE
        hostid, cntlid, subnqn, hostnqn = CONNECT_DATA.unpack(data)
        request = ConnectRequest(
            qid, sqsize + 1, not cattr & CATTR_NO_FLOW_CONTROL, kato_ms,
            hostid, cntlid, text(subnqn), text(hostnqn),
        )  # fmt: skip
        admission = self._admit(request)
        if not admission.status:
            self.request = request
        return admission

    # -- authentication ---------------------------------------------------------------------------

    def _at_gate(self, gate: Gate, sqe: Sqe, data: bytes) -> bool:
        """Whether a command ends here: one of authentication, or any other before it."""
        fctype = sqe.nsid & 0xFF if sqe.opcode == Admin.FABRICS else None
        if fctype in {Fabrics.AUTH_SEND, Fabrics.AUTH_RECEIVE}:
            self._reply(
                sqe.cid, _authentication(gate, sqe, data, sends=fctype == Fabrics.AUTH_SEND)
            )
        elif not gate.authenticated:
            self._reply(sqe.cid, CommandReply(Status.AUTHENTICATION_REQUIRED | DO_NOT_RETRY))
        else:
            return False
        if gate.over:
            self.why = gate.why
            self.closing = True
        return True

    # -- answers ----------------------------------------------------------------------------------

    def _reply(self, cid: int, reply: CommandReply) -> None:
        if reply.data:
            body = DATA.pack(cid, 0, 0, len(reply.data))
            self.output += encode(Type.C2H_DATA, body, reply.data, LAST, self._format)
        self._complete(Completion(cid, reply.status, reply.result))

    def _complete(self, completion: Completion, sqhd: int | None = None) -> None:
        self._live.discard(completion.cid)
        entries = self.request.entries if self.request else _ADMIN_ENTRIES_MAX
        if sqhd is None:
            sqhd = self._commands % entries
        body = completion._replace(sqhd=sqhd).pack()
        self.output += encode(Type.CAPSULE_RESP, body, form=self._format)


def _authentication(gate: Gate, sqe: Sqe, data: bytes, *, sends: bool) -> CommandReply:
    """Authentication Send, or Receive: its message is filled up, as some hosts wait for all of it."""
    invalid = CommandReply(Status.INVALID_FIELD | DO_NOT_RETRY)
    spsp0, spsp1, secp, length = AUTH_DWORDS.unpack(sqe.dwords)
    if (spsp0, spsp1, secp) != (SPSP_CHAP, SPSP_CHAP, SECP_NVME) or not length:
        return invalid
    sgl_type, carried = (SGL_IN_CAPSULE, len(data)) if sends else (SGL_TRANSPORT, length)
    if sqe.sgl_type != sgl_type or not length == sqe.sgl_length == carried:
        return CommandReply(Status.SGL_LENGTH_INVALID | DO_NOT_RETRY)
    if sends:
        gate.send(data)
        return CommandReply()
    if length < gate.message_bytes or length % 4:
        return invalid
    return CommandReply(data=gate.receive().ljust(min(length, MESSAGE_BYTES_MAX), b"\0"))
