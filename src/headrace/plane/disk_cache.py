"""Disk caches: a folder with the cache of each data set, one quota over all of them, and one data set's cache.

    DIR/
      lock                 held while free bytes are handed out
      <fingerprint>/       one data set's cache: an ordinary store (`headrace verify` checks it)
        cache.json         says that headrace made it, and of what
        store.json, segment-*.hrd, segment-*.hrv
        tail-*/            a segment that is being written

Whoever uses a cache holds a shared lock on its folder, so only what nobody uses is ever removed, and
only folders with our mark are counted or touched.

The samples of a cache are those that somebody has read so far, under their own names; a column says which
sample of the data set each of them is. It grows by whole segments: a process writes one in a folder of its
own (`cache_writer`), then, under a lock, drops what others have published meanwhile and adds it to the
manifest. A kill costs at most the unpublished segment; a power cut may cost more, and is found out by sizes
and checksums. A segment that cannot be opened, or that gave a wrong byte, is taken out of the manifest and
never trusted again; its samples are read from the source.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.documents import DocumentKind
from headrace.base.files import (
    lock_path,
    make_folder,
    read_file,
    replace_file,
    temporary_name,
    unlock,
)
from headrace.errors import CorruptStore, HeadraceError, StoreError, StoreNotFound
from headrace.plane.cache_writer import (
    IN_SEGMENT,
    INDEX_COLUMN,
    CacheSegment,
    remove_stale_segments,
)
from headrace.store.format import PAGE_BYTES
from headrace.store.manifest import SEGMENTS_MAX, Manifest, fingerprint_of, load_manifest
from headrace.store.segment import OpenSegment, open_segment
from headrace.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.store.manifest import Segment


MARK = "cache.json"
_MARK = DocumentKind(
    name="the mark of a cache folder",
    version=2,
    unchecked=1,
    error=StoreError,
    next_step="Remove the folder: what it holds is packed again.",
    marks={"format": "headrace-cache"},
    bytes_max=1 << 20,
)
_LOCK_S = 30.0


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The cache of one data set."""

    path: str  # its folder
    fingerprint: str  # of the data set
    source: str  # the path of the data set when the cache was begun
    samples: int  # samples that it holds
    of_samples: int  # samples of the data set
    bytes: int  # its files
    in_use: bool  # some process holds it
    used_s: float  # seconds since the epoch, when it was last opened

    @property
    def complete(self) -> bool:
        """Whether it holds the whole data set."""
        return self.samples >= self.of_samples


class CacheDirectory:
    """The caches below one folder, which is made when the first is begun.

    `quota_bytes` is for all caches; None: what leaves a part of the file system free.
    """

    def __init__(self, path: str | os.PathLike[str], quota_bytes: int | None = None) -> None:
        self.path = Path(os.fsdecode(path)).absolute()
        self.quota_bytes = quota_bytes

    def caches(self) -> list[CacheEntry]:
        """All caches, the one that was used longest ago first."""
        entries = [entry for folder in self._folders() if (entry := _entry(folder)) is not None]
        return sorted(entries, key=lambda entry: entry.used_s)

    def used_bytes(self) -> int:
        """Bytes of all caches, with what is reserved for segments under way."""
        return sum(_size(folder) for folder in self._folders())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock under which free bytes are handed out.

        Raises OSError if the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with take_lock(self.path / "lock"):
            yield

    def room(self) -> int:
        """Bytes that may still be written. Only under `locked`."""
        return disk_room(self.path, self.quota_bytes, self.used_bytes)

    def evict(self, needed_bytes: int) -> int:
        """Remove complete caches that nobody uses until so much is free; returns the room then.

        Only under `locked`. The one that was used longest ago goes first.
        """
        for info in self.caches():
            if self.room() >= needed_bytes:
                break
            if info.complete and not info.in_use:
                with contextlib.suppress(StoreError):
                    self.remove(info.path)
        return self.room()

    def remove(self, path: str | os.PathLike[str]) -> int:
        """Remove a cache of this directory; returns its bytes.

        Raises StoreError if it is no cache of headrace's, or in use.
        """
        folder = Path(path)
        if folder.parent != self.path or read_mark(folder) is None:
            raise StoreError(
                f"{folder} is no cache below {self.path}.",
                path=str(folder),
                next_step="List the caches: headrace cache ls DIR.",
            )
        with hold(folder, exclusive=True) as held:
            if not held:
                raise StoreError(
                    f"{folder}: the cache is in use.",
                    path=str(folder),
                    next_step="Try again when the jobs that use it have ended.",
                )
            size = _size(folder)
            # Out of sight by one step: a kill in the middle leaves no half cache under its name.
            doomed = Path(temporary_name(folder))
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return size

    def _folders(self) -> list[Path]:
        try:
            entries = sorted(self.path.iterdir())
        except OSError:
            return []
        return [p for p in entries if not p.is_symlink() and (p / MARK).is_file()]


