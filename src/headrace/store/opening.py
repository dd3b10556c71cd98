"""Opening: a store from its folder or URL, a source directly, and the same data in another process."""

from __future__ import annotations

import glob
import logging
import mmap
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace import _native
from headrace.base.checksum import crc32c
from headrace.base.files import write_all
from headrace.errors import SourceChanged, SourceError, StoreNotFound
from headrace.io.objects.location import base_name, is_pattern, is_url, join, local_path, scheme_of
from headrace.store.directory import write_directory
from headrace.store.format import corrupt
from headrace.store.manifest import (
    FILE_NAME,
    Manifest,
    Segment,
    VolumeEntry,
    fingerprint_of,
    load_manifest,
    segment_of_header,
)
from headrace.store.segment import (
    OpenSegment,
    memory_file,
    open_segment,
    open_volumes,
)
from headrace.store.sources.detect import open_source
from headrace.store.sources.scan import (
    Scan,
    SourceOptions,
    Stream,
    because,
    count_unlabelled,
    no_samples,
    source_options,
)
from headrace.store.store import Store
from headrace.store.trust import ANYWHERE, check_trust

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from typing import TypeAlias

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.namespace_engine import NamespaceEngine
    from headrace.store.sources.scan import SourceOptions
    from headrace.store.trust import Trust

    RemoteEngine: TypeAlias = ObjectEngine | NamespaceEngine
    """What reads volumes that are no files."""

log = logging.getLogger("headrace")

_NAMESPACE = "nvme+tcp"


def is_namespace(where: str) -> bool:
    """Whether `where` names an NVMe/TCP namespace."""
    return is_url(where) and scheme_of(where) == _NAMESPACE


def engine_for(where: str, storage_options: Mapping[str, Any] | None) -> RemoteEngine:
    """A new engine for `where`. Imported here, so that local stores need neither sockets nor event loop."""
    if is_namespace(where):
        from headrace.store.namespace_engine import NamespaceEngine

        return NamespaceEngine(storage_options)
    return object_engine(storage_options)


def object_engine(storage_options: Mapping[str, Any] | None) -> ObjectEngine:
    """A new engine for objects."""
    from headrace.io.objects.engine import ObjectEngine

    return ObjectEngine(storage_options)


def manifest_at(
    where: str,
    engine: RemoteEngine | None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Trust = None,
) -> tuple[Manifest, RemoteEngine | None]:
    """The manifest of the store at a folder or URL, and an engine if the store needs one.

    Raises StoreNotFound if there is none; CorruptStore if it is damaged or contradicts itself; StoreError if
    volumes lie outside the store's folder, and nobody has agreed to that; VolumeError if it cannot be read.
    """
    if is_url(where):
        from headrace.store.remote import fetch_manifest

        engine = engine or engine_for(where, storage_options)
        manifest = fetch_manifest(where, engine)
    else:
        manifest = load_manifest(where)
        if engine is None and any(v.kind == "object" for s in manifest.segments for v in s.volumes):
            engine = object_engine(storage_options)
    check_trust("volumes", where, manifest, trust)
    return manifest, engine


def open_store(
    path: str | os.PathLike[str],
    *,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    format: str | None = None,  # noqa: A002 - as for `index`
    storage_options: Mapping[str, Any] | None = None,
    trust: Trust = None,
) -> Store:
    """Opens a packed store, an index, or a source directly: whatever `index` can index.

    Arguments and errors are those of `headrace.open`, but for a job's global store. A namespace of NVMe/TCP
    that carries a store is `nvme+tcp://host:port/nqn?ns=1`; see docs/howto/fabric.md.
    """
    chosen = source_options(column=column, label=label, format=format)
    where = local_path(path)
    if is_namespace(where):
        return open_folder(where, None, engine=engine_for(where, storage_options))
    if is_url(where):
        engine = object_engine(storage_options)
        return _open_url(where, chosen, engine, trust)
    if os.path.lexists(os.path.join(where, FILE_NAME)):
        return open_folder(where, None, storage_options=storage_options, trust=trust)
    if not os.path.lexists(where) and not glob.has_magic(where) and "{" not in where:
        raise StoreNotFound(
            f"{where}: there is no store and no data.",
            path=where,
            next_step="Check the path, or make a store with headrace.pack() or headrace.index().",
        )
    return open_directly(where, chosen)


def _open_url(url: str, options: SourceOptions, engine: ObjectEngine, trust: Trust) -> Store:
    if not is_pattern(url):
        try:
            return open_folder(url, None, engine=engine, trust=trust)
        except StoreNotFound:
            name = base_name(url)
            if not url.endswith("/") and (not os.path.splitext(name)[1] or name.endswith(".hr")):
                raise  # a store's name; it would be confusing to be told that it is no tar
    return open_directly(url, options, engine)


