"""Target: exports subsystems over NVMe/TCP: one thread for all control connections.

Listens, admits hosts, keeps their associations, and hands I/O queues to native threads. A connection
that is not an admitted one yet has `HANDSHAKE_S` (and `authentication_s`, where its host must
authenticate) and few bytes of memory; what hosts cost is bounded by `TargetOptions`. The thread
sleeps while nobody does anything.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import _native
from headrace.closing import Closing
from headrace.errors import FabricError
from headrace.fabric.chap_host import GROUPS, HASHES
from headrace.fabric.chap_proof import Parties
from headrace.fabric.chap_target import ChapTarget
from headrace.fabric.command import Status
from headrace.fabric.connection import Admission, Connection
from headrace.fabric.controller import QUEUES_MAX, Association, Controller
from headrace.fabric.pdu import DDGST, HDGST
from headrace.fabric.structures import DISCOVERY_NQN, DiscoveryEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace.fabric.connection import ConnectRequest
    from headrace.fabric.dh import DhGroup
    from headrace.fabric.secret import Hash
    from headrace.fabric.subsystem import Subsystem

__all__ = ["Target", "TargetOptions"]

_log = logging.getLogger("headrace.fabric")

PORT = 4420
"""IANA's for NVMe over Fabrics."""

HANDSHAKE_S = 5.0
"""ICReq and Connect come within it, or the connection ends."""

_LINGER_S = 1.0
_TICK_S = 0.25
_BACKLOG = 512
_RECEIVE_BYTES = 64 << 10
_OUTPUT_BYTES_MAX = 8 << 20
_INVALID_AT_CNTLID, _INVALID_AT_SUBNQN, _INVALID_AT_HOSTNQN = (
    1 << 16 | 16,
    1 << 16 | 256,
    1 << 16 | 512,
)
_INVALID_AT_QID = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """What a target takes and spends."""

    digests: bool = True
    """Agree to digests that a host offers."""
    associations_max: int = 256
    """Hosts connected at once."""
    handshakes_max: int = 512
    """Connections that have not passed Connect and authentication; the oldest goes when there are more."""
    authentication_s: float = 30.0
    """From a connection's beginning to its host's proof. An emulated CPU needs seconds for ffdhe8192."""
    dhchap_hashes: tuple[Hash, ...] = HASHES
    """Taken for the proofs; the first that a host offers is chosen."""
    dhchap_groups: tuple[DhGroup, ...] = GROUPS
    """Taken for the exchange; the first that a host offers is chosen."""
    loops: int = 1
    """Threads that move data."""
    readers: int = 16
    """Threads that read what is not in the page cache."""
    cache_bytes: int | None = None
    """Exports that are larger together are read past the page cache where they are not in it, since they
    would not stay there; None: half of the machine's memory."""


class _Line:
    """A connection and its socket."""

    def __init__(self, sock: socket.socket, connection: Connection, now_s: float) -> None:
        self.socket = sock
        self.connection = connection
        self.since_s = now_s
        self.close_at_s: float | None = None
        self.cntlid = 0


class _Joined:
    """An association and the connection of its admin queue."""

    def __init__(
        self, controller: Controller, subsystem: Subsystem | None, chap: ChapTarget | None
    ) -> None:
        self.controller = controller
        self.subsystem = subsystem
        self.chap = chap
        self.settled = chap is None
        """The host is who it says: before, its association stands in nobody's way."""
        self.line: _Line | None = None
        self.queues: set[int] = set()


