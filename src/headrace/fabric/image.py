"""Stores on namespaces: the catalog in the first bytes, which says where each file lies; and images.

An image is a packed store as one file or block device, which any NVMe target can export as a namespace. Its
catalog comes last: until then the image is none, so that a writer that is stopped leaves nothing that
looks whole. docs/format.md has the layout. What is read may come from anybody: the header is judged before
memory is taken for the table, and the table as a whole before anything that it names is read. Of
`store.json` only the names are read here; whoever opens the store checks the rest.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.checksum import crc32c
from headrace.base.files import lock, write_all
from headrace.errors import CorruptStore, SourceError, StoreExists, StoreNotFound, VolumeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Progress = Callable[[int, int], None]

MANIFEST = "store.json"
_MANIFEST_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """What a store's folder holds."""

    folder: Path  # where
    manifest: bytes  # the bytes of `store.json`
    sizes: dict[str, int]  # bytes of every other file by name: directories before volumes


def files_of(folder: str | os.PathLike[str]) -> StoreFiles:
    """The files of a packed store.

    Raises:
        StoreNotFound: there is no store.
        CorruptStore: its manifest cannot be read, or a file is missing.
        SourceError: samples lie outside of the folder.
        VolumeError: the system refuses to read it.
    """
    place = Path(folder)
    manifest = _read(place / MANIFEST)
    directories: list[str] = []
    volumes: list[str] = []
    try:
        for segment in json.loads(manifest)["segments"]:
            directories.append(_plain(segment["directory"]))
            for volume in segment["volumes"]:
                if volume["kind"] != "packed":
                    raise SourceError(
                        f"{place}: its samples lie in {volume['path']}, expected a packed store.",
                        path=str(place),
                        next_step="Pack it: headrace pack SOURCE STORE.",
                    )
                volumes.append(_plain(volume["path"]))
    except (ValueError, TypeError, LookupError, RecursionError) as e:
        raise CorruptStore(
            f"{place / MANIFEST}: the manifest cannot be read: {e!r}.",
            path=str(place / MANIFEST),
            next_step="Look at it with headrace verify.",
        ) from e
    return StoreFiles(place, manifest, {n: _size(place / n) for n in directories + volumes})


def _plain(name: object) -> str:
    """A name that cannot lead out of the folder."""
    if not isinstance(name, str) or "/" in name or name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"{name!r} is no file name")
    return name


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MANIFEST_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFound(
            f"{path}: there is no store here.",
            path=str(path),
            next_step="Make one with headrace pack.",
        ) from None
    except OSError as e:
        text = f"{path}: cannot be read: {e.strerror}."
        raise VolumeError(text, path=str(path), errno=e.errno) from e
    if len(data) > _MANIFEST_BYTES_MAX:
        raise CorruptStore(
            f"{path}: manifest size in bytes is more than {_MANIFEST_BYTES_MAX:,}.", path=str(path)
        )
    return data


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise CorruptStore(
            f"{path}: the file is missing.", path=str(path),
            next_step="Put it back, or pack the source again.",
        ) from None  # fmt: skip
    except OSError as e:
        raise VolumeError(f"{path}: {e.strerror}.", path=str(path), errno=e.errno) from e


MAGIC = b"HRNSCAT1"
VERSION = 1
PAGE_BYTES = 4096
ENTRIES_MAX = 1 << 20
TABLE_BYTES_MAX = 64 << 20
NAME_BYTES_MAX = 1024
BYTES_MAX = 1 << 62

_HEADER = struct.Struct("<8sIIQII")
_CRC_AT = 28
_ENTRY = struct.Struct("<IIQQ")
_ALIGNMENT = 8
_NEXT_STEP = "Write the image or export the store again."


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One file of the store."""

    name: str  # relative path within the store's folder
    nsid: int  # the namespace that holds it; 0: the one of this catalog
    offset: int  # of its first byte in that namespace
    length: int  # its bytes


@dataclass(frozen=True, slots=True)
class CatalogHeader:
    """What the first page says."""

    entries: int  # files in the table
    table_bytes: int  # of the table, which begins with the second page
    table_crc: int  # its crc32c


def aligned(nbytes: int) -> int:
    """`nbytes`, filled up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def lay_out(files: Iterable[tuple[str, int]]) -> list[CatalogEntry]:
    """Where files come to lie that share the catalog's namespace: each begins with a page."""
    listed = list(files)
    at = PAGE_BYTES + aligned(sum(_entry_bytes(name) for name, _ in listed))
    entries = []
    for name, nbytes in listed:
        entries.append(CatalogEntry(name, 0, at, nbytes))
        at += aligned(nbytes)
    return entries


