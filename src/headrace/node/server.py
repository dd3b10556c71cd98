"""Server: the daemon's loop: one thread that waits for clients, and for what other threads finished.

Sockets, deadlines, deaths and nothing else: what a client may do is in `session`, data sets are in
`datasets`. A `ClientConnection` never blocks and keeps the deadlines: a hello and the rest of each
message come within seconds. What waits to be sent is bounded: while too much does, nothing more is taken in, so
a client that stopped reading costs no more memory. Descriptors that a client sends are never accepted.

While nobody does anything the loop sleeps; with clients it looks around once a second.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from headrace import _native
from headrace.base.causes import Cause
from headrace.base.loop import EVENT_READ, EVENT_WRITE, Loop
from headrace.base.peers import listen_unix, peer_process
from headrace.control.messages import PlaneState
from headrace.control.prometheus import asked
from headrace.machine.host import available_memory
from headrace.node import wire
from headrace.node.datasets import OpenDatasets
from headrace.node.files.service import FileService
from headrace.node.jobs import ClientJob, JobTally
from headrace.node.rate_limits import LeaseAgent, RateLimits
from headrace.node.session import ALL_SHARE, WINDOW_MIN, Session, WindowBudget
from headrace.node.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from msgspec import Struct

    from headrace.node.daemon import NodeOptions
    from headrace.node.served import ServedData
    from headrace.runtime import Claim

_log = logging.getLogger("headrace.node")

TICK_S = 1.0
TURN_S = 0.001  # how long one client's messages are handled before others have their turn
JOIN_S = 2.0  # how long reads that are under way may take to end, when the daemon does
_HASTE_S = 0.25  # how often deadlines are looked at while one runs
_BACKLOG = 128
_GATHERERS_MAX = 8

MESSAGE_S = 5.0  # a hello, or the rest of a message that has begun, comes within this time
OUT_BYTES_MAX = 8 << 20  # while more than this waits to be sent, nothing is taken in
_CHUNK_BYTES = 256 << 10

JOBS_MAX = 4096  # jobs of which the controller is told


class ClientConnection:
    """A client's connection."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pid, self.uid = peer_process(sock)
        self.pidfd = -1
        if self.pid > 0:
            with contextlib.suppress(OSError):  # gone, or of another process namespace
                self.pidfd = os.pidfd_open(self.pid)
        self.greeted = False
        self._splitter = wire.Splitter(wire.HELLO_BYTES_MAX)
        self.deadline: float | None = now + MESSAGE_S
        self._out: deque[tuple[memoryview, Sequence[int], object]] = deque()
        self._out_bytes = 0

    @property
    def choked(self) -> bool:
        """Whether nothing should be taken in."""
        return self._out_bytes > OUT_BYTES_MAX

    @property
    def sending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    def greet(self) -> None:
        """The client has said hello."""
        self.greeted = True
        self._splitter.frame_bytes_max = wire.FRAME_BYTES_MAX
        self.deadline = None

    def receive(self) -> Iterator[bytes]:
        """Bodies of messages that have come.

        Raises:
            EOFError: the client hung up.
            OSError: the connection is broken.
            WireError: a frame is empty or too large.
        """
        try:
            data = self.sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        yield from self.rest(data)

    def rest(self, data: bytes = b"") -> Iterator[bytes]:
        """Bodies of messages that came before, and were not taken.

        Raises WireError if a frame is empty or too large.
        """
        yield from self._splitter.feed(data)
        if self.greeted:
            if not self._splitter.partial:
                self.deadline = None
            elif self.deadline is None:
                self.deadline = time.monotonic() + MESSAGE_S

    def send(self, message: Struct, fds: Sequence[int] = (), owner: object = None) -> None:
        """Queue a message, with descriptors that stay open as long as `owner` lives."""
        data = memoryview(wire.encode(message))
        self._out.append((data, fds, owner))
        self._out_bytes += len(data)

    def flush(self) -> None:
        """Send what the socket takes. Raises OSError if the connection is broken."""
        while self._out:
            data, fds, _ = self._out[0]
            try:
                sent = socket.send_fds(self.sock, [data], fds) if fds else self.sock.send(data)
            except BlockingIOError:
                return
            self._out_bytes -= sent
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], (), None)

    def close(self) -> None:
        """Hang up."""
        self.sock.close()
        self._out.clear()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads have begun: when memory is short, the daemon cannot start one, and must go on."""
    pool = ThreadPoolExecutor(count, name)
    begun = threading.Barrier(count + 1)
    for _ in range(count):
        pool.submit(begun.wait)
    begun.wait()
    return pool


class Server:
    """Serves clients until `stop`."""

    def __init__(self, claim: Claim, options: NodeOptions) -> None:
        self.options = options
        self.budget = WindowBudget(max(WINDOW_MIN, available_memory() // ALL_SHARE))
        self.window_bytes = self.budget.window(options.window_bytes)
        self.job_window_bytes = self.budget.window(options.job_window_bytes)
        self._folder = claim.folder
        self._started_s = time.monotonic()
        self._loop = Loop()
        self.call_soon, self.stop = self._loop.call_soon, self._loop.stop
        self._spare_fd = _spare_fd()
        gatherers = min(_GATHERERS_MAX, max(2, os.cpu_count() or 2))
        self._working = _threads(gatherers, "headrace-node")
        self._keeping = _threads(1, "headrace-keep")
        self._datasets = OpenDatasets(options, self._working, self._keeping, self._loop)
        self.share = self._datasets.share
        self.files = FileService(options, self.call_soon, self.share)
        self._datasets.sharers = self.files.sharers
        self._connections: dict[ClientConnection, Session] = {}
        self._behind: set[ClientConnection] = set()  # they have said more than was handled
        self._jobs: dict[str, ClientJob] = {}
        self._tally = JobTally()
        self.metrics = ""  # where Prometheus can ask
        self._sessions_made = self._refused = self._wire_errors = 0
        self.rate_limits: RateLimits | None = None
        self.lease_agent: LeaseAgent | None = None
        if options.controller is not None:
            self.rate_limits = RateLimits(wake=lambda: self.call_soon(lambda: None))
            self.lease_agent = LeaseAgent(
                options.controller, self.rate_limits, self._plane_state,
                lambda lease: self.call_soon(lambda: self._set_job_quotas(lease.caches)),
            )  # fmt: skip
            self.rate_limits.poke = self.lease_agent.poke
        self._listener = listen_unix(claim.folder.socket, _BACKLOG)
        self._loop.register(self._listener, self._accept)

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve; returns after `stop`."""
        ticked = time.monotonic()
        if self.lease_agent is not None:
            self.lease_agent.start()
        while not self._loop.stopping:
            self._loop.wait(self._pause_s())
            for connection in tuple(self._behind):
                if not connection.choked:
                    self._serve(connection, connection.rest())
            if self.rate_limits is not None:
                self.rate_limits.let_go()
            if retired := _native.retired_buffers():
                for session in self._connections.values():
                    session.retire(retired)
            for connection in tuple(self._connections):
                self._flush(connection)
            self._announce()
            now = time.monotonic()
            if now - ticked > (_HASTE_S if self._hasty() else TICK_S):
                ticked = now
                self._tick(now)

    def _tick(self, now: float) -> None:
        for connection in tuple(self._connections):
            if connection.deadline is not None and now > connection.deadline:
                self._hang_up(connection, "a message did not come whole within its deadline")
        self._prune_jobs()
        self._datasets.look(self._window_of)
        if self._datasets.in_use:
            self.share()

    def _window_of(self, users: Mapping[str, int]) -> int:
        """Bytes that these jobs' clients may ask ahead: a quarter of their windows is for what they use."""
        jobs = (min(self.job_window_bytes, count * self.window_bytes) for count in users.values())
        return max(WINDOW_MIN, 3 * min(sum(jobs), self.budget.bytes_max) // 4)

    def _pause_s(self) -> float | None:
        if any(not connection.choked for connection in self._behind):
            return 0.0
        pause_s = _HASTE_S if self._hasty() else TICK_S if self._connections else None
        held_s = None if self.rate_limits is None else self.rate_limits.wait_s()
        return pause_s if held_s is None else min(held_s, pause_s or TICK_S)

    def _hasty(self) -> bool:
        return any(not connection.greeted for connection in self._connections)

    def _announce(self) -> None:
        """Tell clients of memory of caches that came or went.

        Those that have not taken what waits for them are told later: a message about memory keeps it.
        """
        changed = self._datasets.changed()
        for connection, session in tuple(self._connections.items()):
            for data in changed:
                session.changed(data)
            if session.behind and not connection.sending:
                session.announce()
                self._flush(connection)

    # -- connections ------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(e)
            return
        connection = ClientConnection(sock, time.monotonic())
        refusal = ""
        if connection.uid != os.geteuid():
            refusal = f"this daemon serves user {os.geteuid()}, not {connection.uid}"
        elif len(self._connections) >= self.options.sessions_max:
            refusal = f"{len(self._connections)} clients are served already"
        if refusal:
            self._refused += 1
            _log.warning(
                "refused process %d of user %d: %s", connection.pid, connection.uid, refusal
            )
            connection.send(wire.Welcome(wire.ReplyStatus.REFUSED, refusal, wire.PROTOCOL, 0, 0))
            with contextlib.suppress(OSError):
                connection.flush()
            connection.close()
            return
        self._sessions_made += 1
        self._connections[connection] = Session(
            self, self._sessions_made, connection.pid, connection.send
        )
        self._loop.register(sock, lambda events: self._ready(connection, events))
        if connection.pidfd >= 0:
            self._loop.register(connection.pidfd, lambda _: self._hang_up(connection, "it died"))

    def _turn_away(self, error: OSError) -> None:
        """Hang up on a client that cannot be served, so that it reads directly at once."""
        _log.error("no client can be accepted: %s", error)
        self._refused += 1
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        try:
            self._spare_fd = _spare_fd()
        except OSError:
            self._spare_fd = -1
            time.sleep(0.05)  # it cannot even be turned away

    def _ready(self, connection: ClientConnection, events: int) -> None:
        behind = connection in self._behind  # then it has had its turn
        if events & EVENT_READ and connection in self._connections and not behind:
            self._serve(connection, connection.receive())

    def _serve(self, connection: ClientConnection, bodies: Iterator[bytes]) -> None:
        """Handle what a client says, for so long that others do not notice."""
        session = self._connections[connection]
        until = time.monotonic() + TURN_S
        self._behind.discard(connection)
        try:
            for body in bodies:
                session.handle(wire.decode_request(body))
                if not connection.greeted and session.job is not None:
                    connection.greet()
                if connection.sending:  # the client can work on it while the next is handled
                    connection.flush()
                if connection.choked or time.monotonic() > until:
                    self._behind.add(connection)
                    return
        except (EOFError, ConnectionResetError):  # the latter: it did not wait for its answers
            self._hang_up(connection, "")
        except OSError as e:
            self._hang_up(connection, str(e))
        except WireError as e:
            self._wire_errors += 1
            self._hang_up(connection, f"it broke the protocol: {e}")
        except Exception:  # noqa: BLE001 - a mistake of ours must not cost everybody the daemon
            _log.exception("client %d: a request failed that should not", session.number)
            self._hang_up(connection, "a request of it failed")

    def _flush(self, connection: ClientConnection) -> None:
        if self._connections[connection].failed:
            self._hang_up(connection, "an answer to it was lost")
            return
        try:
            connection.flush()
        except OSError as e:
            self._hang_up(connection, str(e))
            return
        wanted = 0 if connection.choked else EVENT_READ
        if connection.sending:
            wanted |= EVENT_WRITE
        self._loop.modify(connection.sock, wanted)

    def _hang_up(self, connection: ClientConnection, reason: str) -> None:
        self._behind.discard(connection)
        session = self._connections.pop(connection, None)
        if session is None:
            return
        if reason:
            _log.info("client %d (process %d): %s", session.number, session.pid, reason)
            with contextlib.suppress(OSError):
                connection.flush()  # what was said about it
        self._loop.unregister(connection.sock)
        if connection.pidfd >= 0:
            self._loop.unregister(connection.pidfd)
        session.close()
        connection.close()
        if session.job is not None and not session.job.sessions:
            self._prune_jobs()
            self.share()

    def _prune_jobs(self) -> None:
        """Forget jobs of which nobody is there, and nothing is read any more."""
        for job in tuple(self._jobs.values()):
            if not job.sessions and not job.held_bytes:
                del self._jobs[job.name]
                if job.counted:
                    self._tally.end(job.name, time.monotonic())

    # -- what sessions need -----------------------------------------------------------------------

    def job(self, name: str) -> ClientJob:
        """The job of this name."""
        return self._jobs.setdefault(name, ClientJob(name, self.job_window_bytes, self._tally))

    def open(self, session: Session, request: wire.Open) -> None:
        """Open a data set for a client."""
        asked_s = time.monotonic()

        def answer(data: ServedData | None, status: wire.ReplyStatus, text: str) -> None:
            if session.job is not None and not session.closed:
                session.job.totals.took(Cause.STORAGE, time.monotonic() - asked_s)
            session.opened(request.ticket, data, status, text)
            self.share()

        self._datasets.open(request, answer)

    def _plane_state(self) -> PlaneState:
        """What the controller is told; in the agent's thread."""
        try:
            state = asked(self.call_soon, self.describe)
        except TimeoutError:  # reports without
            return PlaneState()
        datasets, jobs = state["datasets"], state["jobs"][:JOBS_MAX]
        ram = sum(data["ram_bytes"] for data in datasets)
        delivered = sum(data["delivered_bytes"] for data in datasets)
        return PlaneState(
            held_bytes=state["held_bytes"],
            ram_bytes=state["ram_bytes"],
            delivered_bytes={"ram": ram, "source": max(0, delivered - ram)},
            stall_s=state["stall_s"],
            sessions={job["name"]: job["sessions"] for job in jobs if job["name"]},
        )

    def _set_job_quotas(self, quotas: dict[str, int]) -> None:
        """Memory for the samples of some jobs, as the controller wants it."""
        if quotas != self._datasets.quotas_of_jobs:
            self._datasets.quotas_of_jobs = quotas
            self.share()

    def pump_all(self) -> None:
        """Begin what waits, of all clients."""
        for session in tuple(self._connections.values()):
            session.pump()

    def describe(self, asking: Session | None = None) -> dict[str, Any]:
        """The daemon's state, without the session that asks for it and reads nothing."""
        datasets, files = self._datasets.reports(), self.files.describe()
        governed = None
        if self.lease_agent is not None and self.rate_limits is not None:
            governed = {**self.lease_agent.describe(), **self.rate_limits.describe()}
        self._prune_jobs()
        return {
            "pid": os.getpid(),
            "protocol": wire.PROTOCOL,
            "folder": str(self._folder.path),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "metrics": self.metrics,
            "ram_bytes": self.options.ram_bytes,
            "held_bytes": sum(data["held_bytes"] for data in [*datasets, *files["roots"]]),
            "sessions_made": self._sessions_made,
            "refused": self._refused,
            "protocol_errors": self._wire_errors,
            "jobs": [
                {
                    "name": job.name, "sessions": len(job.sessions), "held_bytes": job.held_bytes,
                    "window_bytes": job.window_bytes,
                    "leases": sum(len(s.leases) for s in job.sessions),
                    "leased_samples": sum(
                        lease.batch.samples for s in job.sessions for lease in s.leases.values()
                    ),
                    "waiting": sum(len(s.waiting) for s in job.sessions),
                    "totals": job.totals.as_dict() if job.counted else None,
                }
                for job in self._jobs.values()
                if job.held_bytes or job.sessions != {asking}
            ],
            "sessions": [
                {
                    "number": s.number, "pid": s.pid, "job": s.job.name if s.job else "",
                    "leases": len(s.leases), "held_bytes": s.held_bytes, "waiting": len(s.waiting),
                    "batches": s.batches, "busy": s.busy,
                }
                for s in self._connections.values()
                if s is not asking
            ],
            "labels": {
                label: totals.as_dict()
                for label, totals in self._tally.by_label(time.monotonic()).items()
            },
            "stall_s": self._tally.total().as_dict()["stall_s"],
            "datasets": datasets,
            "files": files,
            "governed": governed,
        }  # fmt: skip

    def close(self) -> bool:
        """Hang up on all, and let go of everything; whether all threads have ended."""
        if self.lease_agent is not None:
            self.lease_agent.close()
        for connection in tuple(self._connections):
            with contextlib.suppress(OSError):
                connection.flush()
            self._hang_up(connection, "")
        self._listener.close()
        self.files.close()
        self._datasets.close()
        self._working.shutdown(wait=False, cancel_futures=True)
        self._keeping.shutdown(wait=False, cancel_futures=True)
        ended = self._datasets.join(JOIN_S)
        self._loop.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        self._spare_fd = -1
        return ended


def _spare_fd() -> int:
    """A descriptor to be let go of when there are no more, see `_turn_away`."""
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
