"""An open segment: its directory, its volumes, and the errors for samples that cannot be read.

Each volume is checked when the store is opened (existence, size, modification time of foreign files,
header of packed ones), so that a wrong one is found before training begins. Descriptors are opened
when first used; beyond a share of the process's limit each read opens and closes its own.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.base.checksum import crc32c
from headrace.base.files import open_file, read_fully
from headrace.errors import (
    CorruptSample,
    CorruptStore,
    HeadraceError,
    SourceChanged,
    StoreNotFound,
    VolumeError,
    VolumeTimeout,
)
from headrace.io.objects.location import is_url
from headrace.store.directory import DirectoryColumns, write_directory
from headrace.store.format import PAGE_BYTES, VolumeHeader, check_volume_header, corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from headrace.store.manifest import Segment, VolumeEntry
    from headrace.store.opening import RemoteEngine


def read_error(
    kind: str,
    index: int,
    name: bytes,
    path: str,
    offset: int,
    *,
    actual: str,
    expected: str,
    code: int = 0,
    foreign: bool = False,
) -> HeadraceError:
    """The error for an extent of sample `index`, at `offset` of the file `path`, that did not give its bytes.

    The kind is `checksum`, `short`, `changed` (a foreign file) or `system`, whose `code` is its errno.
    """
    text = os.fsdecode(name)
    where = f"sample {index} ({text!r}): {path}"
    fields: dict[str, Any] = {"path": path, "offset_bytes": offset, "index": index, "name": text}
    if kind == "system":
        error = VolumeTimeout if code == errno.ETIMEDOUT else VolumeError
        return error(
            f"{where}: reading failed: {os.strerror(code)} (offset {offset:,}).",
            errno=code,
            next_step=_ERRNO_ADVICE.get(code, "Check the disk and the file's permissions."),
            **fields,
        )
    if kind == "changed":
        return SourceChanged(
            f"{where}: {actual}, expected {expected}: the file changed after it was indexed.",
            next_step="Index the source again.",
            **fields,
        )
    what = "checksum" if kind == "checksum" else "bytes"
    return CorruptSample(
        f"{where}: {what} {actual}, expected {expected} (offset {offset:,}).",
        next_step=(
            "The source is damaged: restore it and index it again."
            if foreign
            else "Verify the store to list every bad sample, and repair it from its source."
        ),
        **fields,
    )


_ERRNO_ADVICE = {
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.EACCES: "Make the file readable for this user.",
    errno.ETIMEDOUT: "Look at the storage, or give a larger deadline_s.",
    errno.ECONNRESET: "Check the network and the storage's server.",
    errno.EIO: "The disk reports an error: check it, then verify the store.",
}


_PROBLEMS_SHOWN = 10


class Volumes:
    """The volumes of one segment."""

    def __init__(self, folder: str, segment: Segment) -> None:
        self.entries = segment.volumes
        self.paths = [os.path.join(folder, v.path) for v in segment.volumes]
        self._segment_uuid = segment.uuid
        self._fds: dict[int, int] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._kept = max(0, (4096 if soft == resource.RLIM_INFINITY else soft) // 4 - 8)

    def problems(self) -> list[HeadraceError]:
        """What is wrong with the volumes, one error each."""
        return list(filter(None, map(self.problem, range(len(self.entries)))))

    def problem(self, number: int) -> HeadraceError | None:
        """What is wrong with one volume; errors as for `check_all`."""
        try:
            self._check(number)
        except HeadraceError as e:
            return e
        return None

    def check_all(self) -> None:
        """Checks every volume.

        Raises CorruptStore if a packed volume is missing, damaged, or another one stands in its place;
        SourceChanged if a foreign file is gone or not as it was; VolumeError if the system refuses to open
        one.
        """
        problems = self.problems()
        if len(problems) == 1:
            raise problems[0]
        if problems:
            shown = "".join(f"\n  {p.message}" for p in problems[:_PROBLEMS_SHOWN])
            more = len(problems) - _PROBLEMS_SHOWN
            tail = f"\n  and {more:,} more" if more > 0 else ""
            raise type(problems[0])(
                f"{len(problems):,} of {len(self.entries):,} volumes cannot be used:{shown}{tail}\n",
                path=problems[0].path,
                next_step=problems[0].next_step,
            )

    def _check(self, number: int) -> None:
        entry, path = self.entries[number], self.paths[number]
        if entry.kind == "tree":
            if not os.path.isdir(path):
                raise SourceChanged(
                    f"{path}: the folder is gone, expected the files that were indexed there.",
                    path=path,
                    next_step="Put it back, or index the source where it is now.",
                )
            return
        fd = self._open(number)
        try:
            check_file(entry, path, os.fstat(fd))
            if entry.kind == "packed":
                expected = VolumeHeader(
                    bytes.fromhex(entry.uuid or ""), bytes.fromhex(self._segment_uuid), number
                )
                check_volume_header(os.pread(fd, PAGE_BYTES, 0), expected, path)
        finally:
            os.close(fd)

    def borrow(self, number: int) -> tuple[int, bool]:
        """A descriptor of a file volume, and whether the caller must close it."""
        fd = self._fds.get(number)
        if fd is not None:
            return fd, False
        fd = self._open(number)
        try:
            check_file(self.entries[number], self.paths[number], os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        if len(self._fds) >= self._kept:
            return fd, True
        # No lock: of two threads that open the same volume, one keeps its descriptor.
        kept = self._fds.setdefault(number, fd)
        if kept is not fd:
            os.close(fd)
        return kept, False

    def read_into(self, number: int, view: memoryview, offset: int) -> int:
        """Fills `view` from `offset` of a file volume; fewer bytes come at its end only.

        Raises HeadraceError as for `check_all`, and OSError if the system refuses the read.
        """
        fd, close = self.borrow(number)
        try:
            return read_fully(fd, view, offset)
        finally:
            if close:
                os.close(fd)

    def read_unchecked(self, number: int, view: memoryview, offset: int) -> int:
        """As `read_into`, from a file that may be the wrong one: for `verify`, which says so itself."""
        fd = self._open(number)
        try:
            return read_fully(fd, view, offset)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the descriptors."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __del__(self) -> None:
        # A store that is dropped without `close` leaves nothing open.
        for fd in getattr(self, "_fds", {}).values():
            with suppress(OSError):
                os.close(fd)

    def native(self) -> list[tuple[str, bytes, int, int]]:
        """As `headrace._native.Catalog` wants them: (kind, path, bytes, mtime_ns or -1)."""
        return [
            (
                "tree" if entry.kind == "tree" else "file",
                os.fsencode(os.path.abspath(path)),
                entry.bytes or 0,
                -1 if entry.mtime_ns is None else entry.mtime_ns,
            )
            for entry, path in zip(self.entries, self.paths, strict=True)
        ]

    def _open(self, number: int) -> int:
        entry, path = self.entries[number], self.paths[number]
        try:
            if entry.kind == "packed":
                return open_file(path)
            # A source is where the user says, perhaps behind links.
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except VolumeError:
            raise
        except OSError as e:
            raise _missing(entry.kind, path, e) from e


def _missing(kind: str, path: str, e: OSError) -> HeadraceError:
    if e.errno in (errno.ENOENT, errno.ENOTDIR):
        error, what, how = (
            (CorruptStore, "volume", "pack")
            if kind == "packed"
            else (SourceChanged, "indexed file", "index")
        )
        return error(
            f"{path}: the {what} is missing.",
            path=path,
            next_step=f"Put the file back, or {how} the source again.",
        )
    return _unopened(path, e)


def _unopened(path: str, e: OSError) -> VolumeError:
    limit = e.errno == errno.EMFILE
    how = _ERRNO_ADVICE[errno.EMFILE] if limit else "Check the file's permissions and the disk."
    text = f"{path}: cannot be opened: {e.strerror}."
    return VolumeError(text, path=path, errno=e.errno, next_step=how)


def check_file(entry: VolumeEntry, path: str, status: os.stat_result) -> None:
    """Size of a file volume, and modification time of a foreign one, are as recorded."""
    if status.st_size != entry.bytes:
        if entry.kind == "packed":
            raise corrupt(
                path, "volume size in bytes", f"{status.st_size:,}", f"{entry.bytes:,}",
                min(status.st_size, entry.bytes or 0),
                next_step="Verify the store to see what is lost, and repair it from its source.",
            )  # fmt: skip
        what = f"size in bytes is {status.st_size:,}, expected {entry.bytes:,}"
    elif entry.mtime_ns is not None and status.st_mtime_ns != entry.mtime_ns:
        what = f"modification time is {status.st_mtime_ns} ns, expected {entry.mtime_ns} ns"
    else:
        return
    raise SourceChanged(
        f"{path}: {what}: the file changed after it was indexed.",
        path=path,
        next_step="Index the source again.",
    )


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one part of one sample lies."""

    index: int
    name: bytes
    part: int
    volume: int
    offset: int
    length: int
    crc: int | None
    mtime_ns: int | None


