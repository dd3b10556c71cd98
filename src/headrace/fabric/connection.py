"""Connections of a target while they carry control commands, and the associations of admitted hosts.

A connection takes bytes and gives bytes: handshake (ICReq, Connect), then the admin queue of an association,
or an I/O queue that is handed over to the native data path. It knows no sockets: `take` is given what was
received and `output` is to be sent.

Where all room is taken, the peer that has most of it makes room for another: nobody is shut out by what
somebody else holds.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from headrace.base.peers import peer_name
from headrace.fabric.chap import (
    AUTH_DWORDS,
    MESSAGE_BYTES_MAX,
    SECP_NVME,
    SPSP_CHAP,
    Parties,
)
from headrace.fabric.chap_exchange import ChapSetup, Gate
from headrace.fabric.command import (
    ADMIN_CAPSULE_DATA_MAX,
    AUTHREQ_ATR,
    CATTR_NO_FLOW_CONTROL,
    CONNECT_DATA,
    CONNECT_DWORDS,
    DISCOVERY_NQN,
    DO_NOT_RETRY,
    SGL_IN_CAPSULE,
    SGL_TRANSPORT,
    Admin,
    Completion,
    DiscoveryEntry,
    Fabrics,
    Sqe,
    Status,
    text,
)
from headrace.fabric.controller import (
    ENTRIES_MAX,
    QUEUES_MAX,
    Association,
    CommandReply,
    Controller,
)
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
    from collections.abc import Callable, Mapping

    from headrace.fabric.pdu import Pdu
    from headrace.fabric.subsystem import Subsystem
    from headrace.fabric.target import TargetOptions

_INVALID_AT_CNTLID = 1 << 16 | 16
_INVALID_AT_SUBNQN = 1 << 16 | 256
_INVALID_AT_HOSTNQN = 1 << 16 | 512
_INVALID_AT_QID = 42

_GENERATION = 1
"""Of the discovery log: subsystems do not come and go."""

_LineT = TypeVar("_LineT")


class Joined(Generic[_LineT]):
    """An association, and who stands behind it.

    Attributes:
        peer: whose it is (`headrace.base.peers`).
        line: the connection of its admin queue.
        queues: numbers of its I/O queues.
    """

    def __init__(
        self,
        controller: Controller,
        subsystem: Subsystem | None,
        chap: ChapSetup | None,
        peer: str,
    ) -> None:
        self.peer = peer
        self.controller = controller
        self.subsystem = subsystem
        self.chap = chap
        self.settled = chap is None
        """The host is who it says: before, its association stands in nobody's way."""
        self.line: _LineT | None = None
        self.queues: set[int] = set()


