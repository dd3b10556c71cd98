"""Associations: the hosts that a target has admitted, and whom it admits.

Where all room is taken, the peer that has most of it makes room for another: nobody is shut out by what
somebody else holds.

Knows no sockets but to say at which address a host has reached the target.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace.base.peers import peer_name
from headrace.fabric.chap_proof import Parties
from headrace.fabric.chap_target import ChapTarget
from headrace.fabric.command import Status
from headrace.fabric.connection import Admission
from headrace.fabric.controller import QUEUES_MAX, Association, Controller
from headrace.fabric.structures import DISCOVERY_NQN, DiscoveryEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.fabric.connection import ConnectRequest
    from headrace.fabric.subsystem import Subsystem
    from headrace.fabric.target_options import TargetOptions

__all__ = ["Associations", "Joined"]

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
        chap: ChapTarget | None,
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
        return Admission(result=cntlid, controller=controller, gate=chap.gate() if chap else None)

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

    def _chap(self, subsystem: Subsystem, request: ConnectRequest) -> ChapTarget | None:
        """What a host has to prove; None: it is believed."""
        secret = subsystem.secret_of(request.hostnqn)
        if secret is None:
            return None
        return ChapTarget(
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
        gate = joined.chap.gate() if joined.chap else None
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