@dataclass(slots=True)
class OpenSegment:
    """One segment of an open store."""

    entry: Segment  # its manifest entry
    base: int  # global index of its first sample
    directory: _native.Directory  # its sample directory
    volumes: Volumes  # its volumes

    def walk(
        self, begin: int = 0, end: int | None = None, step: int = 1 << 18
    ) -> Iterator[tuple[int, int, dict[str, NDArray[np.int64]]]]:
        """The extents of its samples `begin` to `end - 1`, `step` samples at a time.

        Yields the first sample, the one behind the last, and their extents as `extents_of` gives them.
        """
        end = self.directory.samples if end is None else end
        for first in range(begin, end, step):
            last = min(first + step, end)
            yield first, last, self.directory.extents_of(np.arange(first, last, dtype=np.int64))

    def extents(self, index: int) -> list[Extent]:
        """The extents of the sample with the global index `index`."""
        local = index - self.base
        name = self.directory.name(local)
        extents = self.directory.extents_of(np.array([local], np.int64))
        self._check(extents)
        keys = ("part", "volume", "offset", "length", "crc", "mtime_ns")
        return [
            Extent(
                index, name, part, volume, offset, length,
                crc if self.directory.has_crc else None, None if mtime == -1 else mtime,
            )
            for part, volume, offset, length, crc, mtime in zip(
                *(extents[key].tolist() for key in keys), strict=True
            )
        ]  # fmt: skip

    def _check(self, extents: dict[str, NDArray[np.int64]]) -> None:
        most = {"volume": len(self.entry.volumes), "part": len(self.directory.part_names)}
        for what, count in most.items():
            # A number above 2^63 is negative here.
            bad = extents[what][(extents[what] < 0) | (extents[what] >= count)]
            if len(bad):
                raise corrupt(
                    self.entry.directory, f"{what} of an extent", int(bad[0]) % (1 << 64),
                    f"below {count}",
                )  # fmt: skip


