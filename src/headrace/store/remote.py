"""Stores that are objects, or lie on an NVMe/TCP namespace: opened, read and published.

Directories are fetched in large ranges, in parallel, into anonymous memory, or into a local folder that keeps
them between runs (`directory_cache`), by their uuid, which is made of their content. Volumes stay where they
are. Nothing that the manifest says is believed before what it names has been asked: sizes first, memory
afterwards.

A store is built in a local staging folder and then uploaded: volumes and directories first, under names
that no other store has, the manifest last and by one request. Readers of a store that is replaced keep
what they opened until its objects are removed, after the new manifest stands. What an upload that
fails has written is removed again; a killed one leaves objects that no manifest names.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import _native
from headrace.base.files import NewFile
from headrace.errors import (
    CorruptStore,
    HeadraceError,
    SourceChanged,
    StoreNotFound,
    VolumeError,
)
from headrace.io.objects.engine import ObjectEngine
from headrace.io.objects.faults import Failure
from headrace.io.objects.listing import remove, store_exists, upload, write
from headrace.io.objects.location import join, root_of, shown
from headrace.io.objects.reading import RemoteObject
from headrace.store.format import (
    PAGE_BYTES,
    VolumeHeader,
    check_directory_page,
    check_volume_header,
    corrupt,
)
from headrace.store.manifest import (
    BYTES_MAX,
    FILE_NAME,
    Manifest,
    Segment,
    load_manifest,
    parse_manifest,
)
from headrace.store.opening import is_namespace
from headrace.store.segment import (
    Volumes,
    check_directory,
    memory_file,
    open_directory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headrace.io.objects.transport import Found
    from headrace.store.manifest import Segment, VolumeEntry
    from headrace.store.opening import RemoteEngine
    from headrace.store.packing import WriteReport


PART_BYTES = 8 << 20
DIRECTORY_BYTES_MAX = 64 << 30
"""A billion samples. Directories are held in memory: a larger one is not what it claims to be."""

_FIRST_BYTES = 256 << 10  # most manifests are smaller: one request


def fetch_manifest(url: str, engine: RemoteEngine) -> Manifest:
    """Fetches and checks `store.json`."""
    where = engine.place(url, FILE_NAME)
    first = memoryview(bytearray(_FIRST_BYTES))
    head = _fetch_head(
        where, first, engine, "there is no store here",
        "Check the URL, or make a store with headrace.pack() or headrace.index().",
    )  # fmt: skip
    if head.size > BYTES_MAX:
        raise corrupt(
            shown(where), "manifest size in bytes", f"{head.size:,}", f"at most {BYTES_MAX:,}"
        )
    data = bytearray(head.size)
    data[: head.count] = first[: head.count]
    if head.size > head.count:
        # Of one version: a manifest that is replaced between two reads would be torn.
        with _one_version(where, head, engine):
            engine.fetch(where, head.count, memoryview(data)[head.count :])
    return parse_manifest(bytes(data), shown(where))


def _fetch_head(
    where: str, buffer: memoryview, engine: RemoteEngine, absent: str, next_step: str
) -> Found:
    outcome = engine.fetch_many([(where, 0, buffer)], exact=False)[0]
    if not isinstance(outcome, Failure):
        return outcome
    if outcome.fault.kind in ("missing", "changed"):
        raise StoreNotFound(
            f"{shown(where)}: {absent} ({outcome.fault.reason}).",
            path=shown(where),
            next_step=next_step,
        )
    raise outcome.to_error()


@contextlib.contextmanager
def _one_version(where: str, head: Found, engine: RemoteEngine) -> Iterator[None]:
    """Reads in the block are of the object whose head was read, or fail."""
    engine.register([RemoteObject(where, head.size, head.etag, head.modified_ns)])
    try:
        yield
    finally:
        engine.forget(where)


def open_remote_directory(where: str, entry: Segment, engine: RemoteEngine) -> _native.Directory:
    """Opens the directory of a remote store's segment."""
    folder = engine.policy.directory_cache
    if folder is None:
        with memory_file() as fd:
            _fetch_directory(where, entry, engine, fd)
            directory = _native.Directory.from_fd(fd, shown(where))
    else:
        path = os.path.join(folder, f"{entry.uuid}.hrd")
        with contextlib.suppress(CorruptStore, VolumeError, StoreNotFound):
            return open_directory(path, entry)
        os.makedirs(folder, exist_ok=True)
        with NewFile(path, mode=0o600) as new:
            _fetch_directory(where, entry, engine, new.fd)
            directory = _native.Directory.from_fd(new.fd, shown(where))
            new.publish(sync=False)
    check_directory(directory, entry, shown(where))
    return directory