class Target(Closing):
    """Serves until `close`. Thread-safe.

    Args:
        subsystems: what is exported.
        address: where to listen; port 0 takes a free one.
        options: limits.

    Raises:
        FabricError: the address cannot be listened on.
    """

    def __init__(
        self,
        subsystems: Iterable[Subsystem],
        address: tuple[str, int] = ("127.0.0.1", PORT),
        options: TargetOptions | None = None,
    ) -> None:
        self.options = options or TargetOptions()
        self._subsystems = {subsystem.nqn: subsystem for subsystem in subsystems}
        self._lines: dict[int, _Line] = {}
        self._shaking: dict[_Line, None] = {}
        """Those that are not admitted, the oldest first."""
        self._joined: dict[int, _Joined] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._next_cntlid = 0
        self._generation = 1
        self._stopping = False
        self._refused = 0
        self._listener = _listen(address)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._queues = _native.FabricTargetQueues(
            loops=self.options.loops,
            readers=self.options.readers,
            cache_bytes=self.options.cache_bytes or 0,
        )
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        for subsystem in self._subsystems.values():
            subsystem.on_change(self._namespace_changed)
        self._thread = threading.Thread(target=self._run, name="headrace-target", daemon=True)
        self._thread.start()

    def figures(self) -> dict[str, int]:
        """What was done so far."""
        return {
            "associations": len(self._joined),
            "connections": len(self._lines),
            "connects_refused": self._refused,
            **self._queues.figures(),
        }

    def close(self) -> None:
        """Closes all connections and ends the threads."""
        if self._stopping:
            return
        self._stopping = True
        self._call_soon(lambda: None)
        self._thread.join()
        for line in list(self._lines.values()):
            self._close(line)
        self._queues.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)

    # -- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked_s = time.monotonic()
        while not self._stopping:
            for key, events in self._selector.select(_TICK_S if self._lines else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    self._run_soon()
                else:
                    self._handle(key.data, events)
            now_s = time.monotonic()
            if now_s - ticked_s >= _TICK_S:
                ticked_s = now_s
                self._tick(now_s)

    def _call_soon(self, function: Callable[[], None]) -> None:
        self._soon.append(function)
        os.eventfd_write(self._wake, 1)

    def _run_soon(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._soon:
            self._soon.popleft()()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the peer has gone, or no descriptors are left: the next tick closes some
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        digests = HDGST | DDGST if self.options.digests else 0
        line = _Line(sock, Connection(self._admitting(sock), digests), time.monotonic())
        self._lines[sock.fileno()] = line
        self._selector.register(sock, selectors.EVENT_READ, line)
        self._shaking[line] = None
        if len(self._shaking) > self.options.handshakes_max:
            self._close(next(iter(self._shaking)))

    def _handle(self, line: _Line, events: int) -> None:
        if self._lines.get(line.socket.fileno()) is not line:
            return  # closed by an event before
        if events & selectors.EVENT_READ:
            try:
                received = line.socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                received = None
            except OSError:
                received = b""
            if received == b"":
                self._close(line)
                return
            if received and line.close_at_s is None:
                line.connection.take(received, time.monotonic())
                self._joined_by(line)
                if line.connection.admitted:
                    self._shaking.pop(line, None)
                if not self._settle(line):
                    self._close(line)
                    return
        self._flush(line)

    def _flush(self, line: _Line) -> None:
        connection = line.connection
        try:
            while connection.output:
                del connection.output[: line.socket.send(connection.output)]
        except BlockingIOError:
            if len(connection.output) > _OUTPUT_BYTES_MAX:
                connection.why = "the host does not read what it asked for"
                self._close(line)
                return
        except OSError:
            self._close(line)
            return
        if connection.output:
            self._selector.modify(line.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, line)
            return
        self._selector.modify(line.socket, selectors.EVENT_READ, line)
        if connection.handed_over:
            self._hand_over(line)
        elif connection.closing and line.close_at_s is None:
            # The host closes first: closing with its bytes unread might lose the TermReq.
            line.close_at_s = time.monotonic() + _LINGER_S
            with contextlib.suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)

    def _tick(self, now_s: float) -> None:
        for line in list(self._lines.values()):
            if line.close_at_s is not None:
                if now_s >= line.close_at_s:
                    self._close(line)
            elif line.connection.request is None:
                if now_s - line.since_s > HANDSHAKE_S:
                    line.connection.why = "no Connect came"
                    self._close(line)
            elif (
                not line.connection.admitted
                and now_s - line.since_s > self.options.authentication_s
            ):
                line.connection.why = "the host did not authenticate"
                self._close(line)
        for joined in list(self._joined.values()):
            if joined.controller.expires_s() <= now_s and joined.line is not None:
                joined.line.connection.why = "the keep-alive timer expired"
                self._close(joined.line)

    def _close(self, line: _Line) -> None:
        """Ends a connection; an admin queue's ends its association."""
        if line.connection.why:
            _log.info("NVMe/TCP connection closed: %s", line.connection.why)
        self._lines.pop(line.socket.fileno(), None)
        self._shaking.pop(line, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.socket.close()
        joined = self._joined.get(line.cntlid)
        if joined is None:
            return
        if joined.line is line:
            del self._joined[line.cntlid]
            self._queues.drop(line.cntlid)
        elif line.connection.request is not None:
            joined.queues.discard(line.connection.request.qid)  # it was never handed over

    # -- hosts ------------------------------------------------------------------------------------

    def _admitting(self, sock: socket.socket) -> Callable[[ConnectRequest], Admission]:
        def admit(request: ConnectRequest) -> Admission:
            admission = (
                self._admit_queue(request) if request.qid else self._admit_host(sock, request)
            )
            self._refused += bool(admission.status)
            return admission

        return admit

    def _admit_host(self, sock: socket.socket, request: ConnectRequest) -> Admission:  # noqa: PLR0911 - a list of refusals
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
        if self._is_full():
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
        self._joined[cntlid] = _Joined(controller, subsystem, chap)
        return Admission(result=cntlid, controller=controller, gate=chap.gate() if chap else None)

    def _chap(self, subsystem: Subsystem, request: ConnectRequest) -> ChapTarget | None:
        """What a host has to prove; None: it is believed."""
        secret = subsystem.secret_of(request.hostnqn)
        if secret is None:
            return None
        return ChapTarget(
            parties=Parties(request.hostnqn, request.subnqn), secrets=secret,
            hashes=self.options.dhchap_hashes, groups=self.options.dhchap_groups,
        )  # fmt: skip

    def _is_twin(self, hostid: bytes, hostnqn: str) -> bool:
        """Whether another host with this identifier is connected."""
        associations = (j.controller.association for j in self._joined.values() if j.settled)
        return any(
            hmac.compare_digest(each.hostid, hostid) and each.hostnqn != hostnqn
            for each in associations
        )

    def _is_full(self) -> bool:
        return sum(j.settled for j in self._joined.values()) >= self.options.associations_max

    def _settle(self, line: _Line) -> bool:
        """Once a host has proved who it is, its association counts; False if there is no room for it."""
        joined = self._joined.get(line.cntlid)
        if joined is None or joined.line is not line or joined.settled:
            return True
        if not line.connection.admitted:
            return True
        association = joined.controller.association
        if self._is_full() or self._is_twin(association.hostid, association.hostnqn):
            line.connection.why = "meanwhile there is another host in its place"
            return False
        joined.settled = True
        return True

    def _admit_queue(self, request: ConnectRequest) -> Admission:
        """A Connect for an I/O queue: of an association that there is, of the same host."""
        invalid = Status.CONNECT_INVALID_PARAMETERS
        joined = self._joined.get(request.cntlid)
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
        gate = joined.chap.gate() if joined.chap else None
        return Admission(result=request.cntlid, controller=joined.controller, gate=gate)

    def _free_cntlid(self) -> int:
        """A number that was not given away recently."""
        while True:
            self._next_cntlid = self._next_cntlid % 0xFFEF + 1
            if self._next_cntlid not in self._joined:
                return self._next_cntlid

    def _joined_by(self, line: _Line) -> None:
        """After a Connect: an admin queue's connection is the association's."""
        request, controller = line.connection.request, line.connection.controller
        if request is None or controller is None or line.cntlid:
            return
        line.cntlid = controller.association.cntlid
        if request.qid == 0:
            self._joined[line.cntlid].line = line

    def _hand_over(self, line: _Line) -> None:
        """An I/O queue is connected: from here on native threads have its socket."""
        connection = line.connection
        assert connection.request is not None
        joined = self._joined.get(line.cntlid)
        if joined is None or joined.subsystem is None:
            self._close(line)
            return
        before = connection.left()
        del self._lines[line.socket.fileno()]
        self._selector.unregister(line.socket)
        self._queues.adopt(
            fd=line.socket.detach(),
            entries=connection.request.entries,
            dgst=connection.dgst,
            hpda=connection.hpda,
            flow_control=connection.request.flow_control,
            exports=joined.subsystem.exports,
            association=line.cntlid,
            before=before,
        )

    # -- what controllers ask for -----------------------------------------------------------------

    def _discovery(
        self, hostnqn: str, address: str, port: int, *, ipv6: bool
    ) -> Callable[[], tuple[int, list[DiscoveryEntry]]]:
        """Names to a host the subsystems that it may connect to, at the address that it reached."""

        def entries() -> tuple[int, list[DiscoveryEntry]]:
            return self._generation, [
                DiscoveryEntry(nqn, address, port, ipv6)
                for nqn, subsystem in self._subsystems.items()
                if subsystem.allows(hostnqn)
            ]

        return entries

    def _traffic(self) -> tuple[int, int]:
        figures = self._queues.figures()
        return figures["bytes"], figures["reads"]

    def _namespace_changed(self, nsid: int) -> None:
        def tell() -> None:
            for joined in self._joined.values():
                if joined.subsystem is not None and joined.line is not None:
                    joined.controller.namespace_changed(nsid)
                    joined.line.connection.send_events()
                    self._flush(joined.line)

        if not self._stopping:
            self._call_soon(tell)


def _listen(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as e:
        raise FabricError(
            f"NVMe/TCP target cannot listen on {address[0]}:{address[1]}: {e.strerror or e}.",
            next_step="Choose another address or port, or stop who listens there.",
            errno=e.errno,
        ) from e