def open_folder(
    where: str,
    segments: int | None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: RemoteEngine | None = None,
    trust: Trust = None,
) -> Store:
    """Opens a packed store or an index, in a folder or at a URL."""
    manifest, engine = manifest_at(where, engine, storage_options, trust)
    kept = manifest.segments[:segments]
    opened: list[OpenSegment] = []
    base = 0
    for entry in kept:
        opened.append(open_segment(where, entry, base, engine))
        base += entry.samples
    fingerprint = fingerprint_of([s.directory.header() for s in opened])
    if segments:  # the store as it was when it had so many
        manifest = replace(manifest, segments=kept, fingerprint=fingerprint)
    if fingerprint != manifest.fingerprint:
        raise corrupt(join(where, FILE_NAME), "fingerprint", fingerprint, manifest.fingerprint)
    for segment in opened:
        segment.volumes.check_all()
    return Store(where, manifest, opened, objects=engine)


def open_directly(where: str, options: SourceOptions, engine: ObjectEngine | None = None) -> Store:
    """Opens a source that is no store, listed anew."""
    scan = open_source(where, options, engine)
    if not isinstance(scan, Scan):
        raise SourceError(
            f"{where} can only be read front to back{because(scan)}.",
            path=where,
            next_step="Pack it: headrace.pack(source, target).",
        )
    _log_notes(where, scan)
    return store_of_scan(where, scan, options)


def _log_notes(where: str, scan: Scan) -> None:
    """What a report says of a store that is written."""
    # Who names columns for one look at a source knows that there are others.
    level = logging.INFO if scan.source.get("column") else logging.WARNING
    for note in scan.notes:
        log.log(level, "%s: %s", where, note)
    for note in count_unlabelled(scan, scan.columns)[1]:
        log.warning("%s: %s", where, note)


def store_of_scan(where: str, scan: Scan, direct: SourceOptions | None = None) -> Store:
    """A store over a scan, its directory in memory, called `where`.

    `direct` says how that is listed again in another process; if None, the directory goes along.
    """
    with memory_file() as fd:
        header = write_directory(scan.columns, fd)
        entry = segment_of_header("segment-0000.hrd", header, scan.volumes, scan.source)
        content = b""
        if direct is None:
            with mmap.mmap(fd, header.file_bytes, access=mmap.ACCESS_READ) as mapped:
                content = mapped[:]
        return _memory_store(where, entry, fd, scan.objects, direct or content, modes=scan.modes)


def _memory_store(
    where: str,
    entry: Segment,
    fd: int,
    objects: RemoteEngine | None,
    direct: SourceOptions | bytes,
    *,
    modes: AbstractSet[tuple[int, int]] = frozenset(),
) -> Store:
    """A store of one segment whose directory lies in an anonymous file."""
    directory = _native.Directory.from_fd(fd, where)
    segment = OpenSegment(entry, 0, directory, open_volumes(where, entry, objects))
    manifest = Manifest("0" * 32, fingerprint_of([directory.header()]), (entry,))
    return Store(where, manifest, [segment], direct=direct, objects=objects, modes=modes)