class Associations(Generic[_LineT]):
    """Admits hosts and their queues.

    Args:
        subsystems: what is exported, by name.
        options: limits, and what hosts may prove themselves by.
        traffic: bytes and reads so far, for controllers that are asked.
        end: ends an association, at once.

    Attributes:
        joined: by controller's number.
        refused: Connects that were refused.
    """

    def __init__(
        self,
        subsystems: Mapping[str, Subsystem],
        options: TargetOptions,
        traffic: Callable[[], tuple[int, int]],
        end: Callable[[Joined[_LineT]], None],
    ) -> None:
        self._end = end
        self.joined: dict[int, Joined[_LineT]] = {}
        self.refused = 0
        self._subsystems = subsystems
        self._options = options
        self._traffic = traffic
        self._next_cntlid = 0

    def admit(self, sock: socket.socket, request: ConnectRequest) -> Admission:
        """Answer a Connect: for an admin queue, or an I/O queue."""
        admission = self._queue(request) if request.qid else self._host(sock, request)
        self.refused += bool(admission.status)
        return admission

    def _host(self, sock: socket.socket, request: ConnectRequest) -> Admission:  # noqa: PLR0911 - a list of refusals
        """A Connect for an admin queue."""
        invalid = Status.CONNECT_INVALID_PARAMETERS
        if request.cntlid != 0xFFFF:
            return Admission(invalid, _INVALID_AT_CNTLID)
        if not request.hostnqn:
            return Admission(invalid, _INVALID_AT_HOSTNQN)
        subsystem = self._subsystems.get(request.subnqn)
        if subsystem is None and request.subnqn != DISCOVERY_NQN:
            return Admission(invalid, _INVALID_AT_SUBNQN)
        if subsystem is not None and not subsystem.allows(request.hostnqn):
            return Admission(Status.CONNECT_INVALID_HOST)
        if self._is_twin(request.hostid, request.hostnqn):
            return Admission(Status.CONNECT_INVALID_HOST)
        peer = peer_name(sock)
        if not self._make_room(peer):
            return Admission(Status.CONNECT_CONTROLLER_BUSY)
        cntlid = self._free_cntlid()
        discovery = None
        if subsystem is None:
            host, port = sock.getsockname()[:2]
            discovery = self._discovery(
                request.hostnqn, host, port, ipv6=sock.family == socket.AF_INET6
            )
        controller = Controller(
            Association(
                hostnqn=request.hostnqn,
                hostid=request.hostid,
                subnqn=request.subnqn,
                serial=subsystem.serial if subsystem else "discovery",
                cntlid=cntlid,
                kato_ms=request.kato_ms,
                namespaces=(lambda: subsystem.namespaces) if subsystem else dict,
                discovery=discovery,
                traffic=self._traffic,
            ),
            time.monotonic(),
        )
        chap = self._chap(subsystem, request) if subsystem else None
        self.joined[cntlid] = Joined(controller, subsystem, chap, peer)
        return Admission(result=cntlid, controller=controller, gate=Gate(chap) if chap else None)

    def _is_twin(self, hostid: bytes, hostnqn: str) -> bool:
        """Whether another host with this identifier is connected."""
        associations = (j.controller.association for j in self.joined.values() if j.settled)
        return any(
            hmac.compare_digest(each.hostid, hostid) and each.hostnqn != hostnqn
            for each in associations
        )

    def _make_room(self, peer: str) -> bool:
        """Whether there is room for one more of a peer; ends one of the peer that has most, if it must."""
        settled = [j for j in self.joined.values() if j.settled and j.line is not None]
        if len(settled) < self._options.associations_max:
            return True
        held = Counter(j.peer for j in settled)
        largest = max(held, key=lambda name: (held[name], name == peer))
        if held[largest] <= held[peer] + 1:
            return False  # it would have what it takes from another
        # Whoever only holds on, without a queue to read by, goes first; then the oldest.
        self._end(min((j for j in settled if j.peer == largest), key=lambda j: bool(j.queues)))
        return True

    def settle(self, joined: Joined[_LineT]) -> bool:
        """A host has proved who it is: its association counts; False if there is no room for it."""
        association = joined.controller.association
        if self._is_twin(association.hostid, association.hostnqn):
            return False
        if not self._make_room(joined.peer):
            return False
        joined.settled = True
        return True

    def _chap(self, subsystem: Subsystem, request: ConnectRequest) -> ChapSetup | None:
        """What a host has to prove; None: it is believed."""
        secret = subsystem.secret_of(request.hostnqn)
        if secret is None:
            return None
        return ChapSetup(
            parties=Parties(request.hostnqn, request.subnqn), secrets=secret,
            hashes=self._options.dhchap_hashes, groups=self._options.dhchap_groups,
        )  # fmt: skip

    def _queue(self, request: ConnectRequest) -> Admission:
        """A Connect for an I/O queue: of an association that there is, of the same host."""
        invalid = Status.CONNECT_INVALID_PARAMETERS
        joined = self.joined.get(request.cntlid)
        if joined is None or joined.subsystem is None:
            return Admission(invalid, _INVALID_AT_CNTLID)
        association = joined.controller.association
        if association.subnqn != request.subnqn:
            return Admission(invalid, _INVALID_AT_SUBNQN)
        same = hmac.compare_digest(association.hostid, request.hostid)
        if association.hostnqn != request.hostnqn or not same:
            return Admission(invalid, _INVALID_AT_HOSTNQN)
        if not joined.controller.registers.ready:
            return Admission(Status.COMMAND_SEQUENCE_ERROR)
        if request.qid > QUEUES_MAX or request.qid in joined.queues:
            return Admission(invalid, _INVALID_AT_QID)
        joined.queues.add(request.qid)
        gate = Gate(joined.chap) if joined.chap else None
        return Admission(result=request.cntlid, controller=joined.controller, gate=gate)

    def _free_cntlid(self) -> int:
        """A number that was not given away recently."""
        while True:
            self._next_cntlid = self._next_cntlid % 0xFFEF + 1
            if self._next_cntlid not in self.joined:
                return self._next_cntlid

    def _discovery(
        self, hostnqn: str, address: str, port: int, *, ipv6: bool
    ) -> Callable[[], tuple[int, list[DiscoveryEntry]]]:
        """Names to a host the subsystems that it may connect to, at the address that it reached."""

        def entries() -> tuple[int, list[DiscoveryEntry]]:
            return _GENERATION, [
                DiscoveryEntry(nqn, address, port, ipv6)
                for nqn, subsystem in self._subsystems.items()
                if subsystem.allows(hostnqn)
            ]

        return entries


