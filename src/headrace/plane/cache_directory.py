"""CacheDirectory: a folder with the cache of each data set, and one quota over all of them.

    DIR/
      lock                 held while free bytes are handed out
      <fingerprint>/       one data set's cache: an ordinary store, see `cache`
        cache.json         says that headrace made it, and of what
        store.json, segment-*.hrd, segment-*.hrv
        tail-*/            a segment that is being written

Whoever uses a cache holds a shared lock on its folder, so only what nobody uses is ever removed, and
only folders with our mark are counted or touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.documents import DocumentKind
from headrace.base.files import lock_path, read_file, replace_file, temporary_name
from headrace.errors import StoreError
from headrace.store.manifest import load_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    """The cache of one data set.

    Attributes:
        path: its folder.
        fingerprint: of the data set.
        source: the path of the data set when the cache was begun.
        samples: samples that it holds.
        of_samples: samples of the data set.
        bytes: its files.
        in_use: some process holds it.
        used_s: seconds since the epoch, when it was last opened.
    """

    path: str
    fingerprint: str
    source: str
    samples: int
    of_samples: int
    bytes: int
    in_use: bool
    used_s: float

    @property
    def complete(self) -> bool:
        """Whether it holds the whole data set."""
        return self.samples >= self.of_samples


class CacheDirectory:
    """The caches below one folder.

    Args:
        path: the folder; made when the first cache is begun.
        quota_bytes: for all caches; None: what leaves a part of the file system free.
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

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with take_lock(self.path / "lock"):
            yield

    def room(self) -> int:
        """Bytes that may still be written. Only under `locked`."""
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if self.quota_bytes is None:
            return max(0, free - disk_reserve(disk.f_blocks * disk.f_frsize))
        return max(0, min(self.quota_bytes - self.used_bytes(), free))

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

        Raises:
            StoreError: it is no cache of headrace's, or in use.
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


@contextlib.contextmanager
def hold(folder: Path, *, exclusive: bool = False) -> Iterator[bool]:
    """Hold a folder while the block runs; false where others hold it in the way.

    Raises:
        OSError: it is none, or another user's.
    """
    fd = lock_path(folder, make=False, shared=not exclusive, owned=True)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def take_lock(path: Path) -> Iterator[None]:
    """Hold a lock file; others hold it for moments only.

    Raises:
        OSError: it cannot be created, or (TimeoutError) somebody holds it for ever.
    """
    fd = lock_path(path, mode=0o666, wait_s=_LOCK_S)
    if fd is None:
        raise TimeoutError(f"{path} is locked by another process")
    try:
        yield
    finally:
        os.close(fd)


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
