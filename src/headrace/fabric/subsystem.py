"""Subsystem: what a target exports under one NQN: read-only namespaces, and to whom."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import _native
from headrace.errors import FabricError
from headrace.fabric.command import NamespaceIdentity
from headrace.fabric.identity import check_nqn
from headrace.fabric.image import MANIFEST, CatalogEntry, files_of, pack_catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace.fabric.identity import HostSecret
    from headrace.fabric.image import StoreFiles

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
        with _opened(text) as fd, self._lock:
            namespace = self._add(fd, text, _file_identity(fd, text), nsid or self._free(1)[0])
        self._tell(namespace.nsid)
        return namespace

    def add_store(self, path: str | os.PathLike[str]) -> Namespace:
        """Exports a packed store: a namespace with its catalog and manifest, and one for each file.

        Returns:
            The first of them, whose URL `headrace.open` takes.

        Raises:
            StoreNotFound, CorruptStore, SourceError: it cannot be exported.
            FabricError: a file cannot be opened, or the store has too many.
        """
        files = files_of(path)
        with self._lock:
            nsids = self._free(1 + len(files.sizes))
            added: list[Namespace] = []
            content = hashlib.sha256(files.manifest).hexdigest()
            try:
                with _catalog_file(files, nsids) as fd:
                    added.append(self._add(fd, str(files.folder), f"{content} catalog", nsids[0]))
                for nsid, name in zip(nsids[1:], files.sizes, strict=True):
                    text = str(files.folder / name)
                    with _opened(text) as fd:
                        added.append(self._add(fd, text, f"{content} {name}", nsid))
            except BaseException:
                for namespace in added:
                    del self._namespaces[namespace.nsid]
                    self.exports.remove(namespace.nsid)
                raise
        for namespace in added:
            self._tell(namespace.nsid)
        return added[0]

    def _free(self, count: int) -> list[int]:
        """The first NSIDs that are not taken. REQUIRES: the lock."""
        free = [n for n in range(1, NSID_MAX + 1) if n not in self._namespaces][:count]
        if len(free) < count:
            raise FabricError(
                f"{self.nqn} has room for {len(free)} more namespaces of {NSID_MAX}, {count} are needed.",
                next_step="Pack larger volumes, or export an image of the store (headrace image).",
            )
        return free

    def _add(self, fd: int, text: str, content: str, nsid: int) -> Namespace:
        """Exports what `fd` is open for; `content` names what it holds. REQUIRES: the lock."""
        if not 1 <= nsid <= NSID_MAX or nsid in self._namespaces:
            raise ValueError(f"nsid is {nsid}, expected one of 1 to {NSID_MAX} that is free")
        size = os.lseek(fd, 0, os.SEEK_END)
        if size == 0:
            raise FabricError(f"{text} is empty: there is nothing to export.", path=text)
        uid = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.nqn} {nsid} {content}")
        identity = NamespaceIdentity(-(-size // BLOCK_BYTES), BLOCK_BYTES, uid=uid)
        namespace = Namespace(nsid, text, size, identity)
        self.exports.add(nsid, fd, size, BLOCK_BYTES)
        self._namespaces[nsid] = namespace
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


def _file_identity(fd: int, text: str) -> str:
    """What stays the same while a file does: a host that comes back must not take another for it."""
    status = os.fstat(fd)
    real = os.path.realpath(text)
    return f"{real} {status.st_ino} {status.st_mtime_ns}" if stat.S_ISREG(status.st_mode) else real


@contextlib.contextmanager
def _catalog_file(files: StoreFiles, nsids: list[int]) -> Iterator[int]:
    """A file in memory: the catalog, and the manifest behind it."""
    others = [
        CatalogEntry(name, nsid, 0, nbytes)
        for nsid, (name, nbytes) in zip(nsids[1:], files.sizes.items(), strict=True)
    ]
    table = pack_catalog([CatalogEntry(MANIFEST, 0, 0, len(files.manifest)), *others])
    first = CatalogEntry(MANIFEST, 0, len(table), len(files.manifest))
    with os.fdopen(os.memfd_create("headrace-catalog", os.MFD_CLOEXEC), "wb") as file:
        file.write(pack_catalog([first, *others]))
        file.write(files.manifest)
        file.flush()
        yield file.fileno()


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        # A FIFO must not hang the open.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        what = f"{path} cannot be exported: {e.strerror}."
        raise FabricError(what, path=path, errno=e.errno) from e
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise FabricError(f"{path} is neither a file nor a block device.", path=path)
        yield fd
    finally:
        os.close(fd)
