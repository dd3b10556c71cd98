"""Reads samples with plain `pread`: slow, obvious, and the measure for the native reader.

Also what `verify` and `repair` trust. Every whole extent is checked against its checksum; foreign files
are checked against the recorded size and time before their bytes are believed.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import numpy as np

from headrace.base.checksum import crc32c
from headrace.errors import CorruptStore, HeadraceError
from headrace.store.failures import Failure
from headrace.store.sources.extents import read_fully

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from headrace.store.segment import Extent, OpenSegment


class ReferenceReader:
    """Reads extents of an open store.

    Args:
        segment_of: gives the segment that holds a global index.
        check: compare whole extents with their checksums.
    """

    def __init__(self, segment_of: Callable[[int], OpenSegment], *, check: bool = True) -> None:
        self._segment_of = segment_of
        self._check = check

    def read(self, extent: Extent, start: int = 0, size: int | None = None) -> bytearray:
        """The bytes `start` to `start + size - 1` of one extent, fewer at its end.

        Raises:
            CorruptSample: the bytes differ from the checksum, or end early.
            SourceChanged: a foreign file is not as it was indexed.
            VolumeError: the system refuses the read.
        """
        begin = min(start, extent.length)
        end = extent.length if size is None else min(extent.length, begin + size)
        segment = self._segment_of(extent.index)
        self._check_place(segment, extent)
        data = bytearray(end - begin)
        kind = segment.volumes.entries[extent.volume].kind
        if kind == "tree":
            count = self._read_tree_file(segment, extent, memoryview(data), begin)
        else:
            count = self._read_volume(segment, extent, memoryview(data), begin)
        if count < len(data):
            raise self._failure(segment, extent, "short", str(count), str(len(data)))
        if self._check and extent.crc is not None and end - begin == extent.length:
            found = crc32c(data)
            if found != extent.crc:
                raise self._failure(
                    segment, extent, "checksum", f"{found:08x}", f"{extent.crc:08x}"
                )
        return data

    def read_batch(
        self, indices: Iterable[int]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Many samples' extents back to back.

        Returns:
            data (bytes,) uint8; offsets (extents+1,) int64 into it; the sample of each extent
            (extents,) int64.
        """
        pieces: list[bytearray] = []
        owners: list[int] = []
        for index in indices:
            for extent in self._segment_of(index).extents(index):
                pieces.append(self.read(extent))
                owners.append(index)
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(p) for p in pieces], out=offsets[1:])
        data = np.frombuffer(b"".join(pieces), np.uint8)
        return data, offsets, np.array(owners, np.int64)

    @staticmethod
    def _check_place(segment: OpenSegment, extent: Extent) -> None:
        """The extent lies within its volume, before memory is allocated for it."""
        entries = segment.volumes.entries
        good = extent.volume < len(entries) and extent.length >= 0 and extent.offset >= 0
        if good and entries[extent.volume].kind != "tree":
            good = extent.offset + extent.length <= (entries[extent.volume].bytes or 0)
        if not good:
            raise CorruptStore(
                f"{segment.entry.directory}: sample {extent.index} lies in volume {extent.volume} at "
                f"{extent.offset:,} with {extent.length:,} bytes, which leaves the volumes.",
                path=segment.entry.directory,
                next_step="The directory belongs to other volumes: pack or index again.",
            )

    def _read_volume(
        self, segment: OpenSegment, extent: Extent, view: memoryview, start: int
    ) -> int:
        try:
            return segment.volumes.read_into(extent.volume, view, extent.offset + start)
        except OSError as e:
            if isinstance(e, HeadraceError):
                raise
            raise self._failure(segment, extent, "system", code=e.errno or 0) from e

    def _read_tree_file(
        self, segment: OpenSegment, extent: Extent, view: memoryview, start: int
    ) -> int:
        self._check_below(segment, extent)
        try:
            fd = os.open(self._path(segment, extent), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise self._failure(segment, extent, "changed", "no file", "the indexed file") from None
        except OSError as e:
            raise self._failure(segment, extent, "system", code=e.errno or 0) from e
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._failure(segment, extent, "changed", "no regular file", "one")
            if status.st_size != extent.length:
                raise self._failure(
                    segment,
                    extent,
                    "changed",
                    f"{status.st_size:,} bytes",
                    f"{extent.length:,} bytes",
                )
            if extent.mtime_ns is not None and status.st_mtime_ns != extent.mtime_ns:
                raise self._failure(
                    segment, extent, "changed", f"modified at {status.st_mtime_ns} ns",
                    f"{extent.mtime_ns} ns",
                )  # fmt: skip
            return read_fully(fd, view, start)
        except OSError as e:
            if isinstance(e, HeadraceError):
                raise
            raise self._failure(segment, extent, "system", code=e.errno or 0) from e
        finally:
            os.close(fd)

    def _check_below(self, segment: OpenSegment, extent: Extent) -> None:
        """A name in a damaged or hostile directory must not lead out of the tree."""
        if extent.name.startswith(b"/") or b".." in extent.name.split(b"/") or b"\0" in extent.name:
            raise CorruptStore(
                f"{segment.entry.directory}: the name of sample {extent.index}, "
                f"{os.fsdecode(extent.name)!r}, leads out of the indexed folder.",
                path=segment.entry.directory,
                next_step="Index the source again.",
            )

    @staticmethod
    def _path(segment: OpenSegment, extent: Extent) -> str:
        path = segment.volumes.paths[extent.volume]
        if segment.volumes.entries[extent.volume].kind != "tree":
            return path
        return os.path.join(path, os.fsdecode(extent.name))

    def _failure(
        self,
        segment: OpenSegment,
        extent: Extent,
        kind: str,
        found: str = "",
        expected: str = "",
        *,
        code: int = 0,
    ) -> HeadraceError:
        return Failure(
            kind,
            extent.index,
            extent.name,
            self._path(segment, extent),
            extent.offset,
            found,
            expected,
            code,
            segment.volumes.entries[extent.volume].kind != "packed",
        ).to_error()