def snapshot(store: Store, segments: int | None) -> Store:
    """Opens a store again as it is now, or as it was when it had so many segments.

    Raises StoreNotFound, CorruptStore, VolumeError as for `open_store`.
    """
    options = None if store.objects is None else store.objects.storage_options
    return open_folder(store.path, segments, storage_options=options, trust=ANYWHERE)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What opens a store again."""

    path: str  # absolute, or a URL
    segments: int  # how many of its segments
    fingerprint: str  # what must be found there
    direct: SourceOptions | None  # how a source that is no store is listed; None: it is a store


def address_of(store: Store) -> StoreAddress | str:
    """What a process that shares nothing with this one needs to open the same data, or why there is nothing."""
    direct = store._direct  # noqa: SLF001 - a store's other half
    if isinstance(direct, bytes):
        return "its directory lies in the memory of this process"
    if store.objects is not None:
        given = getattr(store.objects, "storage_options", None)
        if given is None:  # of a staged data set
            return "it is staged: this process reads it from its job's nodes"
        if given:
            return "its storage_options are not passed on"
    path = store.path if is_url(store.path) else os.path.abspath(store.path)
    return StoreAddress(path, len(store.segments), store.fingerprint, direct)


def reopen_memory(path: str, entry: Segment, content: bytes, objects: RemoteEngine | None) -> Store:
    """Opens a pickled store whose directory is in memory."""
    with memory_file() as fd:
        write_all(fd, content, 0)
        store = _memory_store(path, entry, fd, objects, content)
    store.segments[0].volumes.check_all()
    return store


def reopen(
    path: str,
    segments: int,
    fingerprint: str,
    direct: SourceOptions | None,
    objects: RemoteEngine | None = None,
) -> Store:
    """Opens a store by its address, or a pickled one: the same samples, or an error.

    Raises SourceChanged if other data lies there, and StoreNotFound, CorruptStore, SourceError, VolumeError
    as for `open_store`.
    """
    if direct is not None:
        store = open_directly(path, direct, cast("ObjectEngine | None", objects))
    else:
        # Another process of this program has opened it, or was refused.
        store = open_folder(path, segments, engine=objects, trust=ANYWHERE)
    if store.fingerprint != fingerprint:
        raise SourceChanged(
            f"{path}: the fingerprint is {store.fingerprint}, expected {fingerprint}: the data "
            "changed after the store was opened.",
            path=path,
            next_step="Open it again in the main process.",
        )
    return store


def from_hf(
    dataset: Any,
    *,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    on_error: str = "raise",
) -> Store:
    """A store over a `datasets.Dataset`: sample i is the encoded value of row i.

    The data set's own order counts: after `select`, `shuffle` or `sort` the store has the rows that the
    data set shows. Mapped Arrow files are read where they lie; rows in memory are copied once, into
    anonymous memory. Decoding, transforms and formats of the data set play no part.

    Args:
        dataset: a `datasets.Dataset` (one split).
        column: the column of the samples' bytes, or several, which become parts. By default the only
            column of images, sounds or bytes.
        label: the column of integer labels; `label`, `labels` or `y` is found by itself, an empty
            string means none. A `ClassLabel` names the classes.
        on_error: `raise`, or `skip` rows that are null.

    Raises:
        SourceError: no column fits, a row is null, or it is no such data set.
        SourceChanged: a file behind it was replaced.
    """
    from headrace.store.sources.huggingface import is_dataset, open_dataset

    if not is_dataset(dataset):
        splits = list(dataset) if isinstance(dataset, dict) else []
        raise SourceError(
            f"The source is a {type(dataset).__name__}, expected a datasets.Dataset.",
            next_step=f"Choose one of its splits: {splits}." if splits else "Load one split of it.",
        )
    options = source_options(on_error=on_error, column=column, label=label)
    listed = open_dataset(dataset, options)
    where = f"datasets.Dataset {getattr(dataset, '_fingerprint', '')}".rstrip()
    if isinstance(listed, Scan):
        _log_notes(where, listed)
        store = store_of_scan(where, listed)
        for segment in store.segments:
            segment.volumes.check_all()
        return store
    memory = MemoryVolume()
    copied = _copy_to_memory(listed, memory)
    _log_notes(where, copied)
    store = store_of_scan(where, copied)
    store.keep(memory)
    return store


class MemoryVolume:
    """A file in anonymous memory that other processes of this user can open while it lives."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("headrace-volume", os.MFD_CLOEXEC)
        self._owner = os.getpid()
        self.path = f"/proc/{self._owner}/fd/{self._fd}"
        self.size = 0

    def append(self, data: bytes | memoryview) -> int:
        """Adds bytes; returns where they begin."""
        at, self.size = self.size, self.size + len(data)
        write_all(self._fd, data, at)
        return at

    def volume(self) -> VolumeEntry:
        """What it is to a store."""
        return VolumeEntry("file", self.path, self.size, os.fstat(self._fd).st_mtime_ns)

    def __del__(self) -> None:
        os.close(self._fd)


def _copy_to_memory(stream: Stream, memory: MemoryVolume) -> Scan:
    from headrace.store.packing import StreamMetadata  # to open a store needs none of it

    metadata = StreamMetadata()
    extents: list[tuple[int, int, int]] = []
    for item in stream.items():
        metadata.add(item)
        for _, data in item.parts:
            view = memoryview(data).cast("B")
            extents.append((memory.append(view), len(view), crc32c(view)))
    if not extents:
        raise no_samples("the data set")
    columns = metadata.columns()
    columns.offset, columns.length, crc = np.array(extents, np.uint64).T.copy()
    columns.crc = crc.astype(np.uint32)
    columns.class_names = None if stream.class_names is None else stream.class_names()
    if stream.label is None:
        columns.labels = None
    return Scan(columns, (memory.volume(),), stream.source, stream.skipped, stream.notes)
