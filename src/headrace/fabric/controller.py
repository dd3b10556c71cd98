"""Controller: what a target answers one host's control commands, and the connections that carry them.

A controller has one association: properties, Identify, log pages, features, keep-alive, asynchronous events.
Commands in, replies out. Everything is read-only: what would change a namespace is refused with the
standard status.

A connection takes bytes and gives bytes: handshake (ICReq, Connect), then the admin queue of an association,
or an I/O queue that is handed over to the native data path.

Neither knows sockets or a clock: `take` is given what was received and when, and `output` is to be sent.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from headrace.fabric import command as nvme
from headrace.fabric import pdu as wire
from headrace.fabric.chap import AUTH_DWORDS, MESSAGE_BYTES_MAX, SECP_NVME, SPSP_CHAP
from headrace.fabric.command import (
    DO_NOT_RETRY,
    Admin,
    Completion,
    Fabrics,
    Feature,
    LogPage,
    Sqe,
    Status,
)
from headrace.fabric.pdu import Fatal, PduFault, Type
from headrace.fabric.subsystem import NSID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.fabric.chap_exchange import Gate
    from headrace.fabric.subsystem import Namespace


ENTRIES_MAX = 1024
"""Of an I/O queue. A host with more reads in flight opens more queues."""

QUEUES_MAX = 64
"""I/O queues of one association."""

_EVENTS_MAX = 4
_VERSION = 0x00010400
_MDTS = 8
"""Reads of up to 1 MiB: a queue of full depth stays within memory that a target can promise."""

_KAS = 10
_KATO_GRACE_S = 1.0
_ENABLE_S = 5.0
_NOTICE_NAMESPACES = 0x02 | 0 << 8 | LogPage.CHANGED_NAMESPACES << 16
_GLOBAL_NSID = 0xFFFFFFFF
_ALL_NSIDS = (_GLOBAL_NSID, 0xFFFFFFFE)
_NQN_LOGS = [
    LogPage.SUPPORTED,
    LogPage.ERROR,
    LogPage.SMART,
    LogPage.CHANGED_NAMESPACES,
]
_DISCOVERY_LOGS = [LogPage.SUPPORTED, LogPage.ERROR, LogPage.DISCOVERY]


class CommandReply(NamedTuple):
    """How a command ends."""

    status: int = 0
    result: int = 0
    data: bytes = b""


class Association(NamedTuple):
    """Who is connected to what."""

    hostnqn: str
    hostid: bytes
    subnqn: str
    serial: str
    cntlid: int
    kato_ms: int
    namespaces: Callable[[], dict[int, Namespace]]
    """None are active for a discovery controller."""
    discovery: Callable[[], tuple[int, list[nvme.DiscoveryEntry]]] | None = None
    """Generation and entries: this is a discovery controller."""
    traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Bytes read and reads, for the SMART log."""


_INVALID_FIELD = CommandReply(Status.INVALID_FIELD | DO_NOT_RETRY)
_INVALID_OPCODE = CommandReply(Status.INVALID_OPCODE | DO_NOT_RETRY)


