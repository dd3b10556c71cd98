"""Replica: a copy of another node's share, read from its owner over the fabric and checked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from headrace.base.checksum import crc32c
from headrace.errors import CorruptSample, FabricError
from headrace.fabric.engine import FabricEngine
from headrace.job.engine import connect_options, identity_of
from headrace.job.local_file import LocalFile
from headrace.store.directory import write_all
from headrace.store.segment import directory_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.job.document import Place
    from headrace.store.manifest import Segment

__all__ = ["copy_share"]

_READ_BYTES = 1 << 20
_ROUND_READS = 16
_DEADLINE_S = 120.0
_SAMPLES = 4096


def copy_share(
    session: str,
    place: Place,
    entry: Segment,
    local: str,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[LocalFile, LocalFile] | None:
    """Copies a staged share.

    Args:
        session: of the job.
        place: the owner's.
        entry: of the share.
        local: the folder for the copies.
        go_on: asked between reads; False stops.

    Returns:
        The directory and the volume; None if it was stopped.

    Raises:
        FabricError: the owner does not answer any more.
        CorruptSample: what came is not what the directory says.
    """
    with FabricEngine(identity_of(session), connect_options()) as fabric:
        made: list[LocalFile] = []
        try:
            for url, size in (
                (place.directory, entry.directory_bytes),
                (place.volumes[0], int(entry.volumes[0].bytes or 0)),
            ):
                fabric.open(url)
                made.append(LocalFile(local, size))
                if not _copy(fabric, url, size, made[-1].fd, go_on):
                    for file in made:
                        file.close()
                    return None
            _check(made[0], made[1])
        except BaseException:
            for file in made:
                file.close()
            raise
    return made[0], made[1]


def _copy(fabric: FabricEngine, url: str, size: int, fd: int, go_on: Callable[[], bool]) -> bool:
    data = np.empty(min(size, _READ_BYTES * _ROUND_READS), np.uint8)
    for start in range(0, size, len(data) or 1):
        if not go_on():
            return False
        stop = min(start + len(data), size)
        offsets = np.arange(start, stop, _READ_BYTES, dtype=np.int64)
        lengths = np.minimum(_READ_BYTES, stop - offsets)
        got = fabric.read_many(url, offsets, lengths, data[: stop - start], _DEADLINE_S)
        if not np.array_equal(got, lengths):
            code = -int(got.min()) if int(got.min()) < 0 else 0
            raise FabricError(
                f"{url}: the share cannot be copied: {os.strerror(code) if code else 'it is shorter'}."
            )
        write_all(fd, data[: stop - start], start)
    return True


def _check(directory_file: LocalFile, volume: LocalFile) -> None:
    """Compares every sample with its checksum: a copy must not be trusted less than its owner."""
    directory = directory_class().from_fd(directory_file.fd, directory_file.path)
    if not directory.has_crc:
        return
    for start in range(0, directory.samples, _SAMPLES):
        stop = min(start + _SAMPLES, directory.samples)
        found = directory.extents_of(np.arange(start, stop, dtype=np.int64))
        for sample, offset, length, crc in zip(
            found["sample"].tolist(), found["offset"].tolist(), found["length"].tolist(),
            found["crc"].tolist(), strict=True,
        ):  # fmt: skip
            value = crc32c(os.pread(volume.fd, length, offset)) if length else 0
            if value != crc:
                raise CorruptSample(
                    f"{volume.path}: sample {sample} of the copy has the checksum {value:08x}, "
                    f"expected {crc:08x}.",
                    path=volume.path,
                    offset_bytes=offset,
                    next_step="The network or a disk flips bits: look at both nodes.",
                )
