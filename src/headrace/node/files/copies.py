"""Copies: where the copies of one root's files are, for all runs together, and which of them stay.

A copy is kept rather than churned: each file is opened once an epoch, so that a cache that goes by the
last use would only add reads. Only where the order of coming opens is known and there is no room do files
that were opened already give way to the next ones (Belady's rule: whoever is needed last goes first).

Boards say to programs where copies are. A copy is taken off all boards before it goes.

A copy in memory is one sealed memfd. It takes whole pages, and about a kilobyte of the kernel's memory: both
count. Making, filling and sealing one takes 9 us for a tiny file and 60 us for 110 kB, most of it the first
touch of fresh pages.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headrace.base.files import write_all
from headrace.errors import HeadraceError
from headrace.machine.host import raise_descriptor_limit

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    Bytes = bytes | memoryview | mmap.mmap | NDArray[np.uint8]  # of a file
    from headrace.node.files.disk_copies import DiskCopies, DiskCopy
    from headrace.node.files.run import ProgramRun

PAGE = 4096
OVERHEAD_BYTES = 2048  # of the kernel's memory for inode, file and descriptor
DESCRIPTORS_KEPT = 1024  # for clients, reads and everything else
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def copy_bytes(size: int) -> int:
    """Memory that a copy of so many bytes takes."""
    return -(-size // PAGE) * PAGE + OVERHEAD_BYTES


def sealed_copy(size: int, fill: Callable[[int], None]) -> int:
    """A memfd of so many bytes, filled and sealed: nobody can change it any more, not even we.

    Raises:
        OSError: no descriptors, or no memory; or what `fill` raises.
    """
    fd = os.memfd_create("headrace-file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fill(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class DescriptorBudget:
    """How many descriptors copies may take, of all roots together. Thread-safe.

    Without a limit as many as the process may have, less what else it needs; the soft limit is raised.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = max(0, raise_descriptor_limit() - DESCRIPTORS_KEPT) if limit is None else limit
        self.taken = 0
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one; False: there is none."""
        with self._lock:
            if self.taken >= self.limit:
                return False
            self.taken += 1
            return True

    def give_back(self) -> None:
        """One was closed."""
        with self._lock:
            self.taken -= 1


TIERS: tuple[str, ...] = ("ram", "disk", "ahead", "source")
"""Where an open was served from; `ahead`: from the source, after it was read into the page cache."""

ERRORS_MAX = 16


@dataclass(slots=True)
class _Failures:
    failures: int = 0
    errors: list[str] = field(default_factory=list)  # the first ones

    def failed(self, error: object) -> None:
        """Count an error, and keep the first ones."""
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(str(error))
        self.failures += 1  # last: who sees a failure counted sees what it was


@dataclass(slots=True)
class AheadFigures(_Failures):
    """Of reading ahead into the page cache."""

    read_files: int = 0
    read_bytes: int = 0
    hot_files: int = 0  # files that were in memory already, or taken to be
    wasted_files: int = 0
    wasted_bytes: int = 0


@dataclass(slots=True)
class CopyFigures(_Failures):
    """Of the copies of one root's files, all runs together."""

    source_files: int = 0
    source_bytes: int = 0  # read from the source, each to be placed
    reused_files: int = 0
    reused_bytes: int = 0  # copies of an earlier daemon that were checked, and taken over
    damaged_files: int = 0  # copies whose bytes were not what they had been
    evicted_files: int = 0
    evicted_bytes: int = 0  # made room for files that come sooner
    given_back_files: int = 0  # given back because memory was short
    withdrawn_files: int = 0  # because the original was written to or changed
    wasted_files: int = 0
    wasted_bytes: int = 0  # of those that went: never opened


class OpenFigures:
    """Of one run's opens.

    Attributes:
        files, bytes: by tier.
        others: `written`, `unknown`, `refused`, and `hostile`: reports that no program of ours writes.
    """

    def __init__(self) -> None:
        self.files = Counter(dict.fromkeys(TIERS, 0))
        self.bytes = Counter(dict.fromkeys(TIERS, 0))
        self.others = Counter(dict.fromkeys(("written", "unknown", "refused", "hostile"), 0))

    def add(self, earlier: OpenFigures) -> None:
        """Go on from the figures of the same program's board before."""
        self.files.update(earlier.files)
        self.bytes.update(earlier.bytes)
        self.others.update(earlier.others)

    def describe(self) -> dict[str, Any]:
        """For reports."""
        return {"opens": dict(self.files), "bytes": dict(self.bytes), **self.others}


Tier = Literal["ram", "disk"]

EVICT_SHARE = 64  # of the quota, is made free at a time by files that are needed very late
ORDER_SOON = 4096  # a file that another run opens within so many opens is not evicted


@dataclass(slots=True, eq=False)
class Copy:
    """One file's copy. `row` is what the original was: its `IDENTITY`."""

    path: bytes
    row: tuple[int, ...]
    tier: Tier
    cost_bytes: int
    fd: int = -1
    on_disk: DiskCopy | None = None
    used: bool = False


