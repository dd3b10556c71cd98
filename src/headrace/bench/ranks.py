"""Ranks: how the processes of a run find each other, and meet, gather and broadcast among them. No MPI.

Rank 0 listens, and writes where into a file in the run's folder, which all ranks share; the others connect.
Over these connections go the few documents of a run, and news of who is gone.

At every step ranks of one host meet in memory that they share, and hosts in a tree, each by its first rank.
They say on one clock when their steps ended: what it costs to meet, the harness's own doing, is in no step.

Every wait has a deadline and names the ranks that are missing. It ends at once when a rank dies: its connection
breaks, or, where its host is gone and says nothing any more, is given up after some seconds. Rank 0 tells the
others which rank it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from headrace._native import RankBarrier
from headrace.base.documents import DocumentKind
from headrace.base.files import replace_file
from headrace.base.job import start_of_job
from headrace.base.peers import interfaces
from headrace.errors import BenchError
from headrace.machine.host import this_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from headrace.base.job import Rank


_MESSAGE_BYTES_MAX: Final = 1 << 30
_LENGTH: Final = struct.Struct("!Q")
_FAILED: Final = "headrace: failed"
"""The key of a message that says which rank is gone."""

_KEEP_ALIVE: Final = (
    ("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 8000),
)  # fmt: skip
"""A host that says nothing for 6 to 8 s is gone. Its kernel answers, however busy its processes are."""


class RankConnection:
    """A connection to another rank: messages both ways, each a length and JSON.

    Attributes:
        messages: that have arrived, and nobody has taken yet.
        ahead_ns: how far the other end's clock is ahead of ours, where it was measured.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._partial = bytearray()
        self.messages: deque[Any] = deque()
        self.ahead_ns = 0
        self.fileno, self.close = peer.fileno, peer.close
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE:
            with contextlib.suppress(AttributeError, OSError):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, value: Any, wait_s: float) -> None:
        """Send a message; OSError if the other end is gone."""
        data = json.dumps(value).encode()
        self._peer.settimeout(wait_s)
        self._peer.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, wait_s: float, most: int = _MESSAGE_BYTES_MAX) -> Any:
        """The next message.

        Raises:
            TimeoutError: none came.
            OSError: the other end is gone.
            BenchError: the other end says that a rank is gone.
        """
        until = time.monotonic() + wait_s
        while not self.messages:
            self._peer.settimeout(max(0.001, until - time.monotonic()))
            self._take(self._peer.recv(1 << 20), most)
        return self.messages.popleft()

    def pull(self) -> bool:
        """Take what has come, without waiting; whether a whole message is there. Errors as for `receive`."""
        self._peer.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while not self.messages:
                self._take(self._peer.recv(1 << 20), _MESSAGE_BYTES_MAX)
        return bool(self.messages)

    def show_clock(self, wait_s: float) -> None:
        """Let the other end compare its clock with ours; errors as for `receive`."""
        for _ in range(_CLOCK_ROUNDS):
            self.receive(wait_s)
            self.send(time.perf_counter_ns(), wait_s)

    def compare_clocks(self, wait_s: float) -> None:
        """Measure `ahead_ns` by the quickest of some answers; errors as for `receive`."""
        rounds = []
        for _ in range(_CLOCK_ROUNDS):
            asked_ns = time.perf_counter_ns()
            self.send(None, wait_s)
            theirs_ns = int(self.receive(wait_s))
            answered_ns = time.perf_counter_ns()
            ahead_ns = theirs_ns - (asked_ns + answered_ns) // 2
            rounds.append((answered_ns - asked_ns, ahead_ns))
        self.ahead_ns = min(rounds)[1]

    def _take(self, data: bytes, most: int) -> None:
        if not data:
            raise ConnectionResetError("its connection ended")
        self._partial += data
        while len(self._partial) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._partial)
            if length > most:
                raise BenchError(f"a rank sent {length} bytes, expected at most {most}.")
            end = _LENGTH.size + length
            if len(self._partial) < end:
                return
            message = json.loads(bytes(self._partial[_LENGTH.size : end]))
            del self._partial[:end]
            if isinstance(message, dict) and _FAILED in message:
                raise _gone(str(message[_FAILED]))
            self.messages.append(message)


