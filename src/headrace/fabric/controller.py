"""Controller: what a target answers one host's control commands: a pure state machine.

One association: properties, Identify, log pages, features, keep-alive, asynchronous events. Commands
in, replies out; knows no sockets and no clock (the time is told). Everything is read-only: what
would change a namespace is refused with the standard status.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from headrace.fabric.command import (
    CONTROLLER_DISCOVERY,
    CONTROLLER_IO,
    DO_NOT_RETRY,
    IDENTIFY_BYTES,
    PROPERTY_DWORDS,
    SGL_TRANSPORT,
    Admin,
    Cap,
    Cc,
    Completion,
    ControllerIdentity,
    Csts,
    Fabrics,
    Feature,
    LogPage,
    Property,
    Sqe,
    Status,
    pack_active_namespaces,
    pack_changed_namespaces,
    pack_descriptors,
    pack_discovery_log,
    pack_smart_log,
    pack_supported_logs,
)
from headrace.fabric.subsystem import NSID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.fabric.command import DiscoveryEntry
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
_NQN_LOGS = [LogPage.SUPPORTED, LogPage.ERROR, LogPage.SMART, LogPage.CHANGED_NAMESPACES]
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
    discovery: Callable[[], tuple[int, list[DiscoveryEntry]]] | None = None
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
        return bool(self._csts & Csts.RDY) and not self._csts & Csts.SHST_MASK

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
                return self._sized(sqe, self._identify(sqe), IDENTIFY_BYTES)
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
        attributes, offset, value = PROPERTY_DWORDS.unpack(sqe.dwords)
        wide = attributes & 7 == 1
        match sqe.nsid & 0xFF:
            case Fabrics.PROPERTY_GET:
                properties = {
                    (Property.CAP, True): Cap.make(ENTRIES_MAX, _ENABLE_S),
                    (Property.VS, False): _VERSION,
                    (Property.CC, False): self._cc,
                    (Property.CSTS, False): self._csts,
                }
                known = properties.get((offset, wide))
                return _INVALID_FIELD if known is None else CommandReply(result=known)
            case Fabrics.PROPERTY_SET if offset == Property.CC and not wide:
                # Enabling and shutting down are done at once: there is nothing to flush.
                enabled = self._cc & Cc.EN
                self._cc = value & 0xFFFFFFFF
                if not self._cc & Cc.EN:
                    self._csts = 0
                elif not enabled:
                    self._csts = Csts.RDY
                if self._cc & Cc.SHN_MASK:
                    self._csts |= Csts.SHST_COMPLETE
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
        if sqe.sgl_type != SGL_TRANSPORT or sqe.sgl_length != nbytes:
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
            return pack_active_namespaces(list(namespaces), sqe.nsid)
        namespace = namespaces.get(sqe.nsid)
        if cns == 0:
            if namespace is None and not 1 <= sqe.nsid <= NSID_MAX:
                return None
            return namespace.identity.pack() if namespace else bytes(IDENTIFY_BYTES)
        if cns == 3 and namespace is not None:
            return pack_descriptors(namespace.identity.uid)
        return None

    def _identity(self, namespaces: int) -> ControllerIdentity:
        discovers = self.association.discovery is not None
        return ControllerIdentity(
            serial=self.association.serial,
            model="headrace",
            firmware="0.1",
            cntlid=self.association.cntlid,
            subnqn=self.association.subnqn,
            mdts=_MDTS,
            version=_VERSION,
            kind=CONTROLLER_DISCOVERY if discovers else CONTROLLER_IO,
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
            return pack_supported_logs([int(page) for page in offered])
        if number == LogPage.ERROR:
            return bytes(64)
        if number == LogPage.SMART:
            return pack_smart_log(*self.association.traffic(), now_s - self._started_s)
        if number == LogPage.CHANGED_NAMESPACES:
            return pack_changed_namespaces(sorted(self._changed))
        assert discovery is not None
        return pack_discovery_log(*discovery())

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