class Copies:
    """The copies of one root. Thread-safe."""

    def __init__(self, descriptors: DescriptorBudget, disk: DiskCopies | None = None) -> None:
        self._descriptors = descriptors
        self.disk = disk  # the local disk tier; None: there is none, or it is closed
        self._views: list[ProgramRun] = []
        self.by_path: dict[bytes, Copy] = {}  # the copies, by the path of the original
        self._reserved: dict[bytes, tuple[Tier, int]] = {}
        self._lock = threading.RLock()
        self._disk_reserved = 0
        self.disk_stopped = ""
        self.quota_bytes = 0
        self.held_bytes = 0  # memory that they take, with those that are being read
        self.disk_bytes = 0
        self.spoiled: set[bytes] = set()  # files that were changed, until there is a newer board
        self.figures = CopyFigures()

    def __len__(self) -> int:
        return len(self.by_path)

    # -- runs -------------------------------------------------------------------------------------

    def attach(self, view: ProgramRun) -> None:
        """Put all copies on a run's board; those of files that have changed go."""
        with self._lock:
            for path, copy in list(self.by_path.items()):
                file = view.find(path)
                if file < 0:
                    continue
                if view.identity(file) != copy.row:
                    self._drop(copy)
                    self.figures.withdrawn_files += 1
                else:
                    self._show(view, file, copy)
            self.spoiled.clear()
            self._views.append(view)

    def detach(self, view: ProgramRun) -> None:
        """A run is over; its board is not touched any more."""
        with self._lock:
            if view not in self._views:
                return
            self._views.remove(view)
            for copy in self.by_path.values():
                file = view.find(copy.path)
                if file >= 0 and view.hide(file):
                    copy.used = True

    # -- what is there ----------------------------------------------------------------------------

    def wanted(self, path: bytes) -> bool:
        """Whether a file has no copy, is not being read, and may be."""
        return path not in self.by_path and path not in self._reserved and path not in self.spoiled

    # -- placing ----------------------------------------------------------------------------------

    def reserve(
        self, path: bytes, size: int, soon: tuple[ProgramRun, int] | None = None
    ) -> Tier | None:
        """Take room for a file that will be read: memory first, then disk; None: there is none.

        With `soon`, a run that opens this file of its soon, what that run needs later makes room.
        """
        cost = copy_bytes(size)
        with self._lock:
            if not self.wanted(path):
                return None
            tier: Tier = "ram"
            if not self._take_memory(cost):
                disk = None if self.disk_stopped else self.disk
                if disk is not None and disk.room() - self._disk_reserved >= size:
                    self._disk_reserved += size
                    tier, cost = "disk", size
                else:
                    if soon is None or cost > self.quota_bytes:
                        return None
                    self._evict(cost, *soon)
                    if not self._take_memory(cost):
                        return None
            self._reserved[path] = (tier, cost)
            return tier

    def reserved(self, path: bytes) -> Tier:
        """Where a file that is being read will go."""
        return self._reserved[path][0]

    def reserve_left(self, path: bytes, row: tuple[int, ...]) -> DiskCopy | None:
        """A copy that an earlier daemon left and that is to be checked; None: there is none."""
        with self._lock:
            left = self.disk.find(path, row) if self.disk is not None else None
            if left is not None:
                self._reserved[path] = ("disk", 0)
            return left

    def _take_memory(self, cost: int) -> bool:
        if self.held_bytes + cost > self.quota_bytes or not self._descriptors.take():
            return False
        self.held_bytes += cost
        return True

    def cancel(self, path: bytes) -> None:
        """The file is not placed: give its room back."""
        with self._lock:
            tier, cost = self._reserved.pop(path)
            if tier == "ram":
                self.held_bytes -= cost
                self._descriptors.give_back()
            else:
                self._disk_reserved -= cost

    def place(self, path: bytes, row: tuple[int, ...], data: Bytes) -> None:
        """Publish a file's bytes in the room that was reserved.

        Raises:
            OSError: no memory, or the disk is full or fails; the room is given back.
        """
        tier, cost = self._reserved[path]
        try:
            if tier == "ram":
                view = memoryview(data).cast("B")  # type: ignore[arg-type]  # buffers all, to 3.12
                fd = sealed_copy(len(view), lambda fd: write_all(fd, view, 0))
                copy = Copy(path, row, "ram", cost, fd)
            else:
                with self._lock:
                    assert self.disk is not None
                    on_disk = self.disk.write(path, row, data)
                copy = Copy(path, row, "disk", on_disk.disk_bytes, on_disk=on_disk)
        except OSError as e:
            self.cancel(path)
            if tier == "disk":
                self.disk_stopped = str(e)
            raise
        self._publish(copy)

    def place_memfd(self, path: bytes, row: tuple[int, ...], fd: int) -> None:
        """Publish a sealed memfd, which becomes ours, in the room that was reserved."""
        self._publish(Copy(path, row, "ram", self._reserved[path][1], fd))

    def place_left(self, path: bytes, row: tuple[int, ...], on_disk: DiskCopy) -> None:
        """Publish a copy of an earlier daemon, which was checked."""
        on_disk.checked = True
        self.figures.reused_files += 1
        self.figures.reused_bytes += on_disk.size
        self._publish(Copy(path, row, "disk", on_disk.disk_bytes, on_disk=on_disk))

    def _publish(self, copy: Copy) -> None:
        with self._lock:
            tier, cost = self._reserved[copy.path]
            if tier == "disk":
                self._disk_reserved -= cost
                self.disk_bytes += copy.cost_bytes
            spoiled = copy.path in self.spoiled  # it was written to while it was read
            for view in () if spoiled else self._views:
                file = view.find(copy.path)
                if file >= 0 and view.identity(file) == copy.row:
                    self._show(view, file, copy)
            # Last: who counts it finds it on the boards.
            self.by_path[copy.path] = copy
            del self._reserved[copy.path]
            if spoiled:
                self._drop(copy)

    def _show(self, view: ProgramRun, file: int, copy: Copy) -> None:
        try:
            if copy.on_disk is None:
                view.show(file, "ram", copy.fd)
            elif self.disk is not None:
                view.show(file, "disk", self.disk.path_of(copy.on_disk))
        except (HeadraceError, OSError, ValueError) as e:
            self.figures.failed(f"{os.fsdecode(copy.path)}: its copy cannot be shown: {e}")

    # -- letting go -------------------------------------------------------------------------------

    def damaged(self, path: bytes) -> None:
        """A copy that was left is not what it was; it is removed."""
        with self._lock:
            self.figures.damaged_files += 1
            self.cancel(path)
            if self.disk is not None:
                self.disk.remove(path)

    def withdraw(self, path: bytes) -> None:
        """The original is written to, or has changed: no copy until there is a newer board."""
        with self._lock:
            self.spoiled.add(path)
            copy = self.by_path.get(path)
            if copy is not None:
                self._drop(copy)
                self.figures.withdrawn_files += 1

    def set_quota(self, quota_bytes: int) -> None:
        """Hold at most so much in memory from now on."""
        with self._lock:
            self.quota_bytes = quota_bytes
            if self.held_bytes <= quota_bytes:
                return
            for view in self._views:
                self._evict(0, view, -1)
            for copy in reversed(list(self.by_path.values())):
                if self.held_bytes <= quota_bytes:
                    return
                if copy.tier == "ram":
                    self._drop(copy)
                    self.figures.given_back_files += 1

    def _evict(self, cost: int, view: ProgramRun, file: int) -> None:
        """Let go of what the run needs later than this file (-1: of anything), until `cost` more bytes fit."""
        until = view.until(file) if file >= 0 else 0
        if until is None:
            return
        files, needed = view.needed_last(len(self.by_path) // 4)
        spare = self.quota_bytes // EVICT_SHARE  # so that not each file looks for its own victim
        for other, later in zip(files.tolist(), (needed - until).tolist(), strict=True):
            if later <= 0:
                return
            free = self._descriptors.limit > self._descriptors.taken
            enough = cost + spare if later > len(self.by_path) else cost
            if free and self.held_bytes + enough <= self.quota_bytes:
                return
            copy = self.by_path.get(view.paths[other])
            if copy is None or copy.tier != "ram":
                continue
            others = [v for v in self._views if v is not view and v.find(copy.path) >= 0]
            opens = [v.until(v.find(copy.path)) for v in others]
            if any(until is not None and until < ORDER_SOON for until in opens):
                continue
            self._drop(copy)
            self.figures.evicted_files += 1
            self.figures.evicted_bytes += copy.row[2]

    def let_go(self, view: ProgramRun, files: Sequence[int], more_bytes: int) -> None:
        """A run that has the copies to itself opens none of these files: they go until so much more fits."""
        with self._lock:
            if self._views != [view]:
                return
            for file in files:
                if self.held_bytes + more_bytes <= self.quota_bytes:
                    return
                copy = self.by_path.get(view.paths[file])
                if copy is not None and copy.tier == "ram":
                    self._drop(copy)
                    self.figures.evicted_files += 1
                    self.figures.evicted_bytes += copy.row[2]

    def _drop(self, copy: Copy) -> None:
        for view in self._views:
            file = view.find(copy.path)
            if file >= 0 and view.hide(file):
                copy.used = True
        del self.by_path[copy.path]
        if not copy.used:
            self.figures.wasted_files += 1
            self.figures.wasted_bytes += copy.row[2]
        if copy.tier == "ram":
            os.close(copy.fd)
            self._descriptors.give_back()
            self.held_bytes -= copy.cost_bytes
        else:
            self.disk_bytes -= copy.cost_bytes
            if self.disk is not None:
                self.disk.remove(copy.path)

    def close(self) -> None:
        """Let go of all copies in memory; those on disk stay for the next daemon."""
        with self._lock:
            for copy in list(self.by_path.values()):
                if copy.tier == "ram":
                    self._drop(copy)
            self.by_path.clear()
            if self.disk is not None:
                self.disk.close()
                self.disk = None
