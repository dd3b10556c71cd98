"""Tail: the segment of a cache that is being written and that nobody else sees yet.

Samples are appended to one volume, in the order in which they come, in a folder of its own. The
folder is locked, so that the next process can tell a tail that is being written from one whose
writer was killed. `finish` makes a segment of it, which `cache` then publishes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.base.files import create_file, lock, lock_path, make_folder, open_folder
from headrace.store.directory import DirectoryColumns, write_all, write_directory
from headrace.store.format import DATA_OFFSET, VolumeHeader, padded_size, volume_uuid
from headrace.store.manifest import Segment, VolumeEntry
from headrace.store.names import join_names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Protocol

    from numpy.typing import NDArray

    class Described(Protocol):
        """What a tail copies from its data set beside the bytes."""

        @property
        def names(self) -> Sequence[str]:
            """The samples' names."""

        @property
        def classes(self) -> list[str] | None:
            """The names of labels."""


__all__ = ["INDEX_COLUMN", "Tail", "remove_stale_tails"]

INDEX_COLUMN = "headrace.source_index"
"""The column that says which sample of the data set a cached one is."""

DIRECTORY_BYTES = 128
"""What a directory needs for a sample, its name included, generously."""

_PREFIX = "tail-"
_numbers = itertools.count()


class Tail:
    """A segment being written.

    Args:
        cache: the cache's folder.
        capacity: bytes of samples that it may take.
        part_names: the parts of its samples.
        direct: write past the page cache, see `policy.writes_direct`.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """

    def __init__(
        self, cache: Path, capacity: int, part_names: Sequence[str], *, direct: bool = False
    ) -> None:
        self.path = cache / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self.capacity = capacity
        self.bytes = 0
        self.samples = 0
        self._part_names = tuple(os.fsencode(name) for name in part_names)
        self._indices: list[NDArray[np.int64]] = []
        self._labels: list[NDArray[np.int64]] = []
        self._lengths: list[NDArray[np.int64]] = []
        self._checksums: list[NDArray[np.uint32]] = []
        self._fd = -1
        self._direct: _native.DirectWriter | None = None
        make_folder(self.path)
        self._lock = open_folder(self.path)
        try:
            lock(self._lock)
            self._fd = create_file(self._volume)
            # Counts against the quota from now on; takes no room on the disk yet.
            os.ftruncate(self._fd, DATA_OFFSET + capacity)
            self._direct = _direct_writer(self._fd) if direct else None
        except BaseException:
            self.remove()
            raise

    @property
    def _volume(self) -> Path:
        return self.path / "volume.hrv"

    @property
    def room(self) -> int:
        """Bytes that it still takes: of samples, and of what the directory says of each."""
        return self.capacity - self.bytes - DIRECTORY_BYTES * self.samples

    @property
    def indices(self) -> NDArray[np.int64]:
        """int64, shape (samples,): which they are."""
        return np.concatenate([np.empty(0, np.int64), *self._indices])

    def append(self, batch: _native.Batch, positions: NDArray[np.int64]) -> None:
        """Append the samples at these positions of a batch.

        Raises:
            VolumeError: the disk is full or refuses the data; nothing counts as appended.
        """
        if self._direct is not None:
            checksums = self._direct.append(batch, positions)
        else:
            checksums = _native.write_samples(self._fd, DATA_OFFSET + self.bytes, batch, positions)
        lengths = batch.lengths.reshape(batch.samples, batch.parts)[positions].reshape(-1)
        self._indices.append(batch.indices[positions])
        self._labels.append(batch.labels[positions])
        self._lengths.append(lengths)
        self._checksums.append(checksums)
        self.bytes += int(lengths.sum())
        self.samples += len(positions)

    def finish(self, source: Described, keep: NDArray[np.bool_]) -> Segment:
        """Make a segment of the samples where `keep` ((samples,) bool) is true.

        Its files lie in the tail's folder, under the names that they will have.

        Nothing is synced: a process that is killed loses nothing that it wrote, and what a power cut
        takes fails its checksum or its size, and is read from the source again. Syncing would make
        reading wait for the disk: epoch one fell to half of its speed.
        """
        self._direct = None  # nothing is appended any more
        os.ftruncate(self._fd, padded_size(DATA_OFFSET + self.bytes))
        columns = self._columns(source, keep)
        directory = self.path / "directory.hrd"
        fd = create_file(directory)
        try:
            header = write_directory(columns, fd)
        finally:
            os.close(fd)
        uuid = volume_uuid(header.uuid, 0)
        write_all(self._fd, VolumeHeader(uuid, header.uuid, 0).to_page(), 0)
        stem = f"segment-{header.uuid.hex()}"
        directory.rename(self.path / f"{stem}.hrd")
        self._volume.rename(self.path / f"{stem}.hrv")
        size = os.fstat(self._fd).st_size
        return Segment(
            directory=f"{stem}.hrd", directory_bytes=header.file_bytes, uuid=header.uuid.hex(),
            samples=header.samples, extents=header.extents,
            volumes=(VolumeEntry("packed", f"{stem}.hrv", size, uuid=uuid.hex()),),
            source={"kind": "cache"},
        )  # fmt: skip

    def move_to(self, cache: Path, segment: Segment) -> None:
        """Put the files of a finished segment where the manifest will name them."""
        for name in (segment.directory, segment.volumes[0].path):
            (self.path / name).rename(cache / name)

    def remove(self) -> None:
        """Remove the folder and let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._direct = None
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def _columns(self, source: Described, keep: NDArray[np.bool_]) -> DirectoryColumns:
        parts = len(self._part_names)
        lengths = np.concatenate(self._lengths)
        starts = DATA_OFFSET + np.cumsum(lengths) - lengths
        slots = np.repeat(keep, parts)
        indices = self.indices[keep]
        names, name_offsets = join_names(_names_of(source, indices))
        classes = source.classes
        n = len(indices)
        several = parts > 1
        return DirectoryColumns(
            names, name_offsets,
            volume=np.zeros(n * parts, np.uint32),
            offset=starts[slots].astype(np.uint64),
            length=lengths[slots].astype(np.uint64),
            crc=np.concatenate(self._checksums)[slots],
            first_extent=np.arange(0, (n + 1) * parts, parts, dtype=np.uint64) if several else None,
            part=np.tile(np.arange(parts, dtype=np.uint16), n) if several else None,
            part_names=self._part_names,
            labels=np.concatenate(self._labels)[keep],
            class_names=tuple(map(os.fsencode, classes)) if classes else None,
            columns={INDEX_COLUMN: indices},
        )  # fmt: skip


def _direct_writer(fd: int) -> _native.DirectWriter | None:
    """Another descriptor of the same file, with direct writes; None where that cannot be had."""
    try:
        return _native.DirectWriter(f"/proc/self/fd/{fd}", DATA_OFFSET)
    except OSError:
        return None


def _names_of(source: Described, indices: NDArray[np.int64]) -> list[bytes]:
    many: Any = getattr(source.names, "many", None)
    names = many(indices) if many is not None else [source.names[int(i)] for i in indices]
    return [os.fsencode(name) for name in names]


def remove_stale_tails(cache: Path) -> None:
    """Remove what killed writers have left in a cache's folder."""
    for path in cache.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = lock_path(path, make=False, owned=True)
            if fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(fd)
