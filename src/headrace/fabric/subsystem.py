"""Subsystem: what a target exports under one NQN: read-only namespaces, and to whom."""

from __future__ import annotations

import os
import stat
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import _native
from headrace.errors import FabricError
from headrace.fabric.identity import check_nqn
from headrace.fabric.structures import NamespaceIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace.fabric.secret import HostSecret

__all__ = ["Namespace", "Subsystem"]

BLOCK_BYTES = 512
"""The smallest that hosts take: a file's last block is filled up with least."""

NSID_MAX = 1024
"""Namespaces of a subsystem: the active list and its log page are one page each."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A file or block device, as it was when it was exported."""

    nsid: int
    path: str
    bytes: int
    identity: NamespaceIdentity


class Subsystem:
    """Namespaces under one NQN. Thread-safe.

    Args:
        nqn: its name.
        hosts: NQNs of the hosts that may connect; None lets every host. A mapping says what each host
            has to authenticate with; None: `secret`.
        secret: what hosts that have none of their own authenticate with; None: they need not.

    Raises:
        ValueError: an NQN does not keep to the form.
    """

    def __init__(
        self,
        nqn: str,
        hosts: Mapping[str, HostSecret | None] | Iterable[str] | None = None,
        *,
        secret: HostSecret | None = None,
    ) -> None:
        self.nqn = check_nqn(nqn)
        self.hosts = None if hosts is None else frozenset(map(check_nqn, hosts))
        self._secret = secret
        self._secrets = dict(hosts) if isinstance(hosts, Mapping) else {}
        self.exports = _native.FabricExports()
        self._namespaces: dict[int, Namespace] = {}
        self._lock = threading.Lock()
        self._listeners: list[Callable[[int], None]] = []

    def allows(self, hostnqn: str) -> bool:
        """Whether a host of this NQN may connect."""
        return self.hosts is None or hostnqn in self.hosts

    def secret_of(self, hostnqn: str) -> HostSecret | None:
        """What a host of this NQN authenticates with; None: it need not."""
        return self._secrets.get(hostnqn) or self._secret

    @property
    def serial(self) -> str:
        """20 characters that stay the same for an NQN."""
        return uuid.uuid5(uuid.NAMESPACE_OID, self.nqn).hex[:20]

    @property
    def namespaces(self) -> dict[int, Namespace]:
        """By NSID."""
        with self._lock:
            return dict(self._namespaces)

    def add(self, path: str | os.PathLike[str], nsid: int | None = None) -> Namespace:
        """Exports a file or block device, opened read-only.

        Raises:
            FabricError: it cannot be opened, is empty, or is neither file nor block device.
            ValueError: the NSID is taken, or out of bounds.
        """
        text = os.fspath(path)
        fd = _open(text)
        try:
            with self._lock:
                nsid = nsid or next(n for n in range(1, NSID_MAX + 2) if n not in self._namespaces)
                if not 1 <= nsid <= NSID_MAX or nsid in self._namespaces:
                    raise ValueError(
                        f"nsid is {nsid}, expected one of 1 to {NSID_MAX} that is free"
                    )
                size = os.lseek(fd, 0, os.SEEK_END)
                if size == 0:
                    raise FabricError(f"{text} is empty: there is nothing to export.", path=text)
                uid = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.nqn} {nsid} {os.path.realpath(text)}")
                identity = NamespaceIdentity(-(-size // BLOCK_BYTES), BLOCK_BYTES, uid=uid)
                namespace = Namespace(nsid, text, size, identity)
                self.exports.add(nsid, fd, size, BLOCK_BYTES)
                self._namespaces[nsid] = namespace
        finally:
            os.close(fd)
        self._tell(nsid)
        return namespace

    def remove(self, nsid: int) -> None:
        """Exports it no more: later reads are refused, hosts that asked are told."""
        with self._lock:
            del self._namespaces[nsid]
            self.exports.remove(nsid)
        self._tell(nsid)

    def close(self) -> None:
        """Exports nothing any more; files are closed when their last read is done."""
        for nsid in self.namespaces:
            self.remove(nsid)

    def on_change(self, listener: Callable[[int], None]) -> None:
        """Calls `listener` with the NSID of each namespace that comes or goes, on the caller's thread."""
        self._listeners.append(listener)

    def _tell(self, nsid: int) -> None:
        for listener in tuple(self._listeners):
            listener(nsid)


def _open(path: str) -> int:
    try:
        # A FIFO must not hang the open.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise FabricError(
            f"{path} cannot be exported: {e.strerror}.", path=path, errno=e.errno
        ) from e
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or stat.S_ISBLK(mode):
        return fd
    os.close(fd)
    raise FabricError(f"{path} is neither a file nor a block device.", path=path)
