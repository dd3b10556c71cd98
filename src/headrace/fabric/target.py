"""Target: exports subsystems over NVMe/TCP: one thread for all control connections.

Listens, admits hosts, keeps their associations, and hands I/O queues to native threads. A connection
that is not an admitted one yet has `HANDSHAKE_S` (and `authentication_s`, where its host must
authenticate) and few bytes of memory; what hosts cost is bounded by `TargetOptions`. Where all room for
associations is taken, the peer that has most of it makes room for another: nobody is shut out by what somebody
else holds. The thread sleeps while nobody does anything.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from headrace import _native
from headrace.base import peers
from headrace.base.lifetime import Closing
from headrace.base.loop import EVENT_READ, EVENT_WRITE, Loop
from headrace.errors import FabricError
from headrace.fabric.chap import Parties
from headrace.fabric.chap_exchange import GROUPS, HASHES, ChapSetup, Gate
from headrace.fabric.command import DISCOVERY_NQN, DiscoveryEntry, Status
from headrace.fabric.controller import (
    QUEUES_MAX,
    Admission,
    Association,
    Controller,
    HostConnection,
)
from headrace.fabric.pdu import DDGST, HDGST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.fabric.chap import DhGroup
    from headrace.fabric.controller import ConnectRequest
    from headrace.fabric.identity import Hash
    from headrace.fabric.subsystem import Subsystem

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


_INVALID_AT_CNTLID = 1 << 16 | 16
_INVALID_AT_SUBNQN = 1 << 16 | 256
_INVALID_AT_HOSTNQN = 1 << 16 | 512
_INVALID_AT_QID = 42

_GENERATION = 1
"""Of the discovery log: subsystems do not come and go."""


@dataclass(eq=False)
class _HostSocket:
    """A connection and its socket."""

    socket: socket.socket
    connection: HostConnection
    since_s: float
    close_at_s: float | None = None
    cntlid: int = 0


@dataclass(eq=False)
class _Joined:
    """An association, and who stands behind it."""

    controller: Controller
    subsystem: Subsystem | None
    chap: ChapSetup | None
    peer: str  # whose it is (`headrace.base.peers`)
    settled: bool  # the host is who it says: before, its association stands in nobody's way
    line: _HostSocket | None = None  # the connection of its admin queue
    queues: set[int] = field(default_factory=set)  # numbers of its I/O queues


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
        self._lines: dict[int, _HostSocket] = {}  # by descriptor
        self._shaking: dict[_HostSocket, None] = {}  # those that are not admitted, the oldest first
        self._joined: dict[int, _Joined] = {}  # by controller's number
        self._refused = 0  # Connects
        self._next_cntlid = 0
        self._loop = Loop()
        self._listener = _listen(address)
        peers.hold()
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._queues = _native.FabricTargetQueues(
            loops=self.options.loops,
            readers=self.options.readers,
            cache_bytes=self.options.cache_bytes or 0,
        )
        self._loop.register(self._listener, self._accept)
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
        if self._loop.stopping:
            return
        self._loop.stop()
        self._thread.join()
        for line in list(self._lines.values()):
            self._close(line)
        self._queues.close()
        self._listener.close()
        peers.release()
        self._loop.close()

    # -- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked_s = time.monotonic()
        while not self._loop.stopping:
            self._loop.wait(_TICK_S if self._lines else None)
            now_s = time.monotonic()
            if now_s - ticked_s >= _TICK_S:
                ticked_s = now_s
                self._tick(now_s)

    def _accept(self, _: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the peer has gone, or no descriptors are left: the next tick closes some
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        digests = HDGST | DDGST if self.options.digests else 0
        connection = HostConnection(partial(self._admit, sock), digests)
        line = _HostSocket(sock, connection, time.monotonic())
        self._lines[sock.fileno()] = line
        self._loop.register(sock, partial(self._handle, line))
        self._shaking[line] = None
        if len(self._shaking) > self.options.handshakes_max:
            self._close(next(iter(self._shaking)))

    def _handle(self, line: _HostSocket, events: int) -> None:
        if self._lines.get(line.socket.fileno()) is not line:
            return  # closed by an event before
        if events & EVENT_READ:
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

    def _flush(self, line: _HostSocket) -> None:
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
            self._loop.modify(line.socket, EVENT_READ | EVENT_WRITE)
            return
        self._loop.modify(line.socket, EVENT_READ)
        if connection.handed_over:
            self._hand_over(line)
        elif connection.closing and line.close_at_s is None:
            # The host closes first: closing with its bytes unread might lose the TermReq.
            line.close_at_s = time.monotonic() + _LINGER_S
            with contextlib.suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)

    def _tick(self, now_s: float) -> None:
        for line in list(self._lines.values()):
            age_s, connection = now_s - line.since_s, line.connection
            if line.close_at_s is not None:
                if now_s >= line.close_at_s:
                    self._close(line)
            elif connection.request is None and age_s > HANDSHAKE_S:
                connection.why = "no Connect came"
                self._close(line)
            elif (
                connection.request
                and age_s > self.options.authentication_s
                and not connection.admitted
            ):
                connection.why = "the host did not authenticate"
                self._close(line)
        for joined in list(self._joined.values()):
            if joined.controller.expires_s() <= now_s and joined.line is not None:
                joined.line.connection.why = "the keep-alive timer expired"
                self._close(joined.line)

    def _close(self, line: _HostSocket) -> None:
        """Ends a connection; an admin queue's ends its association."""
        if line.connection.why:
            _log.info("NVMe/TCP connection closed: %s", line.connection.why)
        self._lines.pop(line.socket.fileno(), None)
        self._shaking.pop(line, None)
        self._loop.unregister(line.socket)
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

    def _admit(self, sock: socket.socket, request: ConnectRequest) -> Admission:
        """Answer a Connect: for an admin queue, or an I/O queue."""
        admission = self._queue(request) if request.qid else self._host(sock, request)
        self._refused += bool(admission.status)
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
        peer = peers.peer_name(sock)
        if not self._make_room(peer):
            return Admission(Status.CONNECT_CONTROLLER_BUSY)
        while not self._next_cntlid or self._next_cntlid in self._joined:
            self._next_cntlid = self._next_cntlid % 0xFFEF + 1
        cntlid, self._next_cntlid = self._next_cntlid, self._next_cntlid % 0xFFEF + 1
        host, port = sock.getsockname()[:2]
        secret = subsystem.secret_of(request.hostnqn) if subsystem else None
        chap = None
        if secret is not None:
            chap = ChapSetup(
                parties=Parties(request.hostnqn, request.subnqn), secrets=secret,
                hashes=self.options.dhchap_hashes, groups=self.options.dhchap_groups,
            )  # fmt: skip

        def discovery() -> tuple[int, list[DiscoveryEntry]]:
            """Names the subsystems that this host may connect to, at the address that it reached."""
            return _GENERATION, [
                DiscoveryEntry(nqn, host, port, sock.family == socket.AF_INET6)
                for nqn, each in self._subsystems.items()
                if each.allows(request.hostnqn)
            ]

        association = Association(
            hostnqn=request.hostnqn,
            hostid=request.hostid,
            subnqn=request.subnqn,
            serial=subsystem.serial if subsystem else "discovery",
            cntlid=cntlid,
            kato_ms=request.kato_ms,
            namespaces=(lambda: subsystem.namespaces) if subsystem else dict,
            discovery=None if subsystem else discovery,
            traffic=self._traffic,
        )
        controller = Controller(association, time.monotonic())
        self._joined[cntlid] = _Joined(controller, subsystem, chap, peer, chap is None)
        return Admission(result=cntlid, controller=controller, gate=Gate(chap) if chap else None)

    def _queue(self, request: ConnectRequest) -> Admission:
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
        if not joined.controller.ready:
            return Admission(Status.COMMAND_SEQUENCE_ERROR)
        if request.qid > QUEUES_MAX or request.qid in joined.queues:
            return Admission(invalid, _INVALID_AT_QID)
        joined.queues.add(request.qid)
        gate = Gate(joined.chap) if joined.chap else None
        return Admission(result=request.cntlid, controller=joined.controller, gate=gate)

    def _is_twin(self, hostid: bytes, hostnqn: str) -> bool:
        """Whether another host with this identifier is connected."""
        associations = (j.controller.association for j in self._joined.values() if j.settled)
        return any(
            hmac.compare_digest(each.hostid, hostid) and each.hostnqn != hostnqn
            for each in associations
        )

    def _make_room(self, peer: str) -> bool:
        """Whether there is room for one more of a peer; ends one of the peer that has most, if it must."""
        settled = [j for j in self._joined.values() if j.settled and j.line is not None]
        if len(settled) < self.options.associations_max:
            return True
        held = Counter(j.peer for j in settled)
        largest = max(held, key=lambda name: (held[name], name == peer))
        if held[largest] <= held[peer] + 1:
            return False  # it would have what it takes from another
        # Whoever only holds on, without a queue to read by, goes first; then the oldest.
        ended = min((j for j in settled if j.peer == largest), key=lambda j: bool(j.queues))
        assert ended.line is not None
        ended.line.connection.why = f"{largest} had the most associations of all"
        self._close(ended.line)
        return True

    def _settle(self, line: _HostSocket) -> bool:
        """Once a host has proved who it is, its association counts; False if there is no room for it."""
        joined = self._joined.get(line.cntlid)
        if (
            joined is None
            or joined.line is not line
            or joined.settled
            or not line.connection.admitted
        ):
            return True
        association = joined.controller.association
        twin = self._is_twin(association.hostid, association.hostnqn)
        joined.settled = not twin and self._make_room(joined.peer)
        if not joined.settled:
            line.connection.why = "meanwhile there is another host in its place"
        return joined.settled

    def _joined_by(self, line: _HostSocket) -> None:
        """After a Connect: an admin queue's connection is the association's."""
        request, controller = line.connection.request, line.connection.controller
        if request is None or controller is None or line.cntlid:
            return
        line.cntlid = controller.association.cntlid
        if request.qid == 0:
            self._joined[line.cntlid].line = line

    def _hand_over(self, line: _HostSocket) -> None:
        """An I/O queue is connected: from here on native threads have its socket."""
        connection = line.connection
        assert connection.request is not None
        joined = self._joined.get(line.cntlid)
        if joined is None or joined.subsystem is None:
            self._close(line)
            return
        before = connection.left()
        del self._lines[line.socket.fileno()]
        self._loop.unregister(line.socket)
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

        if not self._loop.stopping:
            self._loop.call_soon(tell)


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