def _fetch_directory(where: str, entry: Segment, engine: RemoteEngine, fd: int) -> None:
    """Fetches a whole directory into a file, its header first: that proves size and identity."""
    size = entry.directory_bytes
    if not PAGE_BYTES <= size <= DIRECTORY_BYTES_MAX:
        raise corrupt(
            shown(where), "directory size in bytes", f"{size:,}",
            f"{PAGE_BYTES:,} to {DIRECTORY_BYTES_MAX:,}",
        )  # fmt: skip
    page = memoryview(bytearray(PAGE_BYTES))
    head = _fetch_head(
        where, page, engine, "the sample directory is missing",
        "Restore the object from a copy, or pack or index the source again.",
    )  # fmt: skip
    if head.size != size:
        raise corrupt(shown(where), "object size in bytes", f"{head.size:,}", f"{size:,}")
    check_directory_page(bytes(page), size, shown(where))
    os.ftruncate(fd, size)
    with (
        _one_version(where, head, engine),
        mmap.mmap(fd, size) as mapped,
        memoryview(mapped) as view,
    ):
        parts = [(where, at, view[at : at + PART_BYTES]) for at in range(0, size, PART_BYTES)]
        try:
            outcomes = engine.fetch_many(parts)
        finally:
            for _, _, part in parts:
                part.release()
    failure = next((o for o in outcomes if isinstance(o, Failure)), None)
    if failure is not None and failure.fault.kind == "changed":
        raise SourceChanged(
            f"{shown(where)}: changed while it was fetched: {failure.fault.reason}.",
            path=shown(where),
            next_step="Open the store again.",
        )
    if failure is not None:
        raise failure.to_error()


class RemoteVolumes(Volumes):
    """The remote volumes of one segment, of the store at a URL or of an index in a local folder.

    A manifest that itself came from a URL (`remote`) is trusted less. Raises CorruptStore if such a one names
    local files, or objects of other buckets, or that of a namespace anything but packed volumes that its
    catalog has; FabricError if a target cannot be reached.
    """

    def __init__(
        self, folder: str, segment: Segment, engine: RemoteEngine, *, remote: bool
    ) -> None:
        super().__init__(folder, segment)
        self.engine = engine
        self._check_kinds(folder, remote=remote)
        self.paths = [
            engine.place(folder, v.path) if v.kind == "packed" else v.path for v in segment.volumes
        ]
        if remote and not is_namespace(folder) and not engine.policy.other_roots:
            root = root_of(folder)
            other = next((p for p in self.paths if root_of(p) != root), None)
            if other is not None:
                raise CorruptStore(
                    f"{shown(folder)}: the manifest names the object {shown(other)}, expected objects "
                    f"below {root}.",
                    path=shown(folder),
                    next_step="If you trust who wrote it, pass storage_options={'other_roots': True}.",
                )
        engine.register(
            RemoteObject(path, v.bytes or 0, v.etag, v.mtime_ns)
            for v, path in zip(self.entries, self.paths, strict=True)
            if v.kind == "object" and engine.known(path) is None
        )

    def _check_kinds(self, folder: str, *, remote: bool) -> None:
        foreign = next((v.path for v in self.entries if v.kind != "packed"), None)
        if is_namespace(folder) and foreign is not None:
            raise CorruptStore(
                f"{folder}: the volume {foreign!r} lies elsewhere, expected packed volumes only.",
                path=folder,
                next_step="Pack the source: an index cannot be read from a namespace.",
            )
        local = next((v.path for v in self.entries if v.kind not in ("packed", "object")), None)
        if local is not None:
            where = shown(folder) if remote else folder
            raise CorruptStore(
                f"{where}: the volume {local!r} is a local file, expected objects.",
                path=local, next_step="Index the source again.",
            )  # fmt: skip

    def problems(self) -> list[HeadraceError]:
        """What is wrong with the volumes, one error each; all are looked at together."""
        # Some may have been looked at before they were sent to this process.
        return self._look_at(
            n
            for n, path in enumerate(self.paths)
            if self.engine.known(path) is None or path not in self.engine.looked_at
        )

    def problem(self, number: int) -> HeadraceError | None:
        """What is wrong with one volume; errors as for `check_all`."""
        return next(iter(self._look_at([number])), None)

    def _look_at(self, numbers: Iterable[int]) -> list[HeadraceError]:
        # A packed volume's header; one byte is enough to learn an object's size and version.
        pages = {
            n: memoryview(bytearray(PAGE_BYTES if v.kind == "packed" else min(1, v.bytes or 0)))
            for n, v in ((n, self.entries[n]) for n in numbers)
        }
        pages = {n: page for n, page in pages.items() if len(page)}
        outcomes = self.engine.fetch_many([(self.paths[n], 0, page) for n, page in pages.items()])
        errors = []
        for (number, page), outcome in zip(pages.items(), outcomes, strict=True):
            try:
                self._judge(number, page, outcome)
            except HeadraceError as e:
                errors.append(e)
        return errors

    def read_into(self, number: int, view: memoryview, offset: int) -> int:
        """As `Volumes.read_into`."""
        if not len(view):
            return 0
        return self.engine.fetch(self.paths[number], offset, view).count

    read_unchecked = read_into

    def borrow(self, number: int) -> tuple[int, bool]:
        """There are no descriptors."""
        raise ValueError(f"{self.paths[number]} is an object and has no descriptor")

    def native(self) -> list[tuple[str, bytes, int, int]]:
        """As `headrace._native.Catalog` wants them."""
        return [
            ("remote", os.fsencode(path), entry.bytes or 0, -1)
            for entry, path in zip(self.entries, self.paths, strict=True)
        ]

    def _judge(self, number: int, page: memoryview, outcome: Found | Failure) -> None:
        entry, path = self.entries[number], self.paths[number]
        if isinstance(outcome, Failure):
            raise _missing_object(entry, outcome)
        if outcome.size != entry.bytes:
            raise corrupt(
                shown(path), "volume size in bytes", f"{outcome.size:,}", f"{entry.bytes:,}",
                min(outcome.size, entry.bytes or 0),
                next_step="Pack the source again, or upload the right file.",
            )  # fmt: skip
        if entry.kind == "packed":
            expected = VolumeHeader(
                bytes.fromhex(entry.uuid or ""), bytes.fromhex(self._segment_uuid), number
            )
            check_volume_header(bytes(page), expected, shown(path))
            self.engine.register(
                [RemoteObject(path, outcome.size, outcome.etag, outcome.modified_ns)]
            )
        self.engine.looked_at.add(path)


