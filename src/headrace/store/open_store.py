"""Opening: a store from its folder or URL, or a source directly, its directory made in memory."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

from headrace.errors import SourceError, StoreNotFound
from headrace.io.objects.location import base_name, is_pattern, is_url, join, local_path
from headrace.store.directory_writer import create_memory_directory
from headrace.store.manifest import FILE_NAME, Manifest, Segment, fingerprint_of, volume_entries
from headrace.store.opening import (
    engine_for,
    is_namespace,
    manifest_at,
    object_engine,
    open_segment_at,
)
from headrace.store.segment import OpenSegment, directory_class, open_volumes
from headrace.store.sources.detect import open_source
from headrace.store.sources.scan import Scan, SourceOptions, because, source_options
from headrace.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.opening import RemoteEngine
    from headrace.store.trust import Trust

__all__ = ["open_directly", "open_folder", "open_store", "store_of_scan"]


def open_store(
    path: str | os.PathLike[str],
    *,
    reference: bool = False,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Trust = None,
) -> Store:
    """Opens a packed store, an index, or a source directly: whatever `index` can index.

    Args:
        path: the store's folder or URL (`s3://`, `gs://`, `az://`, `https://`, ...), an NVMe/TCP
            namespace that carries it (`nvme+tcp://host:port/nqn?ns=1`), or the source. A source opened
            directly is listed anew each time and has no checksums (TFRecord excepted).
        reference: use the plain-Python directory and reader.
        column: sources that are tables or arrays: as for `index`.
        label: the same.
        storage_options: for URLs: endpoint, region, credentials; see docs/howto/object-stores.md and
            docs/howto/fabric.md.
        trust: folders, files or URLs outside the store's folder that an index from elsewhere may read;
            see docs/howto/trust.md.

    Raises:
        StoreNotFound: there is nothing at `path`.
        CorruptStore: the store is damaged, or a volume is missing or not the right one.
        SourceChanged: an indexed file is not as it was.
        SourceError: `path` is neither a store nor a source that can be opened directly.
        StoreError: its volumes lie outside its folder, and nobody on this machine has agreed to that.
        VolumeError: an object cannot be read.
    """
    chosen = source_options(column=column, label=label)
    where = local_path(path)
    if is_namespace(where):
        engine = engine_for(where, storage_options)
        return open_folder(where, None, reference=reference, engine=engine)
    if is_url(where):
        engine = object_engine(storage_options)
        return _open_url(where, chosen, engine, reference=reference, trust=trust)
    if os.path.lexists(os.path.join(where, FILE_NAME)):
        return open_folder(
            where, None, reference=reference, storage_options=storage_options, trust=trust
        )
    if not os.path.lexists(where) and not _has_magic(where):
        raise StoreNotFound(
            f"{where}: there is no store and no data.",
            path=where,
            next_step="Check the path, or make a store with headrace.pack() or headrace.index().",
        )
    return open_directly(where, chosen, reference=reference)


def _has_magic(path: str) -> bool:
    return any(c in path for c in "*?[")


def _open_url(
    url: str, options: SourceOptions, engine: ObjectEngine, *, reference: bool, trust: Trust
) -> Store:
    if not is_pattern(url):
        try:
            return open_folder(url, None, reference=reference, engine=engine, trust=trust)
        except StoreNotFound:
            if not os.path.splitext(base_name(url))[1] or base_name(url).endswith(".hr"):
                raise  # a store's name; it would be confusing to be told that it is no tar
    return open_directly(url, options, reference=reference, engine=engine)


def open_folder(
    where: str,
    segments: int | None,
    *,
    reference: bool,
    storage_options: Mapping[str, Any] | None = None,
    engine: RemoteEngine | None = None,
    trust: Trust = None,
) -> Store:
    """Opens a packed store or an index, in a folder or at a URL.

    Args:
        where: the folder or URL.
        segments: open the first ones only.
        reference: use the plain-Python directory and reader.
        storage_options: for an index of objects.
        engine: one that exists already.
        trust: as for `open_store`.
    """
    manifest, engine = manifest_at(where, engine, storage_options, trust)
    kept = manifest.segments[:segments]
    opened: list[OpenSegment] = []
    base = 0
    for entry in kept:
        opened.append(open_segment_at(where, entry, base, engine, reference=reference))
        base += entry.samples
    fingerprint = fingerprint_of([s.directory.header() for s in opened])
    manifest = manifest.first_segments(len(kept), fingerprint) if segments else manifest
    if fingerprint != manifest.fingerprint:
        from headrace.store.format import corrupt

        raise corrupt(
            join(where, FILE_NAME), "fingerprint", found=fingerprint,
            expected=manifest.fingerprint,
        )  # fmt: skip
    for segment in opened:
        segment.volumes.check_all()
    return Store(where, manifest, opened, reference=reference, objects=engine)


def open_directly(
    where: str,
    options: SourceOptions,
    *,
    reference: bool,
    engine: ObjectEngine | None = None,
) -> Store:
    """Opens a source that is no store, listed anew.

    Args:
        where: its path, pattern or URL.
        options: how it is listed.
        reference: use the plain-Python directory and reader.
        engine: for objects.
    """
    scan = open_source(where, options, engine)
    if not isinstance(scan, Scan):
        raise SourceError(
            f"{where} can only be read front to back{because(scan)}.",
            path=where,
            next_step="Pack it: headrace.pack(source, target).",
        )
    return store_of_scan(where, scan, reference=reference, direct=options)


def store_of_scan(
    where: str, scan: Scan, *, reference: bool = False, direct: SourceOptions | None = None
) -> Store:
    """A store over a scan, its directory in memory.

    Args:
        where: what it is called.
        scan: what it holds.
        reference: use the plain-Python directory and reader.
        direct: how `where` is listed again in another process; if None, the directory goes along.
    """
    fd, header = create_memory_directory(scan.columns)
    try:
        directory = directory_class(reference=reference).from_fd(fd, where)
        content = b""
        if direct is None:
            with mmap.mmap(fd, header.file_bytes, access=mmap.ACCESS_READ) as mapped:
                content = mapped[:]
    finally:
        os.close(fd)
    entry = Segment(
        "segment-0000.hrd", header.file_bytes, header.uuid.hex(), header.samples, header.extents,
        volume_entries(scan.volumes), scan.source,
    )  # fmt: skip
    manifest = Manifest("0" * 32, fingerprint_of([header.to_page()]), (entry,))
    segment = OpenSegment(entry, 0, directory, open_volumes(where, entry, scan.objects))
    return Store(
        where, manifest, [segment], reference=reference, direct=direct or content,
        objects=scan.objects, modes=scan.modes,
    )  # fmt: skip