@contextmanager
def memory_file() -> Iterator[int]:
    """An anonymous file for a directory; mappings of it outlive the descriptor."""
    fd = os.memfd_create("headrace-directory", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def catalog_of_files(
    paths: Iterable[str], volume: NDArray[Any], offset: NDArray[Any], length: NDArray[Any], label: str,
    *, first: NDArray[np.int64] | None = None,
) -> _native.Catalog:  # fmt: skip
    """A catalog of samples in files, whose directory is in memory.

    Each extent has the number of its file (`volume`), its offset there and its length; `first`, of shape
    (samples + 1,), says where each sample's extents begin: not given, each has one.
    """
    firsts = np.arange(len(offset) + 1) if first is None else first
    samples = len(firsts) - 1
    parts = np.arange(int(firsts[-1])) - np.repeat(firsts[:-1], np.diff(firsts))
    most = int(parts.max(initial=0)) + 1
    names = np.char.mod("%010d", np.arange(samples)).astype("S10")
    columns = DirectoryColumns(
        names=names.view(np.uint8).reshape(-1),
        name_offsets=np.arange(samples + 1, dtype=np.uint64) * 10,
        volume=volume.astype(np.uint32), offset=offset.astype(np.uint64), length=length.astype(np.uint64),
        first_extent=None if most == 1 else firsts.astype(np.uint64),
        part=None if most == 1 else parts.astype(np.uint32),
        part_names=tuple(b"%d" % i for i in range(most)) if most > 1 else (b"",),
    )  # fmt: skip
    with memory_file() as fd:
        write_directory(columns, fd)
        directory = _native.Directory.from_fd(fd, label)
    volumes = [("file", os.fsencode(path), os.stat(path).st_size, -1) for path in paths]
    return _native.Catalog([(directory, volumes)])


def open_segment(
    where: str, entry: Segment, base: int, engine: RemoteEngine | None = None
) -> OpenSegment:
    """Opens a segment of the store at a folder or URL, and checks its directory against the manifest.

    Raises CorruptStore if it is damaged, or not the one that the manifest means, and VolumeError if it cannot
    be read.
    """
    if not is_url(where):
        directory = open_directory(os.path.join(where, entry.directory), entry)
        return OpenSegment(entry, base, directory, open_volumes(where, entry, engine))
    from headrace.store.remote import RemoteVolumes, open_remote_directory

    assert engine is not None
    volumes = RemoteVolumes(where, entry, engine, remote=True)
    place = engine.place(where, entry.directory)
    directory = open_remote_directory(place, entry, engine)
    return OpenSegment(entry, base, directory, volumes)


def open_directory(path: str, entry: Segment) -> _native.Directory:
    """Opens the directory of a segment, a file that others may have made; errors as for `open_segment`."""
    try:
        fd = open_file(path)
    except FileNotFoundError:
        raise StoreNotFound(
            f"{path}: the sample directory is missing.",
            path=path,
            next_step="Restore the file from a copy, or pack or index the source again.",
        ) from None
    except VolumeError:
        raise
    except OSError as e:
        raise _unopened(path, e) from e
    try:
        size = os.fstat(fd).st_size
        if size != entry.directory_bytes:
            raise corrupt(path, "file size in bytes", f"{size:,}", f"{entry.directory_bytes:,}")
        directory = _native.Directory.from_fd(fd, path)
    finally:
        os.close(fd)
    check_directory(directory, entry, path)
    return directory


def open_volumes(folder: str, entry: Segment, engine: RemoteEngine | None) -> Volumes:
    """The volumes of a segment whose manifest is local; `engine` reads those that are objects."""
    if engine is None or not any(v.kind == "object" for v in entry.volumes):
        return Volumes(folder, entry)
    from headrace.store.remote import RemoteVolumes

    return RemoteVolumes(folder, entry, engine, remote=False)


def check_directory(directory: _native.Directory, entry: Segment, path: str) -> None:
    """Checks that a directory is the one that the manifest means."""
    for what, stated, expected in (
        ("uuid", directory.uuid.hex(), entry.uuid),
        ("number of samples", directory.samples, entry.samples),
        ("number of extents", directory.extents, entry.extents),
    ):
        if stated != expected:
            raise corrupt(path, what, stated, f"{expected} as the manifest says")


# -- single reads in Python ----------------------------------------------------------------------------


def read_extent(
    segment: OpenSegment, extent: Extent, start: int = 0, size: int | None = None
) -> bytearray:
    """The bytes `start` to `start + size - 1` of one extent, fewer at its end.

    Raises CorruptSample if the bytes differ from the checksum, or end early; SourceChanged if a foreign file
    is not as it was indexed; VolumeError if the system refuses the read.
    """
    begin = min(start, extent.length)
    end = extent.length if size is None else min(extent.length, begin + size)
    entry, path = _place(segment, extent)

    def failure(kind: str, actual: str = "", expected: str = "", code: int = 0) -> HeadraceError:
        return read_error(
            kind, extent.index, extent.name, path, extent.offset,
            actual=actual, expected=expected, code=code, foreign=entry.kind != "packed",
        )  # fmt: skip

    data = bytearray(end - begin)
    try:
        if entry.kind == "tree":
            with _open_tree_file(segment, extent, path, failure) as fd:
                count = read_fully(fd, memoryview(data), begin)
        else:
            count = segment.volumes.read_into(
                extent.volume, memoryview(data), extent.offset + begin
            )
    except HeadraceError:
        raise
    except OSError as e:
        raise failure("system", code=e.errno or 0) from e
    if count < len(data):
        raise failure("short", str(count), str(len(data)))
    if extent.crc is not None and end - begin == extent.length:
        computed = f"{crc32c(data):08x}"
        if computed != f"{extent.crc:08x}":
            raise failure("checksum", computed, f"{extent.crc:08x}")
    return data


def _place(segment: OpenSegment, extent: Extent) -> tuple[VolumeEntry, str]:
    """The volume and the file of an extent, which lies in it: known before memory is allocated for it."""
    volumes = segment.volumes
    if extent.volume < len(volumes.entries) and extent.length >= 0 and extent.offset >= 0:
        entry, path = volumes.entries[extent.volume], volumes.paths[extent.volume]
        if entry.kind == "tree":
            return entry, os.path.join(path, os.fsdecode(extent.name))
        if extent.offset + extent.length <= (entry.bytes or 0):
            return entry, path
    where = segment.entry.directory
    raise CorruptStore(
        f"{where}: sample {extent.index} lies in volume {extent.volume} at {extent.offset:,} with "
        f"{extent.length:,} bytes, which leaves the volumes.",
        path=where, next_step="The directory belongs to other volumes: pack or index again.",
    )  # fmt: skip


@contextmanager
def _open_tree_file(
    segment: OpenSegment, extent: Extent, path: str, failure: Callable[..., HeadraceError]
) -> Iterator[int]:
    """A descriptor of the file, if it is as it was indexed."""
    # A name in a damaged or hostile directory must not lead out of the tree.
    if extent.name.startswith(b"/") or b".." in extent.name.split(b"/") or b"\0" in extent.name:
        where = segment.entry.directory
        raise CorruptStore(
            f"{where}: the name of sample {extent.index}, {os.fsdecode(extent.name)!r}, leads out of "
            "the indexed folder.", path=where, next_step="Index the source again.",
        )  # fmt: skip
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise failure("changed", "no file", "the indexed file") from None
    try:
        status = os.fstat(fd)
        now = expected = ""
        if not stat.S_ISREG(status.st_mode):
            now, expected = "no regular file", "one"
        elif status.st_size != extent.length:
            now, expected = f"{status.st_size:,} bytes", f"{extent.length:,} bytes"
        elif extent.mtime_ns not in (None, status.st_mtime_ns):
            now, expected = f"modified at {status.st_mtime_ns} ns", f"{extent.mtime_ns} ns"
        if now:
            raise failure("changed", now, expected)
        yield fd
    finally:
        os.close(fd)