def _missing_object(entry: VolumeEntry, failure: Failure) -> HeadraceError:
    """A missing object is what a missing file is; a shorter one is not the one that was meant."""
    error = failure.to_error()
    if failure.fault.kind not in ("missing", "changed"):
        return error
    kind = CorruptStore if entry.kind == "packed" else SourceChanged
    return kind(error.message, path=error.path, next_step=error.next_step)


_FILES_AT_ONCE = 2  # each file is uploaded in several parts at once already


def publish_remotely(
    build: Callable[[Path], WriteReport],
    url: str,
    storage_options: Mapping[str, Any] | None,
    *,
    overwrite: bool,
) -> WriteReport:
    """Builds a store in a local folder and publishes it at a URL."""
    if is_namespace(url):
        raise ValueError(
            f"{url}: namespaces are read-only; write the store to a folder, and export or image that"
        )
    engine = ObjectEngine(storage_options)
    try:
        old = None
        with contextlib.suppress(StoreNotFound):
            old = fetch_manifest(url, engine)
        if old is not None and not overwrite:
            raise store_exists(url)
        with tempfile.TemporaryDirectory(prefix="headrace-", dir=engine.policy.staging) as staging:
            folder = Path(staging) / "store"
            report = build(folder)
            _upload(folder, url, engine.client_options, overwrite=overwrite)
        if old is not None:
            with contextlib.suppress(HeadraceError):  # they are in nobody's way
                remove([join(url, name) for name in _file_names(old)], engine.client_options)
    finally:
        engine.close()
    return replace(report, path=shown(url))


def _upload(folder: Path, url: str, options: Mapping[str, Any], *, overwrite: bool) -> None:
    manifest = load_manifest(folder)
    named = _with_own_names(manifest)
    names = _file_names(manifest)
    targets = [join(url, name) for name in _file_names(named)]
    try:
        with ThreadPoolExecutor(_FILES_AT_ONCE, "headrace-upload") as pool:
            jobs = [
                pool.submit(upload, folder / name, target, options)
                for name, target in zip(names, targets, strict=True)
            ]
            try:
                for job in jobs:
                    job.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        write(named.to_bytes(), join(url, FILE_NAME), options, create=not overwrite)
    except BaseException:
        with contextlib.suppress(HeadraceError):
            remove(targets, options)
        raise


def _with_own_names(manifest: Manifest) -> Manifest:
    """The same store with file names that no other store has: the old one's stay untouched."""

    def own(name: str) -> str:
        stem, dot, ending = name.rpartition(".")
        return f"{stem}-{manifest.uuid[:12]}{dot}{ending}"

    def renamed(segment: Segment) -> Segment:
        volumes = (
            replace(v, path=own(v.path)) if v.kind == "packed" else v for v in segment.volumes
        )
        return replace(segment, directory=own(segment.directory), volumes=tuple(volumes))

    return replace(manifest, segments=tuple(map(renamed, manifest.segments)))


def _file_names(manifest: Manifest) -> list[str]:
    names = [s.directory for s in manifest.segments]
    return names + [v.path for s in manifest.segments for v in s.volumes if v.kind == "packed"]
