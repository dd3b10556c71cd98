"""What one node exports: its share's directory and volume, and checked copies of a neighbour's share."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

import numpy as np

from headrace.base.checksum import crc32c
from headrace.closing import Closing
from headrace.errors import CorruptSample
from headrace.fabric.engine import FabricEngine
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target, TargetOptions
from headrace.job.engine import connect_options, copy_namespace, identity_of
from headrace.job.local_files import LocalFile
from headrace.store.segment import directory_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.job.meeting import SharePlace
    from headrace.store.manifest import Segment

_ASSOCIATIONS_MAX = 4096
"""Each process of each node has one with every target."""


class NodeExports(Closing):
    """A target with one subsystem, for this session's hosts only.

    Raises:
        FabricError: the address cannot be listened on.
    """

    def __init__(self, session: str, node: int, host: str, port: int = 0) -> None:
        # A server that is started again is another subsystem: nobody must take its files for the old.
        self.nqn = f"nqn.2026-11.io.headrace:job:{session}:node-{node}:{secrets.token_hex(4)}"
        self.subsystem = Subsystem(self.nqn, hosts=[identity_of(session).nqn])
        self.target = Target(
            [self.subsystem], (host, port), TargetOptions(associations_max=_ASSOCIATIONS_MAX)
        )

    @property
    def address(self) -> str:
        """`host:port` as URLs have it."""
        host, port = self.target.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def add(self, file: LocalFile, written: int | None = None) -> tuple[int, str]:
        """Exports a file; only its first `written` bytes if given. Returns its NSID and URL."""
        namespace = self.subsystem.add(file.path)
        if written is not None:
            self.subsystem.exports.set_written(namespace.nsid, written)
        return namespace.nsid, f"nvme+tcp://{self.address}/{self.nqn}?ns={namespace.nsid}"

    def set_written(self, nsid: int, nbytes: int) -> None:
        """Moves a namespace's mark."""
        self.subsystem.exports.set_written(nsid, nbytes)

    def close(self) -> None:
        """Serves no longer."""
        self.target.close()
        self.subsystem.close()


_SAMPLES = 4096


def copy_share(
    session: str,
    place: SharePlace,
    entry: Segment,
    local: str,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[LocalFile, LocalFile] | None:
    """Copies a staged share from its owner: the directory and the volume; None if `go_on` says stop.

    Raises:
        FabricError: the owner does not answer any more.
        CorruptSample: what came is not what the directory says.
    """
    urls = (place.directory, place.volumes[0])
    sizes = (entry.directory_bytes, int(entry.volumes[0].bytes or 0))
    files: list[LocalFile] = []
    with (
        FabricEngine(identity_of(session), connect_options()) as fabric,
        contextlib.ExitStack() as undo,
    ):
        for url, size in zip(urls, sizes, strict=True):
            files.append(undo.enter_context(LocalFile(local, size)))
            what = "the share cannot be copied"
            if not copy_namespace(fabric, url, size, files[-1].fd, what=what, go_on=go_on):
                return None
        _check(files[0], files[1])
        undo.pop_all()
    return files[0], files[1]


def _check(directory_file: LocalFile, volume: LocalFile) -> None:
    """Compares every sample with its checksum: a copy must not be trusted less than its owner."""
    directory = directory_class().from_fd(directory_file.fd, directory_file.path)
    if not directory.has_crc:
        return
    for start in range(0, directory.samples, _SAMPLES):
        stop = min(start + _SAMPLES, directory.samples)
        extents = directory.extents_of(np.arange(start, stop, dtype=np.int64))
        for sample, offset, length, crc in zip(
            extents["sample"].tolist(), extents["offset"].tolist(), extents["length"].tolist(),
            extents["crc"].tolist(), strict=True,
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