class RankGroup:
    """All ranks of a run. Calls must come in the same order in every rank.

    Attributes:
        hosts: that they are on.
    """

    def __init__(
        self, place: Rank, connections: Mapping[int, RankConnection], deadline_s: float
    ) -> None:
        self.place, self.hosts = place, 1
        self._connections = dict(connections)
        self._deadline_s = deadline_s
        self._barrier: RankBarrier | None = None
        self._host: list[int] = [place.rank]
        """The ranks of this host, by their places in the barrier."""
        self._up: dict[int, RankConnection] = {}
        self._down: dict[int, RankConnection] = {}
        """Of the rank that leads a host: to the one host above it, and to those below."""

    def gather(self, value: Any, deadline_s: float | None = None) -> list[Any]:
        """Every rank's value by rank, in rank 0; an empty list in the others.

        Raises:
            BenchError: a rank died, or did not come within the deadline.
        """
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        if self.place.is_first:
            values = {0: value} | self._receive_all(wait_s)
            return [values[rank] for rank in range(self.place.world_size)]
        with self._naming(0, wait_s):
            self._connections[0].send(value, wait_s)
        return []

    def broadcast(self, value: Any, deadline_s: float | None = None) -> Any:
        """Rank 0's value, in every rank; errors as for `gather`."""
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        if not self.place.is_first:
            with self._naming(0, wait_s):
                return self._connections[0].receive(wait_s)
        for rank, connection in self._connections.items():
            with self._naming(rank, wait_s):
                connection.send(value, wait_s)
        return value

    def barrier(self, deadline_s: float | None = None) -> None:
        """Wait for all ranks; errors as for `gather`."""
        now_s = time.perf_counter()
        self.meet(now_s, now_s, deadline_s)

    def meet(
        self, end_s: float, undelayed_s: float, deadline_s: float | None = None
    ) -> tuple[float, float]:
        """Wait for all ranks, and return the latest of what they say; errors as for `gather`.

        Args:
            end_s: when this rank's step ended, on the clock of `time.perf_counter`.
            undelayed_s: when it would have, without the harness's own delays.
            deadline_s: how long the others may take.

        Returns:
            Both moments, on this host's clock.
        """
        if self._barrier is None:
            return end_s, undelayed_s
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + wait_s
        self._barrier.arrive((round(end_s * 1e9), round(undelayed_s * 1e9)))
        if self._up or self._down:
            latest = self._await(self._barrier.wait_host, until, wait_s)
            self._barrier.release(self._among_hosts(latest, until, wait_s))
        end_ns, undelayed_ns = self._await(self._barrier.wait, until, wait_s)
        return end_ns / 1e9, undelayed_ns / 1e9

    def _await(
        self, wait: Callable[[int], tuple[int, int] | None], until: float, wait_s: float
    ) -> tuple[int, int]:
        """Wait in the host's memory, and look meanwhile whether all live."""
        assert self._barrier is not None
        while True:
            slice_s = min(until, time.monotonic() + _LIVING_CHECK_S)
            if (latest := wait(round(slice_s * 1e9))) is not None:
                return latest
            self.check()
            if time.monotonic() >= until:
                late = self._barrier.missing
                rank = self._host[late] if late >= 0 else self._host[0]
                raise self._error(rank, TimeoutError(), wait_s)

    def _among_hosts(self, latest: tuple[int, int], until: float, wait_s: float) -> tuple[int, int]:
        """The latest of all hosts, from those below, and from those above."""
        for rank, connection in self._down.items():
            latest = _later(latest, self._from_host(rank, connection, until, wait_s))
        for rank, connection in self._up.items():
            with self._naming(rank, wait_s):
                connection.send([ns + connection.ahead_ns for ns in latest], wait_s)
            end, undelayed = self._from_host(rank, connection, until, wait_s)
            latest = end - connection.ahead_ns, undelayed - connection.ahead_ns
        for rank, connection in self._down.items():
            with self._naming(rank, wait_s):
                connection.send(latest, wait_s)
        return latest

    def _from_host(
        self, rank: int, connection: RankConnection, until: float, wait_s: float
    ) -> tuple[int, int]:
        with self._naming(rank, wait_s):
            while True:
                left_s = until - time.monotonic()
                try:
                    end, undelayed = connection.receive(min(left_s, _LIVING_CHECK_S))
                except TimeoutError as e:
                    if e.errno is not None or left_s <= 0:
                        raise
                    self.check()
                else:
                    return int(end), int(undelayed)

    def check(self) -> None:
        """See that no rank has died, without waiting. Raises BenchError if one has."""
        for rank, connection in self._connections.items():
            with self._naming(rank, 0.0):
                connection.pull()

    def settle(self) -> None:
        """Learn which ranks are on which host, and where they meet. Once, all ranks together."""
        hosts: dict[str, list[int]] = {}
        for rank, host in enumerate(self.broadcast(self.gather(this_host()))):
            hosts.setdefault(host, []).append(rank)
        self._host = hosts[this_host()]
        leaders = [ranks[0] for ranks in hosts.values()]
        leads = self._host[0] == self.place.rank
        self.hosts = len(hosts)
        token = self.broadcast(os.urandom(16).hex())
        number = leaders.index(self._host[0])
        below = leaders[number * _HOSTS_BELOW + 1 : (number + 1) * _HOSTS_BELOW + 1]
        with contextlib.ExitStack() as closing:
            mine: dict[str, Any] = {}
            if leads:
                self._barrier = RankBarrier.create(len(self._host), led=len(leaders) > 1)
                mine = {"memory": f"/proc/{os.getpid()}/fd/{self._barrier.fd}"}
            if leads and below:
                server = closing.enter_context(socket.create_server(("", 0), backlog=len(below)))
                mine |= {"hosts": _addresses(), "port": server.getsockname()[1]}
            every = self.broadcast(self.gather(mine))
            if not leads:
                leader, place = self._host[0], self._host.index(self.place.rank)
                with self._naming(leader, self._deadline_s):
                    self._barrier = _barrier_at(every[leader]["memory"], place)
                return
            until = time.monotonic() + self._deadline_s
            if below:  # first: who comes is greeted within seconds, whoever is late above
                self._down |= _accept(server, token, below, until, self._deadline_s)
            if number:
                above = leaders[(number - 1) // _HOSTS_BELOW]
                with self._naming(above, self._deadline_s):
                    connection = _reach_any(every[above], token, self.place.rank)
                    if connection is None:
                        raise ConnectionRefusedError("at none of its addresses")
                    self._up[above] = connection
                    connection.compare_clocks(self._deadline_s)
            for rank, connection in self._down.items():
                with self._naming(rank, self._deadline_s):
                    connection.show_clock(self._deadline_s)

    def close(self) -> None:
        """End the connections; others' waits end with an error that names this rank."""
        self._barrier = None
        for connections in (self._connections, self._up, self._down):
            for connection in connections.values():
                connection.close()

    def _receive_all(self, wait_s: float) -> dict[int, Any]:
        """A message of each of the others, in whatever order they come."""
        values: dict[int, Any] = {}
        until = time.monotonic() + wait_s
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            ready: Iterable[int] = list(self._connections)  # what has come already makes no event
            while True:
                for rank in ready:
                    connection = self._connections[rank]
                    with self._naming(rank, wait_s):
                        complete = connection.pull()
                    if complete:
                        values[rank] = connection.messages.popleft()
                        selector.unregister(connection)
                if len(values) == len(self._connections):
                    return values
                left_s = until - time.monotonic()
                ready = [key.data for key, _ in selector.select(left_s)] if left_s > 0 else []
                if not ready and time.monotonic() >= until:
                    missing = min(rank for rank in self._connections if rank not in values)
                    raise self._error(missing, TimeoutError(), wait_s)

    @contextlib.contextmanager
    def _naming(self, rank: int, wait_s: float) -> Iterator[None]:
        """Errors of a rank's connection name the rank."""
        try:
            yield
        except OSError as e:
            raise self._error(rank, e, wait_s) from e

    def _error(self, rank: int, e: OSError, wait_s: float) -> BenchError:
        """What to raise; rank 0 tells the others, who would otherwise see only that rank 0 ended."""
        error = _gone(f"rank {rank} is gone ({e}).")
        # A timeout with an errno is the network's: the host does not answer any more.
        if isinstance(e, TimeoutError) and e.errno is None:
            error = BenchError(f"rank {rank} did not answer within {wait_s:g} s.")
        if self.place.is_first:
            for other, connection in self._connections.items():
                if other != rank:
                    with contextlib.suppress(OSError):
                        connection.send({_FAILED: error.message}, 1.0)
        return error


def _gone(message: str) -> BenchError:
    return BenchError(message, next_step="Look at what that rank printed.")


_HOSTS_BELOW: Final = 8
"""Of each host in the tree."""

_LIVING_CHECK_S: Final = 0.2
"""How often who waits for others looks whether all live."""

_CLOCK_ROUNDS: Final = 16
_GREETING_BYTES_MAX: Final = 4096
_GREETING_S: Final = 5.0
_CONNECT_S: Final = 1.0
_ADDRESS: Final = DocumentKind(
    name="the address of rank 0", version=1, error=BenchError, next_step="Start all ranks again."
)
"""To try one of rank 0's addresses; those of other networks do not answer."""


def join(place: Rank, folder: Path, deadline_s: float = 60.0) -> RankGroup:
    """Meet the other ranks. At once in a world of one.

    Raises:
        BenchError: a rank is missing after `deadline_s`.
    """
    if place.world_size == 1:
        return RankGroup(place, {}, deadline_s)
    key = hashlib.sha256(start_of_job().encode()).hexdigest()
    meeting = folder / f".meeting-{key[:12]}.json"
    group = (_listen if place.is_first else _connect)(place, meeting, deadline_s)
    try:
        group.settle()
    except BaseException:
        group.close()
        raise
    return group


def _listen(place: Rank, meeting: Path, deadline_s: float) -> RankGroup:
    meeting.parent.mkdir(parents=True, exist_ok=True)
    token = os.urandom(16).hex()
    until = time.monotonic() + deadline_s
    with socket.create_server(("", 0), backlog=place.world_size) as server:
        address = {"hosts": _addresses(), "port": server.getsockname()[1], "token": token}
        replace_file(meeting, _ADDRESS.encode(address), sync=False)
        try:
            others = range(1, place.world_size)
            group = RankGroup(place, _accept(server, token, others, until, deadline_s), deadline_s)
        finally:
            meeting.unlink(missing_ok=True)
    group.broadcast("all here")
    return group


def _accept(
    server: socket.socket, token: str, ranks: Iterable[int], until: float, deadline_s: float
) -> dict[int, RankConnection]:
    """A connection of each of these ranks. Raises BenchError if one does not come."""
    connections: dict[int, RankConnection] = {}
    with contextlib.ExitStack() as closing:
        try:
            while missing := set(ranks) - set(connections):
                server.settimeout(max(0.01, until - time.monotonic()))
                connection = RankConnection(server.accept()[0])
                closing.callback(connection.close)
                rank = _greet(connection, token)
                if rank in missing:
                    connections[rank] = connection
                else:
                    connection.close()
        except TimeoutError:
            raise _missing(sorted(missing), deadline_s) from None
        closing.pop_all()
    return connections


def _greet(connection: RankConnection, token: str) -> int:
    """The rank of who connects; -1 for a stranger."""
    with contextlib.suppress(OSError, ValueError, KeyError, BenchError):
        greeting = connection.receive(_GREETING_S, _GREETING_BYTES_MAX)
        if isinstance(greeting, dict) and greeting.get("token") == token:
            connection.send("welcome", _GREETING_S)
            return int(greeting["rank"])
    return -1


def _connect(place: Rank, meeting: Path, deadline_s: float) -> RankGroup:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError, BenchError, ValueError, KeyError, TypeError):
            address = _ADDRESS.decode(meeting.read_bytes(), str(meeting)).plain()
            connection = _reach_any(address, str(address["token"]), place.rank)
            if connection is not None:
                group = RankGroup(place, {0: connection}, deadline_s)
                try:
                    if group.broadcast(None, max(0.1, until - time.monotonic())) == "all here":
                        return group
                except BenchError:  # another run's, which ended; ours may come yet
                    group.close()
        time.sleep(0.05)
    raise _missing([0], deadline_s)


