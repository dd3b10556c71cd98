"""Link: a client's connection to the daemon: requests out, replies in, each with a deadline.

A daemon that does not answer is lost after `ALIVE_S`, one that hangs up at once; what happens then is
`reads`' business. One thread at a time reads from the socket and hands replies to whom they are for.

A client that finds everything in the shared cache has nothing to say. So a thread looks after the link
now and then (`tend`): what the daemon has given back is unmapped though the consumer sleeps,
the daemon hears what is used, and its death is noticed.

`Attaching` finds the daemon and opens a data set there, in a thread that costs batches nothing. Without a
daemon it looks again, less and less often; when one is found and has the data, the link waits to be taken. A
daemon that will never do (another version, another user, other data) is asked once a minute: somebody may
start another one.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from headrace.base.peers import peer_process
from headrace.errors import NodeError
from headrace.node import wire
from headrace.node.mapped import LeaseLedger, Mappings, SharedCache
from headrace.node.wire import Direct, Hurry, Open, Opened, Pictures, ReplyStatus, WireError
from headrace.store.opening import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from msgspec import Struct

    from headrace.plane.images import Images
    from headrace.runtime import RuntimeFolder
    from headrace.store import Store
    from headrace.store.opening import StoreAddress


ALIVE_S = 2.0  # a daemon says something within this time of being asked, or it is given up
PING_S = 0.5

TEND_END_S = 2.0  # how long it may take to end, when the program does
LOOK_AFTER_S = 1.0  # memory that the daemon has given back is unmapped within this time
_CHUNK_BYTES = 256 << 10
_RIGHTS_BYTES = socket.CMSG_SPACE(wire.FDS_MAX * array.array("i").itemsize)

_links: weakref.WeakSet[Link] = weakref.WeakSet()


class LinkLost(Exception):
    """The daemon hung up, does not answer, or breaks the protocol."""


class Link:
    """A connection on which hello was said. Clients of one job share a quota.

    Attributes:
        dataset: the one that was opened on it; 0: none.
        ahead_bytes: of batches that may be asked for before they are taken; 0: the daemon has not said.

    Raises:
        FileNotFoundError: no daemon runs here.
        LinkLost: it does not answer, or not as it should.
        NodeError: the folder is not safe, or the daemon does not serve us.
    """

    def __init__(self, folder: RuntimeFolder, job: str) -> None:
        folder.check()
        self.pid = os.getpid()
        self.lost = ""  # why the connection is of no use any more; '' while it is
        self.ledger = LeaseLedger()
        self.mappings = Mappings(self.ledger)
        self._kept: deque[Any] = deque()
        self.on_reply: Callable[[Any], None] = self._kept.append
        self.lock = threading.RLock()
        self._send_lock = threading.Lock()
        self._splitter = wire.Splitter()
        self._fds: deque[int] = deque()
        self._ticket = 0
        self.answered_s = time.monotonic()
        self.dataset = self.ahead_bytes = 0
        self.cache = SharedCache()  # what the daemon holds of it
        # Batches, samples and bytes that were gathered from it, and how much of it was said.
        self._gathered, self._reported = [0, 0, 0], [0, 0, 0]
        self._ended = threading.Event()
        self._sock = connect(str(folder.socket))
        self._sock.setblocking(False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._sock, select.POLLIN)
        self._writable.register(self._sock, select.POLLOUT)
        try:
            self.peer_pid, uid = peer_process(self._sock)
            if uid != os.geteuid():
                raise NodeError(  # noqa: TRY301
                    f"{folder.socket}: user {uid} listens there, expected {os.geteuid()}.",
                    path=str(folder.socket),
                    next_step="Remove the socket and start a daemon: headrace node start.",
                )
            self._hello(job)
        except BaseException:
            self.close("no hello")
            raise
        _links.add(self)

    def _hello(self, job: str) -> None:
        try:
            self.send(wire.Hello(wire.PROTOCOL, job))
        except LinkLost as e:
            if not isinstance(e.__cause__, (BrokenPipeError, ConnectionResetError)):
                raise
            self.lost = ""  # it hung up before we spoke; why, it has said already
        welcome: wire.Welcome = self.wait(wire.Welcome, ALIVE_S)
        if welcome.status is not wire.ReplyStatus.OK:
            raise NodeError(
                f"the node daemon refuses: {welcome.message}.",
                next_step="Stop it and start the one of this version: headrace node stop; "
                "headrace node start.",
                status=int(welcome.status),
            )
        self.requests_max, self.window_bytes = welcome.requests_max, welcome.window_bytes

    def new_ticket(self) -> int:
        """A number for a request."""
        self._ticket += 1
        return self._ticket

    # -- sending ----------------------------------------------------------------------------------

    def send(self, message: Struct) -> None:
        """Send one message.

        Raises LinkLost if the daemon is gone, or does not take it within the deadline.
        """
        data = memoryview(wire.encode(message))
        with self._send_lock:
            if self.lost:
                raise LinkLost(self.lost)
            try:
                while data:
                    try:
                        data = data[self._sock.send(data) :]
                    except BlockingIOError:
                        if not self._writable.poll(ALIVE_S * 1000):
                            raise TimeoutError(f"nothing was taken for {ALIVE_S:g} s") from None
            except OSError as e:
                raise self._lose(f"sending failed: {e}") from e

    def take_released(self) -> list[int]:
        """Leases to be given back with the next request; abandons those that must not be."""
        released, abandoned = self.ledger.take_ended()
        if abandoned:
            self.send(wire.Abandon(abandoned))
        return released

    def give_back(self) -> None:
        """Give ended leases back now."""
        if self.ledger.ended and (released := self.take_released()):
            self.send(wire.Release(released))

    def gathered(self, batches: int, samples: int, nbytes: int) -> None:
        """Count what was gathered from the shared cache; for one thread."""
        for i, count in enumerate((batches, samples, nbytes)):
            self._gathered[i] += count

    def say_used(self) -> None:
        """Tell the daemon what was gathered. Raises LinkLost if the daemon is gone."""
        now, before = list(self._gathered), self._reported
        if now != before:
            self._reported = now
            self.send(wire.Used(self.dataset, *(a - b for a, b in zip(now, before, strict=True))))

    # -- looking after -----------------------------------------------------------------------------

    def tend(self) -> None:
        """Have a thread look after the link until it is closed."""
        thread = threading.Thread(
            target=_tend, args=(weakref.ref(self), self._ended), name="headrace-tend", daemon=True
        )
        _tending[thread] = self._ended
        thread.start()

    # -- receiving --------------------------------------------------------------------------------

    def wait(self, kind: type[Any], seconds: float, ping: Struct | None = None) -> Any:
        """The next message of a kind, for exchanges before there are batches.

        A daemon that lives answers the `ping` that is sent now and then.

        Raises LinkLost if it does not come in time, or the daemon says nothing at all.
        """
        began = pinged_s = time.monotonic()
        while True:
            while self._kept:
                message = self._kept.popleft()
                if isinstance(message, kind):
                    return message
            now = time.monotonic()
            if now - began >= seconds:
                raise self._lose(f"no {kind.__name__} within {seconds:g} s")
            if ping is not None and now - pinged_s > PING_S:
                if now - max(self.answered_s, began) > ALIVE_S:
                    raise self._lose(f"the daemon said nothing for {ALIVE_S:g} s")
                pinged_s = now
                self.send(ping)
            self.receive(min(PING_S, seconds - (now - began)))

    def receive(self, seconds: float, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Take in what has come, waiting at most so long for it; whether anything had.

        `wanted` is looked at when it is this thread's turn: another may have taken it in.

        Raises LinkLost if the daemon hung up or broke the protocol.
        """
        with self.lock:
            if self.lost:
                raise LinkLost(self.lost)
            if not wanted():
                return False
            try:
                data = self._read(seconds)
                if data is None:
                    return False
                self.answered_s = time.monotonic()
                for body in self._splitter.feed(data):
                    self._take(wire.decode_reply(body))
            except (OSError, WireError) as e:
                raise self._lose(str(e)) from e
            return True

    def _read(self, seconds: float) -> bytes | None:
        """What has come; None if nothing does within so many seconds."""
        try:
            # Not `recv_fds`, which ignores its flags up to Python 3.11.
            data, control, flags, _ = self._sock.recvmsg(
                _CHUNK_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            if seconds <= 0 or not self._readable.poll(seconds * 1000):
                return None
            return self._read(0.0)
        for level, kind, content in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise WireError("descriptors were lost: too many files are open")
        if not data:
            raise WireError("the daemon hung up")
        return data

    def _take(self, message: Any) -> None:
        if isinstance(message, wire.Buffers | wire.Cache):
            slabs = message.buffers if isinstance(message, wire.Buffers) else message.slabs
            fds = [self._fds.popleft() for _ in range(min(len(slabs), len(self._fds)))]
            try:
                if isinstance(message, wire.Buffers):
                    self.mappings.add(message.buffers, fds)
                else:
                    self.cache.add(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        elif isinstance(message, wire.Ahead):
            self.ahead_bytes = message.nbytes
        elif isinstance(message, wire.Retired):
            self.mappings.retire(message.buffers)
        elif isinstance(message, wire.Gone):
            self.cache.drop(message.identities)
            self.send(wire.Dropped(message.dataset, message.identities))
        else:
            self.on_reply(message)

    def take_fds(self, count: int) -> list[int]:
        """Descriptors that came with the last message; they become the caller's.

        Raises LinkLost if they did not come.
        """
        with self.lock:
            if len(self._fds) < count:
                raise self._lose(f"{len(self._fds)} descriptors came, expected {count}")
            return [self._fds.popleft() for _ in range(count)]

    # -- the end ----------------------------------------------------------------------------------

    def _lose(self, reason: str) -> LinkLost:
        self.lost = self.lost or reason
        return LinkLost(self.lost)

    def close(self, reason: str = "closed") -> None:
        """Hang up. Batches stay valid: the daemon will not write where they lie."""
        if os.getpid() == self.pid and not self.lost:
            with contextlib.suppress(LinkLost):
                self.give_back()
                self.say_used()
        self._lose(reason)
        self._ended.set()
        self.cache.clear()
        with self._send_lock:
            self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def __del__(self) -> None:
        if hasattr(self, "_sock"):
            self._sock.close()


def connect(path: str) -> socket.socket:
    """A connection to whoever listens.

    Raises FileNotFoundError if nobody does, and LinkLost if it does not accept.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(ALIVE_S)
        sock.connect(path)
    except BaseException as e:
        sock.close()
        if isinstance(e, ConnectionRefusedError):  # a socket file that a killed daemon left
            raise FileNotFoundError(e.errno, "nobody listens", path) from e
        if isinstance(e, TimeoutError | BlockingIOError):  # the latter: its queue is full
            raise LinkLost(f"the daemon does not accept within {ALIVE_S:g} s") from e
        raise
    return sock


def _tend(ref: weakref.ref[Link], ended: threading.Event) -> None:
    """Take in what has come, and say what was used. Keeps the link alive only meanwhile."""
    while not ended.wait(LOOK_AFTER_S):
        link = ref()
        if link is None or link.lost:
            return
        try:
            while link.receive(0.0):
                pass
            # Leases are given back with requests as a rule; who gathers all by itself makes none.
            link.give_back()
            link.say_used()
        except LinkLost:
            link.cache.clear()  # who comes after the daemon takes memory anew
        del link


_tending: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@atexit.register
def _end_tending() -> None:
    """A thread that comes back from native code while the interpreter ends would abort it."""
    for thread, ended in tuple(_tending.items()):
        ended.set()
        thread.join(TEND_END_S)


def _before_fork() -> None:
    for link in tuple(_links):
        link.ledger.fork()


os.register_at_fork(before=_before_fork, after_in_child=_tending.clear)


_log = logging.getLogger("headrace")

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
HOPELESS_S = 60.0
OPEN_S = 600.0  # listing a folder of millions of files takes minutes


class Attaching:
    """Attaches a data set to the daemon whenever it is not, until closed; `why` says why it is not now."""

    def __init__(
        self,
        store: Store,
        part_names: Sequence[str],
        folder: RuntimeFolder,
        job: str,
        kept: Images | None = None,
    ) -> None:
        self.attachments = 0
        self.why = ""
        self.folder = folder
        self.job = job
        self.ended = threading.Event()
        self._part_names, self._kept = list(part_names), kept
        address = address_of(store)
        self._address: StoreAddress | None = None if isinstance(address, str) else address
        self._ready: Link | None = None
        self._lock = threading.Lock()
        self._tried = threading.Event()  # something is known: attached, or not for now
        self._thread: threading.Thread | None = None
        if isinstance(address, str):
            self.why = address
            self._tried.set()
            _log.warning("the node daemon cannot serve %s: %s.", store.path, address)
        else:
            self.again()

    def take(self, wait_s: float = 0.0) -> Link | None:
        """A link on which the data set is open, once; waits so long for a daemon that is being asked."""
        if wait_s:
            self._tried.wait(wait_s)
        if self._ready is None:
            return None
        with self._lock:
            ready, self._ready = self._ready, None
        return ready

    def again(self) -> None:
        """Begin to look for a daemon."""
        with self._lock:
            if self.ended.is_set() or self._address is None:
                return
            if self._thread is not None and self._thread.is_alive():
                return
            self._tried.clear()
            self._thread = threading.Thread(
                target=_attach, args=(weakref.ref(self),), name="headrace-attach", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self.ended.set()
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()

    def __del__(self) -> None:
        self.ended.set()

    # -- in the thread ----------------------------------------------------------------------------

    def attempt(self) -> float | None:
        """Try once; returns the seconds until the next attempt, 0.0 for the usual; None: it is done."""
        assert self._address is not None
        link, why, pause_s = None, "", 0.0
        try:
            link = Link(self.folder, self.job)
            opened = self._open(link, self._address)
            if opened.status is not ReplyStatus.OK:
                why, pause_s = opened.message or opened.status.name, HOPELESS_S
        except FileNotFoundError:
            why = "no node daemon runs"
        except (LinkLost, OSError) as e:
            why = str(e)
        except NodeError as e:
            why, pause_s = e.message, HOPELESS_S
        if why or link is None:
            if link is not None:
                link.close(why)
            if pause_s and why != self.why:
                _log.warning("the node daemon does not serve this loader: %s", why)
            self.why = why
            self._tried.set()
            return pause_s
        with self._lock:
            if not self.ended.is_set():
                link.dataset = opened.dataset
                self._ready = link
                self.attachments += 1
        if self.ended.is_set():
            link.close()
        self.why = ""
        self._tried.set()
        return None

    def _open(self, link: Link, address: StoreAddress) -> Opened:
        ticket = link.new_ticket()
        link.send(
            Open(
                ticket, os.fsencode(address.path), address.segments, address.fingerprint,
                self._part_names, _as_message(Direct, address.direct), _as_message(Pictures, self._kept),
            )
        )  # fmt: skip
        opened: Opened = link.wait(Opened, OPEN_S, ping=Hurry(ticket))
        return opened


def _as_message(kind: type[Any], value: Any) -> Any:
    return None if value is None else kind(*(getattr(value, n) for n in kind.__struct_fields__))


def _attach(ref: weakref.ref[Attaching]) -> None:
    """Look for a daemon until there is one. Keeps nothing alive while it waits."""
    pause_s = RETRY_FIRST_S
    while True:
        attaching = ref()
        if attaching is None or attaching.ended.is_set():
            return
        ended = attaching.ended
        wanted_s = attaching.attempt()
        del attaching
        if wanted_s is None or ended.wait(wanted_s or pause_s):
            return
        pause_s = min(RETRY_MAX_S, 2 * pause_s)
