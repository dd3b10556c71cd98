"""Peers: who is at the other end of a connection, as far as the kernel tells; and where to listen for them.

Limits and throttles count by peer, so that nobody is shut out by what somebody else does. On a UNIX socket
and on loopback a peer is a user of this machine; elsewhere it is an address (of IPv6, its /64).
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import os
import pwd
import socket
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_MemberT = TypeVar("_MemberT")

_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_ANSWER_UID_AT: Final = _HEADER.size + 64
"""Of inet_diag_msg: family to retransmits (4), addresses and cookie (48), three u32, then the uid."""

_WAIT_S: Final = 1.0
_SIOCGIFADDR: Final = 0x8915


def peer_user(sock: socket.socket) -> int | None:
    """The user whose process is at the other end; None where the kernel cannot know, or does not say."""
    if sock.family == socket.AF_UNIX:
        return peer_process(sock)[1]
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        there, here = sock.getpeername(), sock.getsockname()
        return _kernel.owner(sock.family, there, here) if _address(there).is_loopback else None
    except (OSError, ValueError, struct.error):
        return None


def peer_process(sock: socket.socket) -> tuple[int, int]:
    """Who is at the other end of a UNIX socket: process id (0: unknown) and user id."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def user_name(uid: int) -> str:
    """The user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def peer_name(sock: socket.socket) -> str:
    """`user 1000`, or an address: the same for all connections of one peer."""
    user = peer_user(sock)
    if user is not None:
        return f"user {user}"
    try:
        address = _address(sock.getpeername())
    except (OSError, ValueError):
        return "nobody"
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _address(name: tuple[object, ...]) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


class _Kernel:
    """Asks the kernel whose sockets are whose (sock_diag(7)), over one socket while it is held. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._asked = 0
        self._holders = 0

    def hold(self) -> None:
        """Opens the socket, and keeps it: a process that is confined later can open none then."""
        with self._lock:
            self._holders += 1
            with contextlib.suppress(OSError):
                self._open()

    def release(self) -> None:
        """The end of a `hold`."""
        with self._lock:
            self._holders -= 1
            self._close()

    def _close(self) -> None:
        if self._socket is not None and not self._holders:
            self._socket.close()
            self._socket = None

    def _open(self) -> socket.socket:
        if (
            self._socket is None or self._pid != os.getpid()
        ):  # one inherited over a fork is the parent's
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG
            )
            self._socket.settimeout(_WAIT_S)
            self._pid = os.getpid()
        return self._socket

    def owner(self, family: int, there: tuple[Any, ...], here: tuple[Any, ...]) -> int | None:
        """The user of a TCP socket of this machine, by both its addresses."""
        ends = [socket.inet_pton(family, end[0]).ljust(16, b"\0") for end in (there, here)]
        # struct inet_diag_req_v2: TCP, no extensions, all states; any interface, any cookie.
        question = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        question += struct.pack("!HH", there[1], here[1]) + b"".join(ends)
        question += struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
        with self._lock:
            try:
                netlink = self._open()
                self._asked += 1
                size = _HEADER.size + len(question)
                header = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, 1, self._asked & 0xFFFFFFFF, 0)
                netlink.sendto(header + question, (0, 0))
                while True:
                    answer = netlink.recv(4096)
                    _, kind, _, number, _ = _HEADER.unpack_from(answer)
                    if (
                        number == self._asked & 0xFFFFFFFF
                    ):  # and not to a question that was given up
                        break
            finally:
                self._close()
        if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _ANSWER_UID_AT + 4:
            return None
        return int(struct.unpack_from("=I", answer, _ANSWER_UID_AT)[0])


_kernel = _Kernel()


def hold() -> None:
    """Keeps open what asking about peers takes, until `release`: for who gives up opening sockets later."""
    _kernel.hold()


def release() -> None:
    """The end of a `hold`."""
    _kernel.release()


class Crowd(Generic[_MemberT]):
    """What all peers hold, bounded: beyond `most` members the peer that holds most loses its oldest.

    `drop` ends one; it leaves, now or soon.
    """

    def __init__(self, most: int, drop: Callable[[_MemberT], None]) -> None:
        self._most = most
        self._drop = drop
        self._by_peer: dict[str, OrderedDict[_MemberT, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def join(self, peer: str, member: _MemberT) -> None:
        """Counts one more, and ends another where there are too many."""
        self._by_peer.setdefault(peer, OrderedDict())[member] = None
        self._count += 1
        if self._count > self._most:
            # Of those that hold equally many, whoever comes last.
            largest = max(self._by_peer, key=lambda name: (len(self._by_peer[name]), name == peer))
            oldest = next(iter(self._by_peer[largest]))
            self.leave(largest, oldest)
            self._drop(oldest)

    def leave(self, peer: str, member: _MemberT) -> None:
        """Counts it no longer; nothing happens to one that has left."""
        members = self._by_peer.get(peer)
        if members is not None and member in members:
            del members[member]
            self._count -= 1
            if not members:
                del self._by_peer[peer]


# -- addresses ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        with contextlib.suppress(ValueError):  # a name
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def listen(self, backlog: int | None = None) -> socket.socket:
        """A socket that listens there; raises OSError if none can."""
        where = self.host, self.port
        family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(where, family=family, backlog=backlog)


def same_secret(shown: str, secret: str) -> bool:
    """Whether somebody shows this secret; the time says nothing about it. `shown` may be any text."""
    return hmac.compare_digest(shown.encode(errors="replace"), secret.encode())


def listen_unix(path: str | os.PathLike[str], backlog: int, mode: int = 0o600) -> socket.socket:
    """A socket that listens at a path, and does not block; nobody but whom `mode` lets in ever sees it.

    Raises OSError if it cannot.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        old = os.umask(0o777 & ~mode)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(old)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def interfaces() -> dict[str, str]:
    """This host's IPv4 addresses, by the names of their network interfaces."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                reply = fcntl.ioctl(
                    s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def address_of(text: str, host: str = "127.0.0.1", what: str = "--metrics") -> Address:
    """`9464`, `0.0.0.0:9464` or `[::1]:9464`; without a host it is `host`; '': one must be named.

    Raises ValueError if it is none, which says `what` it is.
    """
    given, colon, port = text.strip().rpartition(":")
    given = given.removeprefix("[").removesuffix("]")
    good = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not good or bool(colon) != bool(given) or not (given or host):
        expected = "[HOST:]PORT, as 9464" if host else "HOST:PORT, as 127.0.0.1:8470"
        raise ValueError(f"{what} is {text!r}, expected {expected}")
    return Address(given or host, int(port))