def _reach_any(address: Mapping[str, Any], token: str, rank: int) -> RankConnection | None:
    """Whom an address is about, at the first of its hosts that answers so."""
    port = int(address["port"])
    reached = (_reach(str(host), port, token, rank) for host in address["hosts"])
    return next((connection for connection in reached if connection is not None), None)


def _reach(host: str, port: int, token: str, rank: int) -> RankConnection | None:
    """Who listens at an address; None where nobody does, or somebody else."""
    try:
        connection = RankConnection(socket.create_connection((host, port), _CONNECT_S))
    except OSError:
        return None
    with contextlib.suppress(OSError, ValueError, BenchError):
        connection.send({"rank": rank, "token": token}, _GREETING_S)
        if connection.receive(_GREETING_S, _GREETING_BYTES_MAX) == "welcome":
            return connection
    connection.close()
    return None


def _addresses() -> list[str]:
    """Where this host may be reached, the likeliest first: its name may be known here alone."""
    addresses = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    own = sorted(interfaces().items(), key=lambda each: each[0] == "lo")
    return list(dict.fromkeys([*addresses, socket.gethostname(), *(address for _, address in own)]))


def _barrier_at(path: str, place: int) -> RankBarrier:
    """The barrier of the rank that leads this host; OSError if it is gone."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return RankBarrier.attach(fd, place)
    finally:
        os.close(fd)


def _later(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), max(a[1], b[1])


def _missing(ranks: list[int], deadline_s: float) -> BenchError:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return BenchError(
        f"rank {shown} did not come within {deadline_s:g} s.",
        next_step="Look at what it printed; all ranks must see the same output folder.",
    )
