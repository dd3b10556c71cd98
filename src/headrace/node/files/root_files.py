"""RootFiles: the files below one root, for all runs and jobs that open them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.node.files import memory_copy
from headrace.node.files.copies import Copies
from headrace.node.files.far_reader import FarReader
from headrace.node.files.tree import FAR_THREADS, FileTree, Scan, is_far
from headrace.node.quota import Want

if TYPE_CHECKING:
    from headrace import _native
    from headrace.node.files.disk_copies import DiskCopies
    from headrace.node.files.memory_copy import DescriptorBudget

__all__ = ["RootFiles"]


class RootFiles:
    """One root.

    Args:
        path: resolved.
        descriptors: for copies in memory, of all roots.
        disk: the local disk tier; None: there is none.
        model: a simulated storage, which it lies on.
        far: whether copies are worth it; None: where the file system is remote.

    Attributes:
        tree: what the last scan found; None: there was none.
        users: runs that have it open, by job.
        used_s: on the monotonic clock.
    """

    def __init__(
        self,
        path: bytes,
        *,
        descriptors: DescriptorBudget,
        disk: DiskCopies | None = None,
        model: _native.SlowModel | None = None,
        far: bool | None = None,
    ) -> None:
        self.path = path
        self.model = model
        self.far = model is not None or is_far(path) if far is None else far
        self.tree: FileTree | None = None
        self.copies = Copies(descriptors, disk)
        self.reader = FarReader(path, self.copies, model)
        self._counted: FileTree | None = None
        self._needed_bytes = 0
        self.users: dict[str, int] = {}
        self.used_s = time.monotonic()

    def scan(self) -> Scan:
        """A scan that has not begun."""
        return Scan(self.path, threads=FAR_THREADS if self.far else 1, model=self.model)

    def enter(self, job: str) -> None:
        """A run of a job begins."""
        self.users[job] = self.users.get(job, 0) + 1
        self.used_s = time.monotonic()

    def leave(self, job: str) -> None:
        """It has ended."""
        self.used_s = time.monotonic()
        self.users[job] -= 1
        if not self.users[job]:
            del self.users[job]

    # -- a sharer of the daemon's memory ----------------------------------------------------------

    def want(self) -> Want:
        """What memory it could use."""
        if self.tree is not self._counted:
            self._counted = self.tree
            sizes = (
                self.tree.stats[:, 2] if self.far and self.tree is not None else np.zeros(0, int)
            )
            pages = -(-sizes // memory_copy.PAGE) * memory_copy.PAGE
            self._needed_bytes = int(pages.sum()) + memory_copy.OVERHEAD_BYTES * len(sizes)
        return Want(self._needed_bytes, self.copies.held_bytes, frozenset(self.users), self.used_s)

    @property
    def held_bytes(self) -> int:
        """Memory of its copies."""
        return self.copies.held_bytes

    lingering_bytes = 0
    """A copy that is withdrawn while a program has it open is that program's memory."""

    def set_quota(self, quota_bytes: int) -> None:
        """Hold at most so much from now on."""
        if quota_bytes != self.copies.quota_bytes:
            self.copies.set_quota(quota_bytes)

    def describe(self) -> dict[str, Any]:
        """Its state, for reports."""
        copies, figures = self.copies, self.copies.figures
        return {
            "root": self.path.decode(errors="replace"),
            "far": self.far,
            "files": len(self.tree) if self.tree is not None else 0,
            "unread": self.tree.unread if self.tree is not None else 0,
            "errors": [*(self.tree.errors if self.tree is not None else ()), *figures.errors],
            "jobs": sorted(self.users),
            "copies": len(copies),
            "quota_bytes": copies.quota_bytes,
            "held_bytes": copies.held_bytes,
            "disk_bytes": copies.disk_bytes,
            "disk_stopped": copies.disk_stopped,
            "in_flight": self.reader.in_flight,
            **{
                name: getattr(figures, name)
                for name in figures.__slots__
                if name != "errors"
            },
        }  # fmt: skip

    def close(self) -> None:
        """End reads, let go of copies in memory."""
        self.reader.close()
        self.copies.close()