MAXH2CDATA = 128 << 10
_ADMIN_ENTRIES_MAX = 256
_NO_FLOW_CONTROL = 0xFFFF
_EVENT_CIDS = 4


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
                self._take_pdu(pdu, now_s)
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

    def _take_pdu(self, pdu: Pdu, now_s: float) -> None:
        if pdu.type is Type.IC_REQ:
            self._open(pdu)
        elif pdu.type is Type.CAPSULE_CMD:
            self._command(pdu, now_s)
        elif pdu.type is Type.H2C_TERM_REQ:
            self.why = f"the host ended the connection: {read_term_req(pdu.header)}"
            self.output.clear()
            self.closing = True
        else:
            raise PduFault(
                Fatal.INVALID_HEADER_FIELD, 10, "TTAG of an H2CData that nobody asked for"
            )

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
        if fctype == Fabrics.AUTH_SEND:
            self._reply(sqe.cid, self._auth_send(gate, sqe, data))
        elif fctype == Fabrics.AUTH_RECEIVE:
            self._reply(sqe.cid, self._auth_receive(gate, sqe))
        elif not gate.authenticated:
            self._reply(sqe.cid, CommandReply(Status.AUTHENTICATION_REQUIRED | DO_NOT_RETRY))
        else:
            return False
        if gate.over:
            self.why = gate.why
            self.closing = True
        return True

    @staticmethod
    def _auth_send(gate: Gate, sqe: Sqe, data: bytes) -> CommandReply:
        spsp0, spsp1, secp, length = AUTH_DWORDS.unpack(sqe.dwords)
        if (spsp0, spsp1, secp) != (SPSP_CHAP, SPSP_CHAP, SECP_NVME) or not length:
            return CommandReply(Status.INVALID_FIELD | DO_NOT_RETRY)
        if sqe.sgl_type != SGL_IN_CAPSULE or not length == sqe.sgl_length == len(data):
            return CommandReply(Status.SGL_LENGTH_INVALID | DO_NOT_RETRY)
        gate.send(data)
        return CommandReply()

    @staticmethod
    def _auth_receive(gate: Gate, sqe: Sqe) -> CommandReply:
        """The message, filled up to what the host has room for: some hosts wait for all of it."""
        spsp0, spsp1, secp, length = AUTH_DWORDS.unpack(sqe.dwords)
        if (spsp0, spsp1, secp) != (SPSP_CHAP, SPSP_CHAP, SECP_NVME) or not length:
            return CommandReply(Status.INVALID_FIELD | DO_NOT_RETRY)
        if sqe.sgl_type != SGL_TRANSPORT or sqe.sgl_length != length:
            return CommandReply(Status.SGL_LENGTH_INVALID | DO_NOT_RETRY)
        if length < gate.message_bytes or length % 4:
            return CommandReply(Status.INVALID_FIELD | DO_NOT_RETRY)
        return CommandReply(data=gate.receive().ljust(min(length, MESSAGE_BYTES_MAX), b"\0"))

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
