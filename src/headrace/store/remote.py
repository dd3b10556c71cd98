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
    check_volume_header,
    corrupt,
    parse_header,
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
    OpenSegment,
    Volumes,
    check_directory,
    directory_class,
    open_directory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.io.objects.transport import Found
    from headrace.store.manifest import Segment, VolumeEntry
    from headrace.store.namespace_engine import NamespaceEngine
    from headrace.store.opening import RemoteEngine
    from headrace.store.packing import WriteReport
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


class RemoteVolumes(Volumes):
    """The remote volumes of one segment.

    Args:
        folder: the store's URL, or the local folder of an index.
        segment: the segment's manifest entry.
        engine: reads them.
        remote: whether the manifest itself came from `folder`, a URL, and is trusted less.
        paths: the volumes' URLs, where somebody else has found them.

    Raises:
        CorruptStore: a remote manifest names local files, or objects of other buckets.
    """

    def __init__(
        self,
        folder: str,
        segment: Segment,
        engine: RemoteEngine,
        *,
        remote: bool,
        paths: Sequence[str] | None = None,
    ) -> None:
        super().__init__(folder, segment)
        self.engine = engine
        if paths is None:
            self.paths = [
                join(folder, v.path) if v.kind == "packed" else v.path for v in segment.volumes
            ]
            self._check_places(folder, remote=remote)
        else:
            self.paths = list(paths)
        engine.register(
            RemoteObject(path, v.bytes or 0, v.etag, v.mtime_ns)
            for v, path in zip(self.entries, self.paths, strict=True)
            if v.kind == "object" and engine.known(path) is None
        )

    def problems(self) -> list[HeadraceError]:
        """What is wrong with the volumes, one error each; all are looked at together."""
        wanted = [n for n, path in enumerate(self.paths) if not self._seen(path)]
        pages = [memoryview(bytearray(self._head_bytes(n))) for n in wanted]
        outcomes = self.engine.fetch_many(
            [(self.paths[n], 0, page) for n, page in zip(wanted, pages, strict=True) if len(page)]
        )
        errors = []
        looked_at = [(n, page) for n, page in zip(wanted, pages, strict=True) if len(page)]
        for (number, page), outcome in zip(looked_at, outcomes, strict=True):
            try:
                self._judge(number, page, outcome)
            except HeadraceError as e:
                errors.append(e)
        return errors

    def check(self, number: int) -> None:
        """Looks at one volume; errors as for `check_all`."""
        page = memoryview(bytearray(self._head_bytes(number)))
        if page:
            outcome = self.engine.fetch_many([(self.paths[number], 0, page)])[0]
            self._judge(number, page, outcome)

    def read_into(self, number: int, view: memoryview, offset: int) -> int:
        """As `Volumes.read_into`."""
        if not len(view):
            return 0
        return self.engine.fetch(self.paths[number], offset, view).count

    read_unchecked = read_into

    def borrow(self, number: int) -> tuple[int, bool]:
        """There are no descriptors.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.paths[number]} is an object and has no descriptor")

    def native(self) -> list[tuple[str, bytes, int, int]]:
        """As `headrace._native.Catalog` wants them."""
        return [
            ("remote", os.fsencode(path), entry.bytes or 0, -1)
            for entry, path in zip(self.entries, self.paths, strict=True)
        ]

    def _check_places(self, folder: str, *, remote: bool) -> None:
        local = next((v.path for v in self.entries if v.kind not in ("packed", "object")), None)
        if local is not None:
            raise CorruptStore(
                f"{shown(folder) if remote else folder}: the volume {local!r} is a local file, expected "
                "objects.",
                path=local,
                next_step="Index the source again.",
            )
        if not remote or self.engine.policy.other_roots:
            return
        root = root_of(folder)
        other = next((p for p in self.paths if root_of(p) != root), None)
        if other is not None:
            raise CorruptStore(
                f"{shown(folder)}: the manifest names the object {shown(other)}, expected objects "
                f"below {root}.",
                path=shown(folder),
                next_step="If you trust who wrote it, pass storage_options={'other_roots': True}.",
            )

    def _seen(self, path: str) -> bool:
        """Whether this volume was looked at before it was sent to this process."""
        known = self.engine.known(path)
        return known is not None and path in self.engine.looked_at

    def _head_bytes(self, number: int) -> int:
        """A packed volume's header; one byte is enough to learn an object's size and version."""
        entry = self.entries[number]
        return PAGE_BYTES if entry.kind == "packed" else min(1, entry.bytes or 0)

    def _judge(self, number: int, page: memoryview, outcome: Found | Failure) -> None:
        entry, path = self.entries[number], self.paths[number]
        if isinstance(outcome, Failure):
            raise _missing_object(entry, outcome)
        if outcome.size != entry.bytes:
            raise corrupt(
                shown(path), "volume size in bytes", found=f"{outcome.size:,}",
                expected=f"{entry.bytes:,}", offset=min(outcome.size, entry.bytes or 0),
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


def namespace_volumes(folder: str, segment: Segment, engine: NamespaceEngine) -> RemoteVolumes:
    """The volumes of a segment whose store lies on the namespace with the URL `folder`.

    Raises:
        CorruptStore: one is not packed, or the catalog has none of its name.
        FabricError: a target cannot be reached.
    """
    foreign = next((v.path for v in segment.volumes if v.kind != "packed"), None)
    if foreign is not None:
        raise CorruptStore(
            f"{folder}: the volume {foreign!r} lies elsewhere, expected packed volumes only.",
            path=folder,
            next_step="Pack the source: an index cannot be read from a namespace.",
        )
    urls = [engine.place(folder, v.path) for v in segment.volumes]
    return RemoteVolumes(folder, segment, engine, remote=True, paths=urls)


_FILES_AT_ONCE = 2
"""Each file is uploaded in several parts at once already."""


def publish_remotely(
    build: Callable[[Path], WriteReport],
    url: str,
    storage_options: Mapping[str, Any] | None,
    *,
    overwrite: bool,
) -> WriteReport:
    """Builds a store locally and publishes it at a URL.

    Args:
        build: makes the store at the folder that it is given.
        url: where the store shall stand.
        storage_options: see docs/howto/object-stores.md.
        overwrite: replace the store that stands there.

    Raises:
        StoreExists: a store stands there.
        VolumeError: the object store refuses.
    """
    if is_namespace(url):
        raise ValueError(
            f"{url}: namespaces are read-only; write the store to a folder, and export or image that"
        )
    engine = ObjectEngine(storage_options)
    try:
        old = _check_remote_target(url, engine, overwrite=overwrite)
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


def _check_remote_target(url: str, engine: ObjectEngine, *, overwrite: bool) -> Manifest | None:
    """The manifest of the store that will be replaced."""
    try:
        manifest = fetch_manifest(url, engine)
    except StoreNotFound:
        return None
    if not overwrite:
        raise store_exists(url)
    return manifest


def _upload(folder: Path, url: str, options: Mapping[str, Any], *, overwrite: bool) -> None:
    manifest = load_manifest(folder)
    named = _with_own_names(manifest)
    files = list(zip(_file_names(manifest), _file_names(named), strict=True))
    targets = [join(url, name) for _, name in files]
    try:
        with ThreadPoolExecutor(_FILES_AT_ONCE, "headrace-upload") as pool:
            jobs = [
                pool.submit(upload, folder / name, target, options)
                for (name, _), target in zip(files, targets, strict=True)
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
    mark = manifest.uuid[:12]

    def own(name: str) -> str:
        stem, dot, ending = name.rpartition(".")
        return f"{stem}-{mark}{dot}{ending}"

    segments = tuple(
        replace(
            segment,
            directory=own(segment.directory),
            volumes=tuple(
                replace(v, path=own(v.path)) if v.kind == "packed" else v for v in segment.volumes
            ),
        )
        for segment in manifest.segments
    )
    return replace(manifest, segments=segments)


def _file_names(manifest: Manifest) -> list[str]:
    names = [s.directory for s in manifest.segments]
    return names + [v.path for s in manifest.segments for v in s.volumes if v.kind == "packed"]
