"""Image: a packed store as one file or block device: what any NVMe target can export as a namespace.

The catalog comes last: until then the image is none, so that a writer that is stopped leaves nothing
that looks whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.files import lock
from headrace.errors import CorruptStore, StoreExists, VolumeError
from headrace.fabric.catalog import PAGE_BYTES, CatalogEntry, aligned, lay_out, pack_catalog
from headrace.fabric.store_files import MANIFEST, StoreFiles, files_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[int, int], None]

__all__ = ["ImageReport", "write_image"]

_COPY_BYTES = 8 << 20
_LOOKED_AT_BYTES = 1 << 20
_BLKGETSIZE64 = 0x80081272


@dataclass(frozen=True, slots=True)
class ImageReport:
    """What was written.

    Attributes:
        path: the file or block device.
        files: how many of the store's files.
        bytes: of the image.
    """

    path: str
    files: int
    bytes: int


def write_image(
    store: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> ImageReport:
    """Writes a packed store as an image, durably.

    Args:
        store: its folder.
        target: a file, made if there is none, or a block device.
        force: write over what is there.
        progress: called with (bytes done, bytes), as often as one likes.

    Raises:
        StoreExists: the target is not empty.
        StoreNotFound, CorruptStore, SourceError: the store cannot be imaged.
        VolumeError: the target is too small, is no file and no block device, or cannot be written.
    """
    files = files_of(store)
    entries = lay_out([(MANIFEST, len(files.manifest)), *files.sizes.items()])
    total = aligned(max(e.offset + e.length for e in entries))
    text = os.fspath(target)
    try:
        fd = os.open(text, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as e:
        raise _refused(text, e) from e
    try:
        _check_target(fd, text, total, force=force)
        _write(fd, files, entries, total, progress)
    except OSError as e:
        if isinstance(e, (VolumeError, StoreExists)):
            raise
        raise _refused(text, e) from e
    finally:
        os.close(fd)
    return ImageReport(text, len(entries), total)


def _check_target(fd: int, text: str, total: int, *, force: bool) -> None:
    """Refuses what must not be written, and what is too small."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
        raise VolumeError(f"{text} is neither a file nor a block device.", path=text)
    if not lock(fd):
        raise VolumeError(f"{text}: another process writes it.", path=text, errno=errno.EAGAIN)
    regular = stat.S_ISREG(mode)
    used = os.fstat(fd).st_size > 0 if regular else any(os.pread(fd, _LOOKED_AT_BYTES, 0))
    if used and not force:
        raise StoreExists(
            f"{text} is not empty.",
            path=text,
            next_step="Choose another target, or pass --force (force=True) to write over what is there.",
        )
    if regular:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, total)
        return
    size = struct.unpack("Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))[0]
    if size < total:
        raise VolumeError(
            f"{text} has {size:,} bytes, the image needs {total:,}.",
            path=text,
            errno=errno.ENOSPC,
            next_step="Choose a larger device.",
        )


def _write(
    fd: int, files: StoreFiles, entries: list[CatalogEntry], total: int, progress: Progress | None
) -> None:
    _write_all(fd, bytes(PAGE_BYTES), 0)  # what stood there is no catalog any more
    done = 0
    for entry in entries:
        if entry.name == MANIFEST:
            _write_all(fd, files.manifest, entry.offset)
            done += len(files.manifest)
            continue
        with files.path(entry.name).open("rb", buffering=0) as source:
            at = 0
            while at < entry.length:
                data = source.read(min(_COPY_BYTES, entry.length - at))
                if not data:
                    raise CorruptStore(
                        f"{files.path(entry.name)}: ends at byte {at:,}, expected {entry.length:,}: it "
                        "changed while it was copied.",
                        path=str(files.path(entry.name)),
                        offset_bytes=at,
                        next_step="Write the image again.",
                    )
                _write_all(fd, data, entry.offset + at)
                at += len(data)
                done += len(data)
                if progress is not None:
                    progress(done, total)
    os.fsync(fd)
    # A torn header is no catalog; a whole one names a table and files that are on the disk.
    catalog = pack_catalog(entries)
    _write_all(fd, catalog[PAGE_BYTES:], PAGE_BYTES)
    os.fsync(fd)
    _write_all(fd, catalog[:PAGE_BYTES], 0)
    os.fsync(fd)
    if progress is not None:
        progress(total, total)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def _refused(text: str, e: OSError) -> VolumeError:
    busy = e.errno == errno.EWOULDBLOCK
    return VolumeError(
        f"{text}: cannot be written: {'another process writes it' if busy else e.strerror}.",
        path=text,
        errno=e.errno,
        next_step="Wait until it has ended."
        if busy
        else "Check the device or disk, then write it again.",
    )