def write_mark(folder: Path, content: dict[str, Any]) -> None:
    """Say that headrace made this folder, and of what."""
    replace_file(folder / MARK, _MARK.encode(content, indent=1), sync=False)


def read_mark(folder: Path) -> dict[str, Any] | None:
    """What the mark says; None where there is none of ours."""
    try:
        data = read_file(folder / MARK, _MARK.bytes_max + 1)
        fields = _MARK.decode(data, str(folder / MARK))
        fields.text("fingerprint"), fields.text("source"), fields.integer("samples", 0, 1 << 62)
    except (OSError, StoreError):
        return None
    return fields.plain()


def disk_reserve(disk_bytes: int) -> int:
    """Bytes of a file system that a cache without a quota leaves free."""
    return min(disk_bytes // 20, 2 << 30)


def disk_room(
    path: str | bytes | Path, quota_bytes: int | None, used_bytes: Callable[[], int]
) -> int:
    """Bytes that may still be written to a folder with a quota; None: a part of its file system stays free."""
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    if quota_bytes is None:
        return max(0, free - disk_reserve(disk.f_blocks * disk.f_frsize))
    return max(0, min(quota_bytes - used_bytes(), free))


@contextlib.contextmanager
def hold(folder: Path, *, exclusive: bool = False) -> Iterator[bool]:
    """Hold a folder while the block runs; false where others hold it in the way.

    Raises OSError if it is none, or another user's.
    """
    fd = lock_path(folder, make=False, shared=not exclusive, owned=True)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            unlock(fd)


@contextlib.contextmanager
def take_lock(path: Path) -> Iterator[None]:
    """Hold a lock file; others hold it for moments only.

    Raises OSError if it cannot be created, or (TimeoutError) somebody holds it for ever.
    """
    fd = lock_path(path, mode=0o666, wait_s=_LOCK_S)
    if fd is None:
        raise TimeoutError(f"{path} is locked by another process")
    try:
        yield
    finally:
        unlock(fd)


def _entry(folder: Path) -> CacheEntry | None:
    mark = read_mark(folder)
    if mark is None:
        return None
    try:
        samples = load_manifest(folder).samples
    except (StoreError, OSError):
        samples = 0
    try:
        with hold(folder, exclusive=True) as held:
            in_use = not held
        used_s = folder.joinpath(MARK).stat().st_mtime
    except OSError:
        return None
    return CacheEntry(
        str(folder), mark["fingerprint"], mark["source"], samples, mark["samples"], _size(folder), in_use,
        used_s,
    )  # fmt: skip


def _size(folder: Path) -> int:
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(where, name).lstat().st_size
    return total


_log = logging.getLogger("headrace")


_ATTEMPTS = 50
_PAUSE_S = 0.02


class DiskCache:
    """One data set's cache, as this process sees it. Thread-safe.

    Attributes:
        places: int64, shape (samples of the data set,): 1 + index in the cache; 0: not cached;
            -1: being written by this process.
    """

    def __init__(self, directory: CacheDirectory, source: Store, part_names: Sequence[str]) -> None:
        self.directory = directory
        self.source = source
        self.part_names = tuple(part_names)
        name = source.fingerprint
        if self.part_names != tuple(source.parts):  # with some parts only, it is another cache
            parts = "\0".join(self.part_names).encode("utf-8", "surrogateescape")
            name += f"-{hashlib.sha256(parts).hexdigest()[:8]}"
        self.folder = directory.path / name  # where it lies
        # zeros: pages that were never written to take no memory.
        self.places = np.zeros(len(source), np.int64)
        self.cached = 0
        self.distrusted = 0
        self.why_not_writable = ""  # why this process may not add to it, or ''
        self.store: Store | None = None
        self._lock = threading.RLock()
        self._status: tuple[int, ...] = ()
        self._struck: set[str] = set()
        self._held: int | None = None
        self._attach()

    @property
    def complete(self) -> bool:
        """Whether every sample is cached."""
        return self.cached == len(self.places)

    def close(self) -> None:
        """Let go of the folder. Its store stays readable for whoever still reads."""
        with self._lock:
            if self._held is not None:
                os.close(self._held)
            self._held = None

    def __del__(self) -> None:
        # Dropped without `close`, by the consumer and by the thread that wrote.
        held: int | None = getattr(self, "_held", None)
        if held is not None:
            with contextlib.suppress(OSError):
                os.close(held)

    def look_up(self, indices: NDArray[np.int64]) -> tuple[Store | None, NDArray[np.int64]]:
        """The state of the cache that is read now, and the places of these samples in it."""
        with self._lock:
            return self.store, self.places[indices]

    # -- opening ----------------------------------------------------------------------------------

    def _attach(self) -> None:
        for _ in range(_ATTEMPTS):  # somebody may be looking at it, or removing it
            try:
                self._make()
            except OSError as e:
                self.why_not_writable = f"{e.filename or self.folder}: {e.strerror or e}."
            with contextlib.suppress(OSError):
                self._held = lock_path(self.folder, make=False, shared=True, owned=True)
            if self._held is not None or self.why_not_writable:
                break
            time.sleep(_PAUSE_S)
        mark = read_mark(self.folder)
        if self._held is None or mark is None or mark.get("fingerprint") != self.source.fingerprint:
            self.why_not_writable = self.why_not_writable or f"{self.folder} cannot be used"
            return
        self.refresh()
        if not self.why_not_writable:
            self._clean()

    def _make(self) -> None:
        """Make the folder, or take the one that is there.

        Raises OSError if it cannot be written.
        """
        self.directory.path.mkdir(parents=True, exist_ok=True)
        make_folder(self.folder, mode=self.source.readers(), exist_ok=True)
        with take_lock(self.folder / "writer.lock"):
            if read_mark(self.folder) is None:
                mark = {
                    "fingerprint": self.source.fingerprint,
                    "source": self.source.path,
                    "samples": len(self.places),
                    "parts": list(self.part_names),
                }
                write_mark(self.folder, mark)
            os.utime(self.folder / MARK, follow_symlinks=False)

    def _clean(self) -> None:
        """Remove what killed writers left behind."""
        with contextlib.suppress(OSError), take_lock(self.folder / "writer.lock"):
            remove_stale_segments(self.folder)
            manifest = self._manifest()
            known = {v.path for s in manifest.segments for v in s.volumes}
            known |= {s.directory for s in manifest.segments}
            for path in self.folder.glob("segment-*"):
                if path.name not in known:
                    path.unlink()

    def _manifest(self) -> Manifest:
        """What is published; an empty one where nothing is, or nothing that can be read."""
        try:
            return load_manifest(self.folder)
        except StoreNotFound:
            pass
        except CorruptStore as e:
            _log.warning("%s The cache is begun anew.", e.message)
        return Manifest(uuid.uuid4().hex, "0" * 32, ())

    # -- seeing what others publish ---------------------------------------------------------------

    def refresh(self) -> bool:
        """Look for newly published segments; returns whether anything changed."""
        changed, bad = self._refresh()
        if bad:
            self._strike(bad)
        return changed

    def _refresh(self) -> tuple[bool, list[Segment]]:
        """As `refresh`; also returns segments that turned out to be bad."""
        with self._lock:
            try:
                s = (self.folder / "store.json").stat()
                status: tuple[int, ...] = (s.st_dev, s.st_ino, s.st_mtime_ns, s.st_size)
            except OSError:
                status = ()
            if status == self._status:
                return False, []
            self._status = status
            manifest = self._manifest()
            opened, bad = self._open(manifest)
            self._use(manifest, opened)
            self._struck |= {s.uuid for s in bad}
        return True, bad

    def _open(self, manifest: Manifest) -> tuple[list[OpenSegment], list[Segment]]:
        """The segments that can be used, those that are open already included, and the others."""
        before = {s.entry.uuid: s for s in self.store.segments} if self.store else {}
        opened: list[OpenSegment] = []
        bad = []
        base = 0
        for entry in manifest.segments:
            if entry.uuid in self._struck:
                continue
            try:
                segment = before.get(entry.uuid)
                if segment is None:
                    segment = self._open_one(entry)
                opened.append(replace(segment, base=base))
                base += entry.samples
            except (HeadraceError, OSError) as e:
                _log.warning("cache %s: a segment is left out: %s", self.folder, e)
                bad.append(entry)
        return opened, bad

    def _open_one(self, entry: Segment) -> OpenSegment:
        if any(v.kind != "packed" for v in entry.volumes):
            raise CorruptStore(f"{entry.directory} has volumes that are not the cache's own.")
        segment = open_segment(str(self.folder), entry, 0)
        segment.volumes.check_all()
        indices = segment.directory.columns.get(INDEX_COLUMN)
        if indices is None or indices.dtype.kind not in "iu":
            raise CorruptStore(f"{entry.directory} has no column {INDEX_COLUMN!r}.")
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self.places):
            raise CorruptStore(f"{entry.directory} names samples that the data set has not.")
        return segment

    def _use(self, manifest: Manifest, opened: list[OpenSegment]) -> None:
        """Make these the segments that are read."""
        before = [s.entry.uuid for s in self.store.segments] if self.store else []
        if before != [s.entry.uuid for s in opened[: len(before)]]:
            self.places[self.places > 0] = 0
            before = []
        for segment in opened[len(before) :]:
            indices = segment.directory.columns[INDEX_COLUMN]
            self.places[indices] = np.arange(segment.base + 1, segment.base + 1 + len(indices))
        self.cached = int(np.count_nonzero(self.places > 0))
        entries = tuple(s.entry for s in opened)
        self.store = (
            Store(str(self.folder), replace(manifest, segments=entries), opened) if opened else None
        )

    # -- adding and striking out ------------------------------------------------------------------

    def publish(self, segment: CacheSegment) -> int:
        """Add a segment's samples, but for those that others have published meanwhile.

        Returns:
            The number of samples added. The segment is used up, whatever happens.

        Raises:
            OSError: the disk is full or fails (VolumeError included), or the lock is not to be had.
        """
        indices = segment.indices
        added = 0
        try:
            with take_lock(self.folder / "writer.lock"):
                self._refresh()
                keep = self.places[indices] <= 0
                manifest = self._manifest()
                kept = [s for s in manifest.segments if s.uuid not in self._struck]
                if keep.any() and len(kept) < SEGMENTS_MAX:
                    entry = segment.finish(self.source, keep)
                    segment.move_to(self.folder, entry)
                    self._save(replace(manifest, segments=(*kept, entry)))
                    # The same samples packed anew make the same uuid: these are good.
                    self._struck.discard(entry.uuid)
                    added = int(keep.sum())
            self.refresh()
        finally:
            segment.remove()
            with self._lock:
                left = self.places[indices] == IN_SEGMENT
                self.places[indices[left]] = 0
        return added

    def distrust(self, store: Store, index: int) -> bool:
        """Never read again from the segment that holds sample `index` of this state of the cache.

        Returns:
            Whether it was trusted until now.
        """
        entry = store.segment_of(index).entry
        with self._lock:
            if entry.uuid in self._struck:
                return False
            self._struck.add(entry.uuid)
            self.distrusted += 1
            if self.store is not None:
                rebased, base = [], 0
                for other in self.store.segments:
                    if other.entry.uuid == entry.uuid:
                        continue
                    rebased.append(replace(other, base=base))
                    base += other.entry.samples
                self._use(self.store.manifest, rebased)
        self._strike([entry])
        return True

    def _strike(self, bad: list[Segment]) -> None:
        """Take segments out of the manifest, for all, and remove their files."""
        if self.why_not_writable:
            return
        names = {s.uuid for s in bad}
        with contextlib.suppress(OSError), take_lock(self.folder / "writer.lock"):
            manifest = self._manifest()
            kept = tuple(s for s in manifest.segments if s.uuid not in names)
            if len(kept) == len(manifest.segments):
                return
            if kept:
                self._save(replace(manifest, segments=kept))
            else:
                (self.folder / "store.json").unlink()
            for segment in bad:
                for name in (segment.directory, *(v.path for v in segment.volumes)):
                    (self.folder / name).unlink(missing_ok=True)

    def _save(self, manifest: Manifest) -> None:
        pages = [read_file(self.folder / s.directory, PAGE_BYTES) for s in manifest.segments]
        replace(manifest, fingerprint=fingerprint_of(pages)).save(self.folder)
