"""An open segment: its directory (native where this build has it) and its volumes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace import _native
from headrace.base.files import open_file
from headrace.errors import StoreNotFound, VolumeError
from headrace.store.directory_reference import ReferenceDirectory
from headrace.store.format import corrupt
from headrace.store.volumes import Volumes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.store.manifest import Segment
    from headrace.store.opening import RemoteEngine


class Directory(Protocol):
    """What the native directory and the reference have in common."""

    @property
    def samples(self) -> int:
        """Samples in this segment."""
        ...

    @property
    def extents(self) -> int:
        """Extents in this segment."""
        ...

    @property
    def has_crc(self) -> bool:
        """Whether the extents have checksums."""
        ...

    @property
    def uuid(self) -> bytes:
        """The segment's uuid, 16 bytes."""
        ...

    @property
    def part_names(self) -> list[bytes]:
        """The names of the parts."""
        ...

    @property
    def class_names(self) -> list[bytes]:
        """The names of labels 0, 1, ...; empty where labels have none."""
        ...

    @property
    def labels(self) -> NDArray[Any] | None:
        """(n,) signed integers, -1 for none, or None."""
        ...

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The user's columns by name."""
        ...

    def header(self) -> bytes:
        """The header page."""
        ...

    def name(self, index: int, /) -> bytes:
        """The name of a sample."""
        ...

    def names(self, indices: NDArray[np.int64], /) -> list[bytes]:
        """The names of many samples."""
        ...

    def index_at_rank(self, rank: int, /) -> int:
        """The sample at a rank of the sorted name order."""
        ...

    def find_many(self, names: Sequence[str | bytes], /) -> NDArray[np.int64]:
        """(k,) int64 indices, -1 for a name that no sample has."""
        ...

    def children(
        self, prefix: bytes, first: int, limit: int, /
    ) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Entries of a folder from a rank on: names, samples, ranks to go on at, kinds.

        Kinds: 0 a file, 1 a folder (its sample is the first in it), 2 a file whose whole name others
        begin with, so that a folder of the same name may exist.
        """
        ...

    def seek(self, key: bytes, /) -> int:
        """The first rank whose name is not less than `key`; `samples` where all are less."""
        ...

    def lookup(self, path: bytes, /) -> tuple[int, int]:
        """The sample of this name and the first sample below it; -1 for none."""
        ...

    def lengths(self, indices: NDArray[np.int64], part: int, /) -> NDArray[np.int64]:
        """The length of a part of each sample in bytes, (k,) int64; -1 where it has none."""
        ...

    def extents_of(self, indices: NDArray[np.int64], /) -> dict[str, NDArray[np.int64]]:
        """One int64 element per extent, by field."""
        ...

    def verify(self) -> list[int]:
        """File offsets of the damaged blocks."""
        ...


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
    """One segment of an open store.

    Attributes:
        entry: its manifest entry.
        base: global index of its first sample.
        directory: its sample directory.
        volumes: its volumes.
    """

    entry: Segment
    base: int
    directory: Directory
    volumes: Volumes

    def extents(self, index: int) -> list[Extent]:
        """The extents of the sample with the global index `index`.

        Raises:
            CorruptStore: one is in a volume, or of a part, that the segment has not.
        """
        local = index - self.base
        name = self.directory.name(local)
        found = self.directory.extents_of(np.array([local], np.int64))
        self._check(found)
        out = []
        for k in range(len(found["length"])):
            mtime = int(found["mtime_ns"][k])
            out.append(
                Extent(
                    index,
                    name,
                    int(found["part"][k]),
                    int(found["volume"][k]),
                    int(found["offset"][k]),
                    int(found["length"][k]),
                    int(found["crc"][k]) if self.directory.has_crc else None,
                    None if mtime == -1 else mtime,
                )
            )
        return out

    def _check(self, extents: dict[str, NDArray[np.int64]]) -> None:
        for what, count in (
            ("volume", len(self.entry.volumes)),
            ("part", len(self.directory.part_names)),
        ):
            # A number above 2^63 is negative here.
            bad = extents[what][(extents[what] < 0) | (extents[what] >= count)]
            if len(bad):
                raise corrupt(
                    self.entry.directory, f"{what} of an extent", found=int(bad[0]) % (1 << 64),
                    expected=f"below {count}",
                )  # fmt: skip


def directory_class(*, reference: bool = False) -> Any:
    """The native directory, or the reference where it is asked for."""
    return ReferenceDirectory if reference else _native.Directory


def open_segment(
    folder: str,
    entry: Segment,
    base: int,
    *,
    reference: bool = False,
    engine: RemoteEngine | None = None,
) -> OpenSegment:
    """Opens a segment's directory and checks it against the manifest.

    Raises:
        CorruptStore: it is damaged, or not the one that the manifest means.
    """
    path = os.path.join(folder, entry.directory)
    directory = open_directory(path, entry, reference=reference)
    return OpenSegment(entry, base, directory, open_volumes(folder, entry, engine))


def open_directory(path: str, entry: Segment, *, reference: bool = False) -> Directory:
    """Opens the directory of a segment, a file that others may have made; errors as for `open_segment`."""
    try:
        fd = open_file(path)
    except FileNotFoundError:
        raise StoreNotFound(
            f"{path}: the sample directory is missing.",
            path=path,
            next_step="Restore the file from a copy, or pack or index the source again.",
        ) from None
    except OSError as e:
        if isinstance(e, VolumeError):
            raise
        raise VolumeError(
            f"{path}: cannot be opened: {e.strerror}.", path=path, errno=e.errno,
            next_step="Check the file's permissions and the disk.",
        ) from e  # fmt: skip
    try:
        size = os.fstat(fd).st_size
        if size != entry.directory_bytes:
            raise corrupt(
                path, "file size in bytes", found=f"{size:,}", expected=f"{entry.directory_bytes:,}"
            )
        directory: Directory = directory_class(reference=reference).from_fd(fd, path)
    finally:
        os.close(fd)
    check_directory(directory, entry, path)
    return directory


def open_volumes(folder: str, entry: Segment, engine: RemoteEngine | None) -> Volumes:
    """The volumes of a segment whose manifest is local; `engine` reads those that are objects."""
    if engine is None or not any(v.kind == "object" for v in entry.volumes):
        return Volumes(folder, entry)
    from headrace.store.remote_volumes import RemoteVolumes

    return RemoteVolumes(folder, entry, engine, remote=False)


def check_directory(directory: Directory, entry: Segment, path: str) -> None:
    """Checks that a directory is the one that the manifest means.

    Raises:
        CorruptStore: it is another one.
    """
    for what, found, expected in (
        ("uuid", directory.uuid.hex(), entry.uuid),
        ("number of samples", directory.samples, entry.samples),
        ("number of extents", directory.extents, entry.extents),
    ):
        if found != expected:
            raise corrupt(path, what, found=found, expected=f"{expected} as the manifest says")