def pack_catalog(entries: Sequence[CatalogEntry]) -> bytes:
    """The header page and the table, filled up to whole pages."""
    table = b"".join(map(_pack_entry, entries))
    head = bytearray(PAGE_BYTES)
    _HEADER.pack_into(head, 0, MAGIC, VERSION, len(entries), len(table), crc32c(table), 0)
    struct.pack_into("<I", head, _CRC_AT, crc32c(head))
    return bytes(head) + table.ljust(aligned(len(table)), b"\0")


def parse_header(page: bytes, where: str, *, namespace_bytes: int) -> CatalogHeader:
    """Checks a namespace's first page.

    Args:
        page: `PAGE_BYTES` bytes.
        where: the namespace's URL, for errors.
        namespace_bytes: of the namespace that the catalog lies in.

    Raises:
        CorruptStore: it is no catalog, or a damaged one.
    """
    _expect(len(page) == PAGE_BYTES, where, "first page in bytes", len(page), PAGE_BYTES, 0)
    magic, version, entries, table_bytes, table_crc, crc = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise CorruptStore(
            f"{where}: no store lies here: the first bytes are {magic!r}, expected {MAGIC!r}.",
            path=where,
            offset_bytes=0,
            next_step="Write one with `headrace image`, or export one with `headrace export`.",
        )
    computed = crc32c(page[:_CRC_AT] + bytes(4) + page[_CRC_AT + 4 :])
    _expect(crc == computed, where, "catalog header checksum", f"{computed:08x}", f"{crc:08x}", 28)
    _expect(version == VERSION, where, "catalog version", version, VERSION, 8)
    _expect(
        not any(page[_HEADER.size :]), where, "rest of the catalog's header", "not zero", "zero", 32
    )
    _expect(0 < entries <= ENTRIES_MAX, where, "catalog entries", f"{entries:,}",
            f"1 to {ENTRIES_MAX:,}", 12)  # fmt: skip
    most = min(TABLE_BYTES_MAX, namespace_bytes - PAGE_BYTES)
    least = entries * (_ENTRY.size + _ALIGNMENT)
    fits = least <= table_bytes <= most and table_bytes % _ALIGNMENT == 0
    _expect(fits, where, "catalog table in bytes", f"{table_bytes:,}",
            f"a multiple of 8 from {least:,} to {most:,}", 16)  # fmt: skip
    return CatalogHeader(entries, table_bytes, table_crc)


def parse_table(
    header: CatalogHeader, table: bytes, where: str, *, namespace_bytes: int
) -> dict[str, CatalogEntry]:
    """Checks the table.

    Args:
        header: what the first page said.
        table: its `table_bytes` bytes.
        where: the namespace's URL, for errors.
        namespace_bytes: of the namespace that the catalog lies in.

    Returns:
        The entries by name.

    Raises:
        CorruptStore: it is damaged or contradicts itself.
    """
    crc = crc32c(table)
    _expect(crc == header.table_crc, where, "catalog table checksum", f"{crc:08x}",
            f"{header.table_crc:08x}", PAGE_BYTES)  # fmt: skip
    by_name: dict[str, CatalogEntry] = {}
    at = 0
    for number in range(header.entries):
        entry, nbytes = _parse_entry(table, at, number, where)
        _expect(entry.name not in by_name, where, f"entry {number} of the catalog",
                f"a second {entry.name!r}", "each name once", PAGE_BYTES + at)  # fmt: skip
        by_name[entry.name] = entry
        at += nbytes
    _expect(at == len(table), where, "end of the catalog's last entry", f"{at:,}",
            f"{len(table):,}", PAGE_BYTES + at)  # fmt: skip
    _check_places(by_name.values(), where, namespace_bytes, PAGE_BYTES + aligned(len(table)))
    return by_name


def _parse_entry(table: bytes, at: int, number: int, where: str) -> tuple[CatalogEntry, int]:
    """An entry, and the bytes that it takes."""
    what, offset = f"entry {number} of the catalog", PAGE_BYTES + at
    left = len(table) - at
    _expect(left >= _ENTRY.size, where, what, f"{left} bytes", f"{_ENTRY.size} or more", offset)
    nsid, name_bytes, first, length = _ENTRY.unpack_from(table, at)
    room = min(NAME_BYTES_MAX, left - _ENTRY.size)
    _expect(0 < name_bytes <= room, where, f"{what}: its name in bytes", f"{name_bytes:,}",
            f"1 to {room:,}", offset + 4)  # fmt: skip
    used = _ENTRY.size + -(-name_bytes // _ALIGNMENT) * _ALIGNMENT
    raw = table[at + _ENTRY.size : at + _ENTRY.size + name_bytes]
    _expect(used <= left, where, what, f"{left} bytes", f"{used}", offset)
    padding = table[at + _ENTRY.size + name_bytes : at + used]
    _expect(not any(padding), where, f"{what}: its padding", "not zero", "zero", offset)
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        name = ""
    _expect(_is_name(name), where, f"{what}: its name", repr(raw), "a relative path", offset + 24)
    fits = length <= BYTES_MAX and first <= BYTES_MAX
    _expect(fits, where, f"{what}: its place", f"{length:,} bytes at {first:,}",
            f"at most {BYTES_MAX:,}", offset + 8)  # fmt: skip
    return CatalogEntry(name, nsid, first, length), used


def _is_name(name: str) -> bool:
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)


