"""Opening stores that are objects, or lie on a namespace: their directories are fetched, volumes stay.

Directories come in large ranges, in parallel, into anonymous memory, or into a local folder that keeps
them between runs (`directory_cache`), by their uuid, which is made of their content. Nothing that the
manifest says is believed before what it names has been asked: sizes first, memory afterwards.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

from headrace.base.files import NewFile
from headrace.errors import CorruptStore, SourceChanged, StoreNotFound, VolumeError
from headrace.io.objects.failure import Failure
from headrace.io.objects.location import shown
from headrace.io.objects.reading import RemoteObject
from headrace.store.format import PAGE_BYTES, corrupt, parse_header
from headrace.store.manifest import BYTES_MAX, FILE_NAME, Manifest, Segment, parse_manifest
from headrace.store.segment import (
    OpenSegment,
    check_directory,
    directory_class,
    open_directory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.io.objects.transport import Found
    from headrace.store.opening import RemoteEngine
    from headrace.store.remote_volumes import RemoteVolumes
    from headrace.store.segment import Directory

PART_BYTES = 8 << 20
DIRECTORY_BYTES_MAX = 64 << 30
"""A billion samples. Directories are held in memory: a larger one is not what it claims to be."""

_FIRST_BYTES = 256 << 10
"""Most manifests are smaller: one request."""


def fetch_manifest(url: str, engine: RemoteEngine) -> Manifest:
    """Fetches and checks `store.json`.

    Raises:
        StoreNotFound: there is none.
        CorruptStore: it is damaged or contradicts itself.
        VolumeError: it cannot be read.
    """
    where = engine.place(url, FILE_NAME)
    first = memoryview(bytearray(_FIRST_BYTES))
    outcome = engine.fetch_many([(where, 0, first)], exact=False)[0]
    if isinstance(outcome, Failure):
        if outcome.fault.kind == "missing":
            raise StoreNotFound(
                f"{shown(where)}: there is no store here ({outcome.fault.reason}).",
                path=shown(where),
                next_step="Check the URL, or make a store with headrace.pack() or headrace.index().",
            )
        raise outcome.to_error()
    if outcome.size > BYTES_MAX:
        raise corrupt(
            shown(where), "manifest size in bytes", found=f"{outcome.size:,}",
            expected=f"at most {BYTES_MAX:,}",
        )  # fmt: skip
    data = bytearray(outcome.size)
    data[: outcome.count] = first[: outcome.count]
    if outcome.size > outcome.count:
        rest = memoryview(data)[outcome.count :]
        # Of one version: a manifest that is replaced between two reads would be torn.
        engine.register([RemoteObject(where, outcome.size, outcome.etag, outcome.modified_ns)])
        try:
            engine.fetch(where, outcome.count, rest)
        finally:
            engine.forget(where)
    return parse_manifest(bytes(data), shown(where))


def open_remote_segment(
    where: str,
    entry: Segment,
    base: int,
    engine: RemoteEngine,
    volumes: RemoteVolumes,
    *,
    reference: bool = False,
) -> OpenSegment:
    """Opens a segment of a remote store.

    Args:
        where: its directory's URL.
        entry: the segment's manifest entry.
        base: index of its first sample.
        engine: fetches the directory.
        volumes: its volumes, opened before.
        reference: use the plain-Python directory.

    Raises:
        CorruptStore: it is damaged, or not the one that the manifest means.
        VolumeError: it cannot be read.
    """
    directory = _open_directory(where, entry, engine, reference=reference)
    check_directory(directory, entry, shown(where))
    return OpenSegment(entry, base, directory, volumes)


def _open_directory(
    where: str, entry: Segment, engine: RemoteEngine, *, reference: bool
) -> Directory:
    kind = directory_class(reference=reference)
    folder = engine.policy.directory_cache
    if folder is None:
        with _memory_file() as fd:
            _fetch_directory(where, entry, engine, fd)
            return kind.from_fd(fd, shown(where))  # type: ignore[no-any-return]
    path = os.path.join(folder, f"{entry.uuid}.hrd")
    with contextlib.suppress(CorruptStore, VolumeError, StoreNotFound):
        return open_directory(path, entry, reference=reference)
    os.makedirs(folder, exist_ok=True)
    with NewFile(path, mode=0o600) as new:
        _fetch_directory(where, entry, engine, new.fd)
        directory = kind.from_fd(new.fd, path)
        new.publish(sync=False)
    return directory  # type: ignore[no-any-return]


@contextlib.contextmanager
def _memory_file() -> Iterator[int]:
    fd = os.memfd_create("headrace-directory", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _fetch_directory(where: str, entry: Segment, engine: RemoteEngine, fd: int) -> None:
    """Fetches a whole directory into a file, its header first: that proves size and identity."""
    size = entry.directory_bytes
    if not PAGE_BYTES <= size <= DIRECTORY_BYTES_MAX:
        raise corrupt(
            shown(where), "directory size in bytes", found=f"{size:,}",
            expected=f"{PAGE_BYTES:,} to {DIRECTORY_BYTES_MAX:,}",
        )  # fmt: skip
    page = memoryview(bytearray(PAGE_BYTES))
    outcome = engine.fetch_many([(where, 0, page)], exact=False)[0]
    if isinstance(outcome, Failure):
        if outcome.fault.kind in ("missing", "changed"):
            raise StoreNotFound(
                f"{shown(where)}: the sample directory is missing ({outcome.fault.reason}).",
                path=shown(where),
                next_step="Restore the object from a copy, or pack or index the source again.",
            )
        raise outcome.to_error()
    if outcome.size != size:
        raise corrupt(shown(where), "object size in bytes", found=f"{outcome.size:,}",
                      expected=f"{size:,}")  # fmt: skip
    parse_header(bytes(page), size, shown(where))
    engine.register([RemoteObject(where, size, outcome.etag, outcome.modified_ns)])
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as mapped, memoryview(mapped) as view:
        parts = [view[at : at + PART_BYTES] for at in range(0, size, PART_BYTES)]
        try:
            ranges = [(where, k * PART_BYTES, part) for k, part in enumerate(parts)]
            _raise_first(engine.fetch_many(ranges), where)
        finally:
            for part in parts:
                part.release()
            engine.forget(where)


def _raise_first(outcomes: list[Found | Failure], where: str) -> None:
    failure = next((o for o in outcomes if isinstance(o, Failure)), None)
    if failure is None:
        return
    if failure.fault.kind == "changed":
        raise SourceChanged(
            f"{shown(where)}: changed while it was fetched: {failure.fault.reason}.",
            path=shown(where),
            next_step="Open the store again.",
        )
    raise failure.to_error()