class Controller:
    """The controller of one association."""

    def __init__(self, association: Association, now_s: float) -> None:
        self.association = association
        self._cc = self._csts = 0
        self.kato_ms = association.kato_ms
        self.disconnecting = False
        self._heard_s = self._started_s = now_s
        self._events: deque[int] = deque()  # CIDs of waiting requests
        self._event_mask = 0
        self._changed: set[int] = set()
        self._told = False
        self._ready: list[Completion] = []

    @property
    def ready(self) -> bool:
        """Whether commands that are not Fabrics commands are taken."""
        return bool(self._csts & nvme.Csts.RDY) and not self._csts & nvme.Csts.SHST_MASK

    # -- what happens by itself -------------------------------------------------------------------

    def heard(self, now_s: float) -> None:
        """The host sent something, on any of its queues."""
        self._heard_s = now_s

    def expires_s(self) -> float:
        """When the keep-alive timer ends the association; infinity if it is off."""
        if not self.kato_ms:
            return float("inf")
        return self._heard_s + self.kato_ms / 1000 + _KATO_GRACE_S

    def namespace_changed(self, nsid: int) -> None:
        """A namespace came or went."""
        self._changed.add(nsid)
        self._tell()

    def completed_events(self) -> list[Completion]:
        """Completions of Asynchronous Event Requests since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def _tell(self) -> None:
        wanted = self._event_mask >> 8 & 1
        if wanted and self._changed and not self._told and self._events:
            self._told = True  # until the log page was read
            self._ready.append(Completion(self._events.popleft(), 0, _NOTICE_NAMESPACES))

    # -- commands ---------------------------------------------------------------------------------

    def handle(self, sqe: Sqe, now_s: float) -> CommandReply | None:  # noqa: PLR0911 - a table of commands
        """Answers a command of the admin queue; None keeps it (an event request)."""
        self.heard(now_s)
        if sqe.opcode == Admin.FABRICS:
            return self._fabrics(sqe)
        if not self.ready:
            return CommandReply(Status.COMMAND_SEQUENCE_ERROR | DO_NOT_RETRY)
        match sqe.opcode:
            case Admin.IDENTIFY:
                return self._sized(sqe, self._identify(sqe), nvme.IDENTIFY_BYTES)
            case Admin.GET_LOG_PAGE:
                return self._log_page(sqe, now_s)
            case Admin.SET_FEATURES:
                return self._set_features(sqe)
            case Admin.GET_FEATURES:
                return self._get_features(sqe)
            case Admin.ASYNC_EVENT:
                return self._async_event(sqe)
            case Admin.KEEP_ALIVE:
                return CommandReply()
            case Admin.ABORT:
                return CommandReply(result=1)  # not aborted: nothing is held for long
        return _INVALID_OPCODE

    def _fabrics(self, sqe: Sqe) -> CommandReply:
        attributes, offset, value = nvme.PROPERTY_DWORDS.unpack(sqe.dwords)
        wide = attributes & 7 == 1
        match sqe.nsid & 0xFF:
            case Fabrics.PROPERTY_GET:
                properties = {
                    (nvme.Property.CAP, True): nvme.Cap.make(ENTRIES_MAX, _ENABLE_S),
                    (nvme.Property.VS, False): _VERSION,
                    (nvme.Property.CC, False): self._cc,
                    (nvme.Property.CSTS, False): self._csts,
                }
                known = properties.get((offset, wide))
                return _INVALID_FIELD if known is None else CommandReply(result=known)
            case Fabrics.PROPERTY_SET if offset == nvme.Property.CC and not wide:
                # Enabling and shutting down are done at once: there is nothing to flush.
                enabled = self._cc & nvme.Cc.EN
                self._cc = value & 0xFFFFFFFF
                if not self._cc & nvme.Cc.EN:
                    self._csts = 0
                elif not enabled:
                    self._csts = nvme.Csts.RDY
                if self._cc & nvme.Cc.SHN_MASK:
                    self._csts |= nvme.Csts.SHST_COMPLETE
                return CommandReply()
            case Fabrics.DISCONNECT:
                self.disconnecting = True
                return CommandReply()
            case Fabrics.CONNECT:
                return CommandReply(Status.COMMAND_SEQUENCE_ERROR | DO_NOT_RETRY)
        return _INVALID_FIELD

    @staticmethod
    def _sized(sqe: Sqe, data: bytes | None, nbytes: int) -> CommandReply:
        """A reply with data, if the host's buffer is that large."""
        if data is None:
            return _INVALID_FIELD
        if sqe.sgl_type != nvme.SGL_TRANSPORT or sqe.sgl_length != nbytes:
            return CommandReply(Status.SGL_LENGTH_INVALID | DO_NOT_RETRY)
        return CommandReply(data=data)

    def _identify(self, sqe: Sqe) -> bytes | None:  # noqa: PLR0911 - a table of CNS values
        namespaces = self.association.namespaces()
        cns = sqe.cdw10 & 0xFF
        if cns == 1:
            return self._identity(len(namespaces)).pack()
        if self.association.discovery is not None:
            return None
        if cns == 2:
            if sqe.nsid in _ALL_NSIDS:
                return None
            return nvme.pack_active_namespaces(list(namespaces), sqe.nsid)
        namespace = namespaces.get(sqe.nsid)
        if cns == 0:
            if namespace is None and not 1 <= sqe.nsid <= NSID_MAX:
                return None
            return namespace.identity.pack() if namespace else bytes(nvme.IDENTIFY_BYTES)
        if cns == 3 and namespace is not None:
            return nvme.pack_descriptors(namespace.identity.uid)
        return None

    def _identity(self, namespaces: int) -> nvme.ControllerIdentity:
        discovers = self.association.discovery is not None
        return nvme.ControllerIdentity(
            serial=self.association.serial,
            model="headrace",
            firmware="0.1",
            cntlid=self.association.cntlid,
            subnqn=self.association.subnqn,
            mdts=_MDTS,
            version=_VERSION,
            kind=nvme.CONTROLLER_DISCOVERY if discovers else nvme.CONTROLLER_IO,
            kas=_KAS,
            maxcmd=ENTRIES_MAX,
            namespaces=max(namespaces, 0 if discovers else NSID_MAX),
            async_events=_EVENTS_MAX,
        )

    # -- log pages --------------------------------------------------------------------------------

    def _log_page(self, sqe: Sqe, now_s: float) -> CommandReply:
        page = self._page(sqe.cdw10 & 0xFF, now_s)
        if page is None:
            return CommandReply(Status.INVALID_LOG_PAGE | DO_NOT_RETRY)
        nbytes = ((sqe.cdw10 >> 16 | (sqe.cdw11 & 0xFFFF) << 16) + 1) * 4
        offset = sqe.cdw12 | sqe.cdw13 << 32
        if offset % 4 or offset > len(page) or nbytes > 1 << (12 + _MDTS):
            return _INVALID_FIELD
        data = page[offset : offset + nbytes].ljust(nbytes, b"\0")
        reply = self._sized(sqe, data, nbytes)
        keeps = sqe.cdw10 >> 15 & 1  # Retain Asynchronous Event
        if sqe.cdw10 & 0xFF == LogPage.CHANGED_NAMESPACES and not reply.status and not keeps:
            self._changed.clear()
            self._told = False
        return reply

    def _page(self, number: int, now_s: float) -> bytes | None:
        discovery = self.association.discovery
        offered = _NQN_LOGS if discovery is None else _DISCOVERY_LOGS
        if number not in offered:
            return None
        if number == LogPage.SUPPORTED:
            return nvme.pack_supported_logs([int(page) for page in offered])
        if number == LogPage.ERROR:
            return bytes(64)
        if number == LogPage.SMART:
            return nvme.pack_smart_log(*self.association.traffic(), now_s - self._started_s)
        if number == LogPage.CHANGED_NAMESPACES:
            return nvme.pack_changed_namespaces(sorted(self._changed))
        assert discovery is not None
        return nvme.pack_discovery_log(*discovery())

    # -- features and events ----------------------------------------------------------------------

    def _set_features(self, sqe: Sqe) -> CommandReply:
        match sqe.cdw10 & 0xFF:
            case Feature.NUMBER_OF_QUEUES if self.association.discovery is None:
                asked = min(sqe.cdw11 & 0xFFFF, sqe.cdw11 >> 16)
                if asked == 0xFFFF:
                    return _INVALID_FIELD
                granted = min(asked, QUEUES_MAX - 1)
                return CommandReply(result=granted | granted << 16)
            case Feature.KEEP_ALIVE_TIMER:
                self.kato_ms = sqe.cdw11
                return CommandReply()
            case Feature.ASYNC_EVENTS:
                self._event_mask = sqe.cdw11
                self._tell()
                return CommandReply()
        return _INVALID_FIELD

    def _get_features(self, sqe: Sqe) -> CommandReply:
        if sqe.cdw10 >> 8 & 7:  # SELECT: only current values
            return _INVALID_FIELD
        match sqe.cdw10 & 0xFF:
            case Feature.NUMBER_OF_QUEUES if self.association.discovery is None:
                return CommandReply(result=QUEUES_MAX - 1 | QUEUES_MAX - 1 << 16)
            case Feature.KEEP_ALIVE_TIMER:
                return CommandReply(result=self.kato_ms)
            case Feature.ASYNC_EVENTS:
                return CommandReply(result=self._event_mask)
        return _INVALID_FIELD

    def _async_event(self, sqe: Sqe) -> CommandReply | None:
        if len(self._events) >= _EVENTS_MAX:
            return CommandReply(Status.AER_LIMIT_EXCEEDED | DO_NOT_RETRY)
        self._events.append(sqe.cid)
        self._tell()
        return None


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
        self, admit: Callable[[ConnectRequest], Admission], digests: int = wire.HDGST | wire.DDGST
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
        self._splitter = wire.PduSplitter(
            wire.Rules(to_host=False, established=False, capsule_data_max=nvme.ADMIN_CAPSULE_DATA_MAX,
                  data_max=MAXH2CDATA)
        )  # fmt: skip
        self._format = wire.Format()
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
                    self.why = f"the host ended the connection: {wire.read_term_req(pdu.header)}"
                    self.output.clear()
                    self.closing = True
                else:
                    what = "TTAG of an H2CData that nobody asked for"
                    raise PduFault(Fatal.INVALID_HEADER_FIELD, 10, what)  # noqa: TRY301 - as `feed` does
                if self.closing or self.handed_over:
                    return
        except PduFault as fault:
            self.why = str(fault)
            self.output += wire.term_req(fault, self._splitter.header, from_host=False)
            self.closing = True

    def send_events(self) -> None:
        """Puts completed event requests into `output`."""
        if self.controller is not None and not self.closing:
            for completion in self.controller.completed_events():
                self._complete(completion)

    # -- PDUs -------------------------------------------------------------------------------------

    def _open(self, pdu: wire.Pdu) -> None:
        asked = wire.read_icreq(pdu.header)
        self.dgst &= asked.dgst
        self.hpda = asked.pda
        self._splitter.rules = wire.established(self._splitter.rules, self.dgst)
        self._format = wire.Format(
            bool(self.dgst & wire.HDGST), bool(self.dgst & wire.DDGST), asked.alignment
        )
        self.output += wire.icresp(self.dgst, MAXH2CDATA)

    def _command(self, pdu: wire.Pdu, now_s: float) -> None:
        sqe = Sqe.unpack(pdu.header[wire.COMMON.size : wire.COMMON.size + 64])
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
        asked = nvme.AUTHREQ_ATR if self.gate is not None else 0
        self._complete(Completion(sqe.cid, 0, admission.result | asked), sqhd)

    def _judge(self, sqe: Sqe, data: bytes) -> Admission:
        recfmt, qid, sqsize, cattr, kato_ms = nvme.CONNECT_DWORDS.unpack(sqe.dwords)
        if recfmt:
            return Admission(Status.CONNECT_INCOMPATIBLE_FORMAT)
        if len(data) != nvme.CONNECT_DATA.size:
            return Admission(Status.SGL_LENGTH_INVALID)
        entries_max = _ADMIN_ENTRIES_MAX if qid == 0 else ENTRIES_MAX
        if not 1 <= sqsize < entries_max:
            return Admission(Status.CONNECT_INVALID_PARAMETERS, 44)  # SQSIZE's place in the SQE
        hostid, cntlid, subnqn, hostnqn = nvme.CONNECT_DATA.unpack(data)
        request = ConnectRequest(
            qid, sqsize + 1, not cattr & nvme.CATTR_NO_FLOW_CONTROL, kato_ms,
            hostid, cntlid, nvme.text(subnqn), nvme.text(hostnqn),
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
            body = wire.DATA.pack(cid, 0, 0, len(reply.data))
            self.output += wire.encode(Type.C2H_DATA, body, reply.data, wire.LAST, self._format)
        self._complete(Completion(cid, reply.status, reply.result))

    def _complete(self, completion: Completion, sqhd: int | None = None) -> None:
        self._live.discard(completion.cid)
        entries = self.request.entries if self.request else _ADMIN_ENTRIES_MAX
        if sqhd is None:
            sqhd = self._commands % entries
        body = completion._replace(sqhd=sqhd).pack()
        self.output += wire.encode(Type.CAPSULE_RESP, body, form=self._format)


def _authentication(gate: Gate, sqe: Sqe, data: bytes, *, sends: bool) -> CommandReply:
    """Authentication Send, or Receive: its message is filled up, as some hosts wait for all of it."""
    invalid = CommandReply(Status.INVALID_FIELD | DO_NOT_RETRY)
    spsp0, spsp1, secp, length = AUTH_DWORDS.unpack(sqe.dwords)
    if (spsp0, spsp1, secp) != (SPSP_CHAP, SPSP_CHAP, SECP_NVME) or not length:
        return invalid
    sgl_type, carried = (nvme.SGL_IN_CAPSULE, len(data)) if sends else (nvme.SGL_TRANSPORT, length)
    if sqe.sgl_type != sgl_type or not length == sqe.sgl_length == carried:
        return CommandReply(Status.SGL_LENGTH_INVALID | DO_NOT_RETRY)
    if sends:
        gate.send(data)
        return CommandReply()
    if length < gate.message_bytes or length % 4:
        return invalid
    return CommandReply(data=gate.receive().ljust(min(length, MESSAGE_BYTES_MAX), b"\0"))
