"""NamespaceEngine: reads the files of stores that lie on NVMe/TCP namespaces.

Has the face of `ObjectEngine`, so that stores are opened alike over both. It owns no connection: those
are the process's (`headrace.fabric.engine`), borrowed when first needed. A forked child borrows its
own. What is sent by pickle is where things lie, not how they are connected.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import CorruptStore, HeadraceError, SourceChanged, VolumeError, VolumeTimeout
from headrace.fabric.engine import borrow, give_back, options_of, parse_url, split_window
from headrace.fabric.image import (
    PAGE_BYTES,
    CatalogEntry,
    parse_header,
    parse_table,
)
from headrace.io.objects.faults import Failure, Fault, RemoteStats
from headrace.io.objects.transport import Found, RangeEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.fabric.engine import FabricEngine

_SLACK_S = 5.0  # the initiator ends reads at their deadline; we only wait longer than it does
_REASONS = {
    errno.ETIMEDOUT: "the target does not answer",
    errno.EHOSTDOWN: "the target is gone",
    errno.ECONNRESET: "the connection breaks each time",
    errno.ESTALE: "another namespace stands in its place",
    errno.ENODATA: "these blocks are not written yet",
    errno.EIO: "the target refuses or cannot read these blocks",
    errno.ECANCELED: "the store was closed",
}


@dataclass(frozen=True, slots=True)
class FabricFailure(Failure):
    """A read that was given up."""

    code: int = errno.EIO  # the errno value that the native engine gave

    @property
    def errno(self) -> int:
        """What the native reader is told."""
        return self.code

    def to_error(self, prefix: str = "") -> HeadraceError:
        """The error to raise; `prefix` names the sample."""
        end = self.offset + self.length
        took = f" after {self.elapsed_s:.1f} s" if self.elapsed_s else ""
        message = (
            f"{prefix}{self.url}: bytes {self.offset:,} to {end:,} cannot be read{took}: "
            f"{self.fault.reason}."
        )
        if self.code == errno.ESTALE:
            return SourceChanged(
                message, path=self.url, offset_bytes=self.offset,
                next_step="Open the store again, or export the one that was opened.",
            )  # fmt: skip
        kind = VolumeTimeout if self.code in (errno.ETIMEDOUT, errno.EHOSTDOWN) else VolumeError
        return kind(
            message, path=self.url, offset_bytes=self.offset, errno=self.code,
            next_step="Look at the target's node and the way to it, or give a larger deadline_s in "
            "storage_options.",
        )  # fmt: skip


class NamespaceEngine(RangeEngine):
    """Reads volumes that are windows of NVMe/TCP namespaces. Raises ValueError if an option is wrong."""

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self.policy = options_of(self.storage_options)
        self._pid = os.getpid()
        # Reentrant: what is dropped meanwhile may be collected anywhere.
        self._lock = threading.RLock()
        self._engine: FabricEngine | None = None
        self._closed = False
        self._catalogs: dict[str, dict[str, CatalogEntry]] = {}
        self._volumes: dict[str, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return NamespaceEngine, (self.storage_options,)

    @property
    def native(self) -> object:
        """What the native reader reads with."""
        return self._running().native

    @property
    def reads_in_flight(self) -> int:
        """Commands in flight at most, of all targets together."""
        return self.policy.engine.reads_in_flight

    def open(self, url: str) -> int:
        """Makes a volume readable, a namespace or `...#offset+length`; returns its bytes.

        Raises FabricError if its target cannot be reached or refuses, or it leaves its namespace, and
        ValueError if the URL is none.
        """
        nbytes = self._volumes.get(url)
        if nbytes is None:
            namespace = self._running().open(url)
            window = split_window(url)[2]
            whole = namespace.blocks * namespace.block_bytes
            nbytes = self._volumes[url] = whole if window is None else window
        return nbytes

    def place(self, folder: str, name: str) -> str:
        """The volume that is the file `name` of the store on the namespace `folder`.

        Raises CorruptStore if the namespace carries no store, a damaged one, or one without this file, and
        FabricError if it cannot be reached.
        """
        catalog = self._catalogs.get(folder)
        if catalog is None:
            catalog = self._catalogs[folder] = self._fetch_catalog(folder)
        entry = catalog.get(name)
        if entry is None:
            raise CorruptStore(
                f"{folder}: the catalog has no {name!r}, expected as the store has it.",
                path=folder,
                next_step="Write the image or export the store again.",
            )
        where = parse_url(folder)
        if entry.nsid:
            where = where._replace(nsid=entry.nsid)
        url = f"{where.url}#{entry.offset}+{entry.length}"
        if url not in self._volumes and entry.nsid:
            whole = self.open(where.url)
            if entry.offset + entry.length > whole:
                raise CorruptStore(
                    f"{folder}: {name!r} ends at byte {entry.offset + entry.length:,} of namespace "
                    f"{entry.nsid}, expected at most {whole:,}.",
                    path=folder,
                    next_step="Write the image or export the store again.",
                )
        self.open(url)
        return url

    def fetch_many(
        self, ranges: list[tuple[str, int, memoryview]], *, exact: bool = True
    ) -> list[Found | Failure]:
        """Reads many ranges at once and waits for all of them; failures are returned."""
        engine = self._running()
        began = time.monotonic()
        counts = engine.read_each(ranges, self.policy.engine.give_up_s + _SLACK_S).tolist()
        elapsed_s = time.monotonic() - began
        outcomes: list[Found | Failure] = []
        for (url, offset, dest), count in zip(ranges, counts, strict=True):
            if count < 0 or (exact and count != len(dest)):
                code = -count if count < 0 else errno.EIO
                outcomes.append(self._failure(url, offset, len(dest), code, elapsed_s))
            else:
                outcomes.append(Found(count, self._volumes[url], None, None))
        return outcomes

    def reason_of(self, failure: Mapping[str, Any]) -> Failure | None:
        """More about a read that the native reader could not do."""
        url = os.fsdecode(failure["path"])
        return self._failure(
            url, int(failure["offset"]), int(failure["length"]), int(failure["errno"]), 0.0
        )

    def stats(self) -> RemoteStats:
        """What the process's engine did so far."""
        if self._engine is None or self._pid != os.getpid():
            return RemoteStats()
        figures = self._engine.figures()
        faults = ("digest_errors", "timeouts", "lost_queues", "reconnects")
        return RemoteStats(
            reads=figures["reads"] + figures["failed"], requests=figures["commands"], bytes=figures["bytes"],
            retries=figures["retried"], failures=figures["failed"],
            faults={name: figures[name] for name in faults if figures[name]},
        )  # fmt: skip

    def close(self) -> None:
        """Gives the engine back; the native reader's later reads fail."""
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is not None and self._pid == os.getpid():
            give_back(self.policy, engine)

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self.close()

    def _running(self) -> FabricEngine:
        if self._closed:
            raise ValueError("the store is closed")
        if self._pid != os.getpid():
            # The parent's lock may be held by a thread that does not exist here.
            self._engine, self._lock, self._pid = None, threading.RLock(), os.getpid()
        with self._lock:
            if self._engine is None:
                self._engine = self._borrowed()
            return self._engine

    def _borrowed(self) -> FabricEngine:
        """The process's engine, in which all that was opened before is open."""
        engine = borrow(self.policy)
        try:
            for url in tuple(self._volumes):
                engine.open(url)
        except BaseException:
            give_back(self.policy, engine)
            raise
        return engine

    def _fetch_catalog(self, folder: str) -> dict[str, CatalogEntry]:
        whole = self.open(folder)
        page = self._fetched(folder, 0, min(PAGE_BYTES, whole))
        header = parse_header(page, folder, namespace_bytes=whole)
        table = self._fetched(folder, PAGE_BYTES, header.table_bytes)
        return parse_table(header, table, folder, namespace_bytes=whole)

    def _fetched(self, url: str, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.fetch(url, offset, memoryview(data))
        return bytes(data)

    def _failure(
        self, url: str, offset: int, length: int, code: int, elapsed_s: float
    ) -> FabricFailure:
        reason = _REASONS.get(code) or os.strerror(code)
        why = self._engine.why(url) if self._engine is not None else None
        if why and code != errno.EIO:
            reason += f" ({why.rstrip('.')})"
        return FabricFailure(url, offset, length, Fault("transient", reason), 1, elapsed_s, code)
