"""Engine: `nvme+tcp://host:port/nqn?ns=1` as volumes: connects targets and keeps them connected.

A volume may be a window of a namespace: `...?ns=1#offset+length`, in bytes. Reads are native
(`headrace._native.FabricInitiator`). A thread of ours waits for queues that end, and connects anew with a
growing pause; what was in flight is read again. A target that does not come back within `give_up_s`
fails its reads, and is still tried.

`storage_options=` of such URLs are one mapping, because users think of one thing (`options_of`). One engine
serves all who name the same host, options and targets (`borrow`): who borrows gives back, the last one closes
the engine, and what is left at the interpreter's end is closed then.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import os
import re
import select
import threading
import time
import uuid
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from headrace import _native
from headrace.base.lifetime import Closing
from headrace.errors import FabricError
from headrace.fabric.host import Host, HostOptions
from headrace.fabric.identity import HostIdentity, check_nqn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.fabric.command import NamespaceIdentity

_COMMAND_BYTES_MAX = 1 << 20
_BLOCK_BYTES_MIN = 512
_BYTES_MAX = 1 << 62
_PAUSE_S, _PAUSE_MAX_S = 0.1, 5.0
_PORT = 4420


class FabricAddress(NamedTuple):
    """What a URL names."""

    host: str
    port: int
    subnqn: str
    nsid: int

    @property
    def url(self) -> str:
        """In one form, whatever it was written like."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"nvme+tcp://{host}:{self.port}/{self.subnqn}?ns={self.nsid}"


def parse_url(url: str) -> FabricAddress:
    """Takes `nvme+tcp://host[:port]/nqn[?ns=1]` apart; raises ValueError if it is none."""
    parts = urlsplit(url)
    query = parse_qs(parts.query, keep_blank_values=True)
    numbers = query.pop("ns", ["1"])
    right = parts.scheme == "nvme+tcp" and parts.hostname and parts.username is None
    extra = query or parts.fragment or len(numbers) != 1
    if not right or extra or not re.fullmatch(r"[1-9]\d{0,9}", numbers[0]):
        raise ValueError(f"{url!r} is no namespace, expected nvme+tcp://host:port/nqn?ns=1")
    nqn = check_nqn(unquote(parts.path.removeprefix("/")))
    return FabricAddress(str(parts.hostname), parts.port or _PORT, nqn, int(numbers[0]))