def _check_places(
    entries: Iterable[CatalogEntry], where: str, namespace_bytes: int, first_byte: int
) -> None:
    """No file lies over another, over the catalog, or beyond the end of this namespace."""
    ends: dict[int, tuple[int, str]] = {0: (first_byte, "the catalog")}
    for entry in sorted(entries, key=lambda e: (e.nsid, e.offset, e.length)):
        end, before = ends.get(entry.nsid, (0, ""))
        _expect(entry.offset >= end, where, f"first byte of {entry.name!r}", f"{entry.offset:,}",
                f"{end:,} or more, where {before} ends", None)  # fmt: skip
        stop = entry.offset + entry.length
        _expect(entry.nsid != 0 or stop <= namespace_bytes, where, f"last byte of {entry.name!r}",
                f"{stop:,}", f"at most {namespace_bytes:,}", None)  # fmt: skip
        ends[entry.nsid] = (stop, repr(entry.name))


def _entry_bytes(name: str) -> int:
    return _ENTRY.size + -(-len(name.encode()) // _ALIGNMENT) * _ALIGNMENT


def _pack_entry(entry: CatalogEntry) -> bytes:
    raw = entry.name.encode()
    if not _is_name(entry.name) or not 0 < len(raw) <= NAME_BYTES_MAX:
        raise ValueError(f"{entry.name!r} cannot stand in a catalog, expected a relative path")
    fixed = _ENTRY.pack(entry.nsid, len(raw), entry.offset, entry.length)
    return (fixed + raw).ljust(_entry_bytes(entry.name), b"\0")


def _expect(  # noqa: PLR0917 - a sentence, in the order of its words
    ok: bool, where: str, what: str, found: object, expected: object, offset: int | None
) -> None:
    if not ok:
        at = "" if offset is None else f" (offset {offset:,})"
        raise CorruptStore(
            f"{where}: {what} is {found}, expected {expected}{at}.",
            path=where,
            offset_bytes=offset,
            next_step=_NEXT_STEP,
        )


_COPY_BYTES = 8 << 20
_LOOKED_AT_BYTES = 1 << 20
_BLKGETSIZE64 = 0x80081272


@dataclass(frozen=True, slots=True)
class ImageReport:
    """What was written."""

    path: str  # the file or block device
    files: int  # how many of the store's files
    bytes: int  # of the image


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
    write_all(fd, bytes(PAGE_BYTES), 0)  # what stood there is no catalog any more
    done = 0
    for entry in entries:
        if entry.name == MANIFEST:
            write_all(fd, files.manifest, entry.offset)
            done += len(files.manifest)
            continue
        path = files.folder / entry.name
        with path.open("rb", buffering=0) as source:
            at = 0
            while at < entry.length:
                data = source.read(min(_COPY_BYTES, entry.length - at))
                if not data:
                    raise CorruptStore(
                        f"{path}: ends at byte {at:,}, expected {entry.length:,}: it changed while it was "
                        "copied.",
                        path=str(path),
                        offset_bytes=at,
                        next_step="Write the image again.",
                    )
                write_all(fd, data, entry.offset + at)
                at += len(data)
                done += len(data)
                if progress is not None:
                    progress(done, total)
    os.fsync(fd)
    # A torn header is no catalog; a whole one names a table and files that are on the disk.
    catalog = pack_catalog(entries)
    write_all(fd, catalog[PAGE_BYTES:], PAGE_BYTES)
    os.fsync(fd)
    write_all(fd, catalog[:PAGE_BYTES], 0)
    os.fsync(fd)
    if progress is not None:
        progress(total, total)


def _refused(text: str, e: OSError) -> VolumeError:
    why, next_step = e.strerror, "Check the device or disk, then write it again."
    if e.errno == errno.EWOULDBLOCK:
        why, next_step = "another process writes it", "Wait until it has ended."
    message = f"{text}: cannot be written: {why}."
    return VolumeError(message, path=text, errno=e.errno, next_step=next_step)
