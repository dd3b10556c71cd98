"""Target: exports subsystems over NVMe/TCP: one thread for all control connections.

Listens, admits hosts, keeps their associations, and hands I/O queues to native threads. A connection
that is not an admitted one yet has `HANDSHAKE_S` (and `authentication_s`, where its host must
authenticate) and few bytes of memory; what hosts cost is bounded by `TargetOptions`. The thread
sleeps while nobody does anything.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace import _native
from headrace.base import peers
from headrace.base.loop import EVENT_READ, EVENT_WRITE, Loop
from headrace.closing import Closing
from headrace.errors import FabricError
from headrace.fabric.chap_exchange import GROUPS, HASHES
from headrace.fabric.connection import Associations, HostConnection, Joined
from headrace.fabric.pdu import DDGST, HDGST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.fabric.chap import DhGroup
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


class _Peer:
    """A connection and its socket."""

    def __init__(self, sock: socket.socket, connection: HostConnection, now_s: float) -> None:
        self.socket = sock
        self.connection = connection
        self.since_s = now_s
        self.close_at_s: float | None = None
        self.cntlid = 0


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
        self._peers: dict[int, _Peer] = {}
        self._shaking: dict[_Peer, None] = {}
        """Those that are not admitted, the oldest first."""
        self._associations: Associations[_Peer] = Associations(
            self._subsystems, self.options, self._traffic, self._end
        )
        self._joined = self._associations.joined
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
            "connections": len(self._peers),
            "connects_refused": self._associations.refused,
            **self._queues.figures(),
        }

    def close(self) -> None:
        """Closes all connections and ends the threads."""
        if self._loop.stopping:
            return
        self._loop.stop()
        self._thread.join()
        for line in list(self._peers.values()):
            self._close(line)
        self._queues.close()
        self._listener.close()
        peers.release()
        self._loop.close()

    # -- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked_s = time.monotonic()
        while not self._loop.stopping:
            self._loop.wait(_TICK_S if self._peers else None)
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
        line = _Peer(
            sock, HostConnection(partial(self._associations.admit, sock), digests), time.monotonic()
        )
        self._peers[sock.fileno()] = line
        self._loop.register(sock, partial(self._handle, line))
        self._shaking[line] = None
        if len(self._shaking) > self.options.handshakes_max:
            self._close(next(iter(self._shaking)))

    def _handle(self, line: _Peer, events: int) -> None:
        if self._peers.get(line.socket.fileno()) is not line:
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

    def _flush(self, line: _Peer) -> None:
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
        for line in list(self._peers.values()):
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

    def _close(self, line: _Peer) -> None:
        """Ends a connection; an admin queue's ends its association."""
        if line.connection.why:
            _log.info("NVMe/TCP connection closed: %s", line.connection.why)
        self._peers.pop(line.socket.fileno(), None)
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

    def _end(self, joined: Joined[_Peer]) -> None:
        """Another peer needs the room of this association."""
        assert joined.line is not None
        joined.line.connection.why = f"{joined.peer} had the most associations of all"
        self._close(joined.line)

    def _settle(self, line: _Peer) -> bool:
        """Once a host has proved who it is, its association counts; False if there is no room for it."""
        joined = self._joined.get(line.cntlid)
        if joined is None or joined.line is not line or joined.settled:
            return True
        if not line.connection.admitted or self._associations.settle(joined):
            return True
        line.connection.why = "meanwhile there is another host in its place"
        return False

    def _joined_by(self, line: _Peer) -> None:
        """After a Connect: an admin queue's connection is the association's."""
        request, controller = line.connection.request, line.connection.controller
        if request is None or controller is None or line.cntlid:
            return
        line.cntlid = controller.association.cntlid
        if request.qid == 0:
            self._joined[line.cntlid].line = line

    def _hand_over(self, line: _Peer) -> None:
        """An I/O queue is connected: from here on native threads have its socket."""
        connection = line.connection
        assert connection.request is not None
        joined = self._joined.get(line.cntlid)
        if joined is None or joined.subsystem is None:
            self._close(line)
            return
        before = connection.left()
        del self._peers[line.socket.fileno()]
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