def split_window(url: str) -> tuple[str, int, int | None]:
    """A volume's URL as its namespace's URL, first byte and bytes (None: all of them).

    Raises ValueError if the window does not read `#offset+length`.
    """
    base, mark, window = url.partition("#")
    if not mark:
        return url, 0, None
    numbers = re.fullmatch(r"(\d{1,19})\+(\d{1,19})", window, re.ASCII)
    if numbers is None:
        raise ValueError(f"{url!r} is no window of a namespace, expected #offset+length")
    return base, int(numbers[1]), int(numbers[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How namespaces are read. Most users leave this alone."""

    host: HostOptions = field(default_factory=HostOptions)
    queues: int = 2
    """Connections per target: more than one core of a sender can fill."""
    reads_in_flight: int = 256
    """Commands of all targets together."""
    command_timeout_s: float = 10.0
    """A command without an answer for so long ends its connection."""
    give_up_s: float = 60.0
    """A target that is gone for so long fails its reads."""
    read_deadline_s: float | None = None
    """A read that cannot be served by then fails, whatever it waits for; None: `give_up_s`."""


class NamespaceChanged(FabricError):
    """After a connection was lost, another namespace stands in the place of the old one."""


@dataclass(eq=False)
class _Peer:
    """One controller and what is known of it."""

    address: tuple[str, int]
    subnqn: str
    number: int
    host: Host | None
    gone_since_s: float | None = None
    next_try_s: float = 0.0
    pause_s: float = _PAUSE_S
    why: str = ""
    volumes: dict[int, NamespaceIdentity] = field(default_factory=dict)
    labels: set[int] = field(default_factory=set)
    """Of the queues of this association: what an earlier one's still lose is no news."""


class FabricEngine(Closing):
    """Reads namespaces of any number of targets. Thread-safe."""

    def __init__(
        self, identity: HostIdentity | None = None, options: EngineOptions | None = None
    ) -> None:
        self.identity = identity or HostIdentity.of_machine()
        self.options = options or EngineOptions()
        self.native = _native.FabricInitiator(
            command_timeout_s=self.options.command_timeout_s,
            read_deadline_s=self.options.read_deadline_s or self.options.give_up_s,
            reads_in_flight=self.options.reads_in_flight,
        )
        self._peers: dict[tuple[str, int, str], _Peer] = {}
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._pid = os.getpid()
        self._reconnects = 0
        self._labels = itertools.count()
        self._thread = threading.Thread(target=self._watch, name="headrace-fabric", daemon=True)
        self._thread.start()

    def open(self, url: str) -> NamespaceIdentity:
        """Makes a namespace or a window of one readable, under the name `url`.

        Connects to its target if nothing else of it is open.

        Raises:
            FabricError: the target cannot be reached or refuses, has no such namespace, or the window
                leaves it.
            ValueError: the URL is none.
        """
        base, first_byte, nbytes = split_window(url)
        where = parse_url(base)
        with self._lock:
            if self._closing:  # a connection made now would outlive the engine
                raise FabricError(f"{url}: the engine is closed.", path=url)
            peer = self._peers.get(where[:3]) or self._connect(where)
            namespace = peer.volumes.get(where.nsid) or self._identify(peer, base, where.nsid)
            whole = namespace.blocks * namespace.block_bytes
            if first_byte + (nbytes or 0) > whole:
                what = f"{url} leaves the namespace, which has {whole:,} bytes."
                raise FabricError(what, path=url)
            self.native.add_volume(
                url, peer.number, where.nsid, namespace.block_bytes, namespace.blocks,
                first_byte, nbytes,
            )  # fmt: skip
            peer.volumes[where.nsid] = namespace
            return namespace

    def why(self, url: str) -> str | None:
        """Why the target of a volume is not connected; None if it is, or was never."""
        peer = self._peers.get(parse_url(split_window(url)[0])[:3])
        return None if peer is None or peer.host is not None else peer.why

    def owns(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of the engine's own, which must not wait for its end."""
        hosts = [peer.host for peer in tuple(self._peers.values())]
        return thread is self._thread or any(h is not None and h.owns(thread) for h in hosts)

    def read_many(
        self,
        url: str,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        dest: NDArray[np.uint8],
        deadline_s: float = 60.0,
    ) -> NDArray[np.int64]:
        """Reads byte ranges of an open namespace into `dest`, one behind the other.

        Args:
            url: as it was opened.
            offsets: (n,) int64.
            lengths: (n,) int64.
            dest: (sum of lengths,) uint8, writable.
            deadline_s: for all of them.

        Returns:
            (n,) int64: bytes that arrived (fewer at the namespace's end), or -errno.
        """
        return self.native.read_many(url, offsets, lengths, dest, deadline_s)

    def read_each(
        self, ranges: Sequence[tuple[str, int, memoryview]], deadline_s: float = 60.0
    ) -> NDArray[np.int64]:
        """Reads ranges of open volumes, each into memory of its own.

        Args:
            ranges: volume, offset, where to (writable; its length is the range's).
            deadline_s: for all of them.

        Returns:
            (n,) int64: as of `read_many`.
        """
        urls, offsets, dests = zip(*ranges, strict=True) if ranges else ((), (), ())
        return self.native.read_each(
            list(urls),
            np.array(offsets, np.int64),
            [np.frombuffer(d, np.uint8) for d in dests],
            deadline_s,
        )

    def figures(self) -> dict[str, int]:
        """What was done so far."""
        return {"reconnects": self._reconnects, **self.native.figures()}

    def close(self) -> None:
        """Shuts all controllers down and ends the threads; later reads fail with ECANCELED."""
        if self._pid != os.getpid():
            return  # a parent's: neither its threads nor its sockets are ours
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self.native.close()
        for peer in self._peers.values():
            if peer.host is not None:
                peer.host.close()
        os.close(self._wake)

    # -- connections ------------------------------------------------------------------------------

    @staticmethod
    def _identify(peer: _Peer, url: str, nsid: int) -> NamespaceIdentity:
        if peer.host is None:
            raise FabricError(f"{url} is not connected: {peer.why}", path=url)
        namespace = peer.host.namespace(nsid)
        whole = namespace.blocks * namespace.block_bytes
        fits = _BLOCK_BYTES_MIN <= namespace.block_bytes <= _COMMAND_BYTES_MAX
        if not fits or whole > _BYTES_MAX:
            raise FabricError(
                f"{url} is said to have {namespace.blocks:,} blocks of {namespace.block_bytes:,} bytes, "
                f"expected blocks of {_BLOCK_BYTES_MIN} to {_COMMAND_BYTES_MAX:,} bytes and at most "
                f"{_BYTES_MAX:,} in all.",
                path=url,
            )
        if namespace.metadata_bytes:
            raise FabricError(
                f"{url} has {namespace.metadata_bytes} bytes of metadata a block: not supported.",
                path=url,
            )
        return namespace

    def _connect(self, where: FabricAddress) -> _Peer:
        address = (where.host, where.port)
        host = Host(address, where.subnqn, self.identity, self.options.host)
        number = self.native.add_target(min(host.transfer_bytes_max, _COMMAND_BYTES_MAX))
        peer = _Peer(address, where.subnqn, number, host)
        try:
            self._attach(peer, host)
        except BaseException:
            host.close()
            raise
        self._peers[where[:3]] = peer
        return peer

    def _attach(self, peer: _Peer, host: Host) -> None:
        queues = host.open_queues(self.options.queues)
        labels = [next(self._labels) & 0xFFFF for _ in queues]
        peer.labels = set(labels)
        for label, queue in zip(labels, queues, strict=True):
            self.native.attach(
                target=peer.number, label=label, fd=queue.socket.detach(), entries=queue.entries,
                dgst=queue.dgst, cpda=queue.cpda, flow_control=queue.flow_control,
                data_max=_COMMAND_BYTES_MAX,
            )  # fmt: skip

    def _watch(self) -> None:
        while True:
            # A living target is looked at now and then: its keep-alive may have failed.
            pauses_s = (
                1.0 if p.host is not None else max(0.0, p.next_try_s - time.monotonic())
                for p in tuple(self._peers.values())
            )
            pause_s = min(pauses_s, default=None)
            select.select([self.native.lost_event, self._wake], [], [], pause_s)
            with self._lock:
                if self._closing:
                    return
                lost = self.native.take_lost()
                for peer in self._peers.values():
                    reasons = [why for _, label, why in lost if label in peer.labels]
                    if peer.host is not None and peer.host.failure is not None:
                        reasons.append(str(peer.host.failure))
                    if reasons:
                        self._gone(peer, reasons[0])
                now_s = time.monotonic()
                due = [p for p in self._peers.values() if p.host is None and p.next_try_s <= now_s]
            for peer in due:
                self._reconnect(peer)

    def _gone(self, peer: _Peer, why: str) -> None:
        """A queue ended: the whole association is made anew, as a host's kernel does it."""
        peer.why = why
        if peer.host is None:
            return
        host, peer.host = peer.host, None
        peer.gone_since_s = time.monotonic()
        peer.next_try_s, peer.pause_s = peer.gone_since_s, _PAUSE_S
        threading.Thread(target=host.close, name="headrace-fabric-close", daemon=True).start()

    def _reconnect(self, peer: _Peer) -> None:
        try:
            host = Host(peer.address, peer.subnqn, self.identity, self.options.host)
        except FabricError as e:
            peer.why = str(e)
            peer.next_try_s = time.monotonic() + peer.pause_s
            peer.pause_s = min(peer.pause_s * 2, _PAUSE_MAX_S)
            gone_s = time.monotonic() - (peer.gone_since_s or time.monotonic())
            if gone_s > self.options.give_up_s:
                self.native.give_up(peer.number, errno.EHOSTDOWN)
            return
        try:
            for nsid, known in peer.volumes.items():
                if (namespace := host.namespace(nsid)) != known:
                    raise NamespaceChanged(
                        f"another namespace stands in its place: namespace {nsid} of {peer.subnqn} is "
                        f"{namespace}, was {known}."
                    )
            self._attach(peer, host)
        except FabricError as e:
            peer.why = str(e)
            peer.next_try_s = time.monotonic() + _PAUSE_MAX_S
            host.close()
            if isinstance(e, NamespaceChanged):
                self.native.give_up(peer.number, errno.ESTALE)
            return
        with self._lock:
            peer.host, peer.gone_since_s = host, None
            self._reconnects += 1


# -- options of URLs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricOptions:
    """How a store is read over the fabric."""

    identity: HostIdentity = field(default_factory=HostIdentity.of_machine)
    """Who we are to targets; by default what is the same on this machine after every start."""
    engine: EngineOptions = field(default_factory=EngineOptions)  # queues, deadlines, digests
    directory_cache: str | None = None  # a local folder that keeps sample directories between runs
    other_roots: ClassVar[bool] = False
    """A namespace never sends its readers to objects elsewhere."""


def options_of(given: Mapping[str, Any] | None) -> FabricOptions:
    """The options that a mapping stands for.

    Keys beside the fields' names: `hostnqn` and `hostid` (32 hexadecimal digits or a UUID), and
    `deadline_s`, how long a read may take while a target is gone.

    Raises ValueError if a key is not known, or a value makes no sense.
    """
    left = dict(given or {})
    identity = _identity(left.pop("hostnqn", None), left.pop("hostid", None))
    cache = left.pop("directory_cache", None)
    if "deadline_s" in left:
        left["give_up_s"] = left.pop("deadline_s")
    host = HostOptions(**_take(left, HostOptions))
    engine = EngineOptions(host=host, **_take(left, EngineOptions))
    if left:
        known = sorted({f.name for f in (*fields(HostOptions), *fields(EngineOptions))} - {"host"})
        raise ValueError(
            f"storage_options has {min(left)!r}, expected hostnqn, hostid, directory_cache, deadline_s, "
            f"{', '.join(known)}"
        )
    if engine.queues < 1 or engine.give_up_s <= 0 or engine.command_timeout_s <= 0:
        raise ValueError(
            f"queues is {engine.queues}, deadline_s {engine.give_up_s}, command_timeout_s "
            f"{engine.command_timeout_s}, expected numbers above 0"
        )
    folder = None if cache is None else str(cache)
    return FabricOptions(identity=identity, engine=engine, directory_cache=folder)


def _identity(nqn: str | None, number: str | bytes | None) -> HostIdentity:
    own = HostIdentity.of_machine()
    if number is None:
        return HostIdentity(nqn or own.nqn, own.id)
    try:
        raw = number if isinstance(number, bytes) else uuid.UUID(number).bytes
    except ValueError:
        raise ValueError(f"hostid is {number!r}, expected a UUID") from None
    return HostIdentity(nqn or own.nqn, raw)


def _take(left: dict[str, Any], kind: type[HostOptions | EngineOptions]) -> dict[str, Any]:
    """The values of `kind`'s fields, taken out of `left`."""
    values = {}
    for each in fields(kind):
        if each.name in left and each.name != "host":
            values[each.name] = _value(each.name, str(each.type), left.pop(each.name))
    return values


def _value(name: str, kind: str, value: Any) -> Any:
    if not isinstance(value, str) or kind not in ("int", "float", "bool"):
        return value
    try:
        if kind == "bool":
            return {"true": True, "false": False}[value.lower()]
        return int(value) if kind == "int" else float(value)
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {value!r}, expected {kind}") from None


# -- one engine for all who name the same host, options and targets ------------------------------------


@dataclass(slots=True)
class _Loan:
    engine: FabricEngine
    # Not in a dictionary: looking there makes objects, and then the collector may run and give back.
    borrowers: int = 0


class _Shared:
    """Engines of this process, and how many borrowed each. A forked child has an empty one."""

    def __init__(self) -> None:
        # Reentrant: a store that is dropped gives back from wherever its collector runs.
        self.lock = threading.RLock()
        self.loans: dict[FabricOptions, _Loan] = {}


_shared = _Shared()
# Their threads do not exist in this process, and destroying them could touch what the parent uses.
_inherited: list[_Shared] = []


def borrow(options: FabricOptions) -> FabricEngine:
    """The engine of this process for these options."""
    with _shared.lock:
        loan = _shared.loans.get(options)
        if loan is not None:
            loan.borrowers += 1
            return loan.engine
    # Not under the lock: an engine waits until its thread has started, and the collector may run there and
    # give back another.
    new = FabricEngine(options.identity, options.engine)
    with _shared.lock:
        loan = _shared.loans.setdefault(options, _Loan(new))
        loan.borrowers += 1
    if loan.engine is not new:  # another thread was faster
        new.close()
    return loan.engine


def give_back(options: FabricOptions, engine: FabricEngine) -> None:
    """Ends one loan; the last one closes the engine."""
    with _shared.lock:
        loan = _shared.loans.get(options)
        if loan is None or loan.engine is not engine:
            return  # a parent's, or closed at the interpreter's end
        loan.borrowers -= 1
        if loan.borrowers:
            return
        del _shared.loans[options]
    if engine.owns(threading.current_thread()):
        # The collector ran on one of its own threads, which cannot wait for itself.
        threading.Thread(target=engine.close, name="headrace-fabric-close", daemon=True).start()
    else:
        engine.close()


@atexit.register
def _close_all() -> None:
    with _shared.lock:
        left = list(_shared.loans.values())
        _shared.loans.clear()
    for loan in left:
        loan.engine.close()


def _after_fork() -> None:
    global _shared  # noqa: PLW0603 - a child's own
    _inherited.append(_shared)
    _shared = _Shared()


os.register_at_fork(after_in_child=_after_fork)
