"""JobVolumes: the volume of one share, wherever it is read: this node's disk, or the job's engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, JobError
from headrace.job.engine import volume_name
from headrace.store.segment import Volumes
from headrace.store.sources.extents import read_fully

if TYPE_CHECKING:
    from headrace.job.engine import JobEngine
    from headrace.store.manifest import Segment

__all__ = ["JobVolumes"]


class JobVolumes(Volumes):
    """The volume of one segment of a job.

    Which bytes stand there is sure without a look at its header page: the target's name has the job's
    session in it, and the directory has a checksum of every sample once the share is staged.

    Args:
        session: of the job.
        number: of the segment.
        entry: its manifest entry.
        engine: reads it.
        local: a descriptor of the whole volume on this node, which the volumes then own; or None.
    """

    def __init__(
        self, session: str, number: int, entry: Segment, engine: JobEngine, local: int | None = None
    ) -> None:
        super().__init__("", entry)
        self.paths = [volume_name(session, number)]
        self.engine = engine
        if local is not None:
            self._fds[0] = local

    @property
    def local(self) -> bool:
        """Whether it is read from this node's disk."""
        return 0 in self._fds

    def problems(self) -> list[HeadraceError]:
        """None that could be seen without reading."""
        return []

    def check(self, number: int) -> None:
        """Nothing to look at, as above."""

    def read_into(self, number: int, view: memoryview, offset: int) -> int:
        """As `Volumes.read_into`."""
        if self.local:
            return read_fully(self._fds[0], view, offset)
        return self.engine.fetch(self.paths[number], offset, view)

    read_unchecked = read_into

    def borrow(self, number: int) -> tuple[int, bool]:
        """The descriptor of a local volume.

        Raises:
            JobError: it is read over the fabric and has none.
        """
        if self.local:
            return self._fds[number], False
        raise JobError(f"{self.paths[number]} is read over the fabric and has no descriptor.")

    def native(self) -> list[tuple[str, bytes, int, int]]:
        """As `headrace._native.Catalog` wants them."""
        nbytes = self.entries[0].bytes or 0
        if self.local:
            # By descriptor: the file may have no name, or lose it while we read.
            return [("file", b"/proc/self/fd/%d" % self._fds[0], nbytes, -1)]
        return [("remote", os.fsencode(self.paths[0]), nbytes, -1)]
