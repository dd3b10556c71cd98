"""ProgramRun: one unmodified program and its children: its board, its opens, and what is done ahead of them.

A thread takes in the reports of opens, and hands on what comes next: to the page cache where the files
are near, to the copies of their root where they are far. Reports come from memory that every process of
the program can write to: each is checked, and none can do worse than cost a read.

Near files are read into the page cache (`PageCacheAhead`): a copy there would cost memory and processor time
for nothing, since a real open of a file whose pages are there is as fast as any. The kernel is asked for the
pages (`WILLNEED`) and nothing is copied; measured on 110 kB files, that triples what a plain loop reads, where
direct reads into copies did not even double it. While all files that are looked at are in memory anyway, only
a few are looked at.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.machine.host import available_memory
from headrace.node.files.copies import AheadFigures, OpenFigures, copy_bytes
from headrace.node.files.order import Foresight, GivenOrder
from headrace.node.files.root_files import BIG_BYTES
from headrace.node.files.tree import IDENTITY, STAT_COLUMNS, identity
from headrace.store.residency import resident_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.node.files.copies import Tier
    from headrace.node.files.root_files import RootFiles


FILE_BYTES_MAX = 64 << 20  # larger files are left to the kernel's own reading ahead
DOZE_AFTER = 64
"""So many files in a row were in memory already: only each `DOZE_STEP`th is looked at from now on."""

DOZE_STEP = 16

_NEW, _QUEUED, _READING, _AHEAD, _HOT = range(5)


class PageCacheAhead:
    """Reads files of one run ahead; `paths` and `sizes` (int64, bytes) are of all files, by number.

    `threads` files are in work at a time: two keep an NVMe device busy where the inodes are in memory. `idle`
    says whether the program has opened nothing for a while, and the storage is free.
    """

    def __init__(
        self,
        paths: Sequence[bytes],
        sizes: NDArray[np.int64],
        *,
        threads: int = 4,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._paths = paths
        self._sizes = sizes
        self._states = np.zeros(len(paths), np.uint8)
        self._queue: deque[int] = deque()
        self._rest: deque[int] = deque()
        self._idle = idle
        self._wake = threading.Condition()
        self._ended = False
        self._hot_in_a_row = 0
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self.figures = AheadFigures()

    @property
    def bypassed(self) -> bool:
        """Whether all files that were looked at lately were in memory already."""
        return self._hot_in_a_row >= DOZE_AFTER

    def want(self, files: NDArray[np.int64]) -> None:
        """These files are opened next, in this order, after those that were wanted before."""
        new = files[(self._states[files] == _NEW) & (self._sizes[files] <= FILE_BYTES_MAX)]
        if self.bypassed:
            hot = new % DOZE_STEP > 0
            self._states[new[hot]] = _HOT
            with self._wake:  # threads count here too
                self.figures.hot_files += int(hot.sum())
            new = new[~hot]
        if not len(new):
            return
        with self._wake:
            self._states[new] = _QUEUED
            self._queue.extend(new.tolist())
            self._start()
            self._wake.notify_all()

    def want_when_idle(self, files: NDArray[np.int64]) -> None:
        """These may be read while nothing else is to do."""
        with self._wake:
            self._rest = deque(files[self._sizes[files] <= FILE_BYTES_MAX].tolist())
            if self._rest:
                self._start()
            self._wake.notify_all()

    def opened(self, files: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The program has opened these; which of them had been read ahead."""
        with self._wake:
            ahead: NDArray[np.bool_] = self._states[files] == _AHEAD
            self._states[files] = _NEW
        return ahead

    def forget(self) -> None:
        """The program does not keep to the order: what was read ahead may be for nothing."""
        with self._wake:
            self._states[list(self._queue)] = _NEW
            self._queue.clear()
            ahead = np.flatnonzero(self._states == _AHEAD)
            self.figures.wasted_files += len(ahead)
            self.figures.wasted_bytes += int(self._sizes[ahead].sum())
            self._states[ahead] = _NEW

    def close(self) -> None:
        """End the threads; a look that the storage never answers is left behind."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(1.0)

    def _start(self) -> None:
        while len(self._threads) < self._threads_max and not self._ended:
            thread = threading.Thread(target=self._work, name="headrace-node-ahead", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._ended:
                    if self._rest and self._idle():
                        file = self._rest.popleft()
                        if self._states[file] == _NEW:
                            self._states[file] = _QUEUED
                            self._queue.append(file)
                        continue
                    self._wake.wait(IDLE_S if self._rest else None)
                if self._ended:
                    return
                file = self._queue.popleft()
                wanted = self._states[file] == _QUEUED  # and not opened meanwhile
                if wanted:
                    self._states[file] = _READING
            if wanted:
                self._read(file)

    def _read(self, file: int) -> None:
        try:
            hot = read_into_page_cache(self._paths[file])
        except OSError as e:  # the program will meet it too, and say so
            with self._wake:
                self.figures.failed(e)
            return
        with self._wake:
            if self._states[file] == _READING:  # and not opened meanwhile
                self._states[file] = _HOT if hot else _AHEAD
            if hot:
                self.figures.hot_files += 1
            else:
                self.figures.read_files += 1
                self.figures.read_bytes += int(self._sizes[file])
            self._hot_in_a_row = self._hot_in_a_row + 1 if hot else 0


def read_into_page_cache(path: bytes) -> bool:
    """Ask for all pages of a file; whether they were there already.

    Raises OSError if it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        size = os.fstat(fd).st_size
        pages = resident_pages(fd, size) if size else 0
        if pages is not None and pages >= -(-size // mmap.PAGESIZE):
            return True
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_WILLNEED)
        return False
    finally:
        os.close(fd)


_log = logging.getLogger("headrace.node")

AHEAD_BYTES = 128 << 20
"""Of files that are read before they are opened: a tenth of a second of an NVMe device."""

AHEAD_SHARE = 4
"""Of memory that holds only a part of the files: the rest of it stays as it is from epoch to epoch."""

AHEAD_FILES_MIN, AHEAD_FILES_MAX = 64, 16384

WAIT_S = 0.25
ACTIVE_S, ACTIVE_WAIT_S = 1.0, 0.005
BATCH_S = 0.002
"""Reports are taken in together: a program that opens a file need not wake this thread each time."""

DOZE_S = 0.02  # the same, while all files are in memory anyway
IDLE_S = 0.05
REST_S = 1.0  # how often it is looked whether the rest of the data set can be read
REST_ANEW = 16
"""So many different files were opened, or twice as many as the last time: that says what the rest is."""

_NONE, _RAM, _DISK = range(3)
_MODE, _MTIME, _ATIME = map(STAT_COLUMNS.index, ("st_mode", "st_mtime_ns", "st_atime_ns"))


class ProgramRun:
    """One run: a program that opens files from `roots`, in whatever way it spells them.

    `spellings` are those, each with its resolved path; `immutable`: nobody changes the files meanwhile.
    """

    def __init__(
        self,
        roots: Sequence[RootFiles],
        spellings: Sequence[tuple[bytes, bytes]],
        *,
        job: str,
        immutable: bool = False,
    ) -> None:
        self.roots = tuple(roots)
        self.job = job  # whose quotas count
        # What is known of the roots now; all files are numbered through.
        self.trees = trees = tuple(root.tree for root in roots if root.tree is not None)
        assert len(trees) == len(self.roots)
        self.paths = [path for tree in trees for path in tree.paths]
        empty = np.empty((0, len(STAT_COLUMNS)), np.int64)
        self.stats = np.concatenate([empty, *(tree.stats for tree in trees)])
        ends = np.cumsum([len(tree) for tree in trees]).tolist()
        self._ranges = list(zip([0, *ends[:-1]], ends, strict=True))
        self._far = np.zeros(len(self.paths), bool)
        for root, (low, high) in zip(self.roots, self._ranges, strict=True):
            self._far[low:high] = root.far
        disks = [root.copies.disk for root in roots]
        self.board = _native.FileBoard(
            self.paths, np.ascontiguousarray(self.stats[:, :4]),
            np.ascontiguousarray(self.stats[:, 4:]),
            roots=list(spellings), tiers=sorted({disk.path for disk in disks if disk is not None}),
            immutable=immutable,
        )  # fmt: skip
        self.ring = _native.OpenRing()
        self._sizes = np.ascontiguousarray(self.stats[:, 2])
        self._shown = np.zeros(len(self.paths), np.uint8)
        self._used = np.zeros(len(self.paths), bool)
        self._asked = np.zeros(len(self.paths), bool)
        self._lock = threading.Lock()
        self._foresight = Foresight(len(self.paths))
        self._opened_s = 0.0
        self._openers: dict[int, float] = {}  # by process: when it opened files last
        self._rest_s = 0.0
        self._rest_due = REST_ANEW
        self._ever = np.zeros(len(self.paths), bool)  # files that were opened
        self._ever_count = 0
        self._fresh = True  # some of them in this epoch for the first time
        self._kinds: NDArray[np.int64] | None = None  # by file: its folder and ending, numbered
        self._settled = False  # an epoch has ended in which none was
        self._room: dict[RootFiles, object] = {}
        self._near = PageCacheAhead(
            self.paths, self._sizes, idle=lambda: time.monotonic() - self._opened_s > IDLE_S
        )
        self.figures = OpenFigures()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="headrace-node-run", daemon=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return int(self._sizes.sum())

    def begin(self, given: GivenOrder | None, earlier: NDArray[np.int64] | None) -> None:
        """Show the copies that there are, and begin to watch."""
        self._foresight = Foresight(len(self.paths), given, earlier)
        for root in self.roots:
            root.copies.attach(self)
        self._ahead()
        self._read_rest()
        self._thread.start()

    def close(self) -> None:
        """The program has ended, or has another board."""
        self._ended = True
        if self._thread.is_alive():
            self._thread.join(2 * WAIT_S + 1.0)
        for root in self.roots:
            root.reader.forget(self)
            root.copies.detach(self)
        self._near.close()

    def order_to_keep(self) -> NDArray[np.int64] | None:
        """What the next run of this job may be like."""
        with self._lock:
            return self._foresight.worth_keeping()

    # -- what copies ask --------------------------------------------------------------------------

    def find(self, path: bytes) -> int:
        """A file's number; -1: it is none of the run's."""
        return int(self.board.find(path))

    def identity(self, file: int) -> tuple[int, ...]:
        """What a file was when the board was made: dev, ino, size, mtime_ns, ctime_ns."""
        return tuple(self.stats[file, IDENTITY].tolist())

    def show(self, file: int, tier: Tier, where: int | bytes) -> None:
        """Tell programs of a copy."""
        if isinstance(where, int):
            # For those who look past the shim, as node.js does: what a copy can say of its original itself.
            mode, *times = self.stats[file, [_MODE, _ATIME, _MTIME]].tolist()
            os.fchmod(where, mode & 0o777 | stat.S_IRUSR)
            os.utime(where, ns=tuple(times))
            self.board.place(file, where)
        else:
            self.board.place_path(file, where)
        self._shown[file] = _RAM if tier == "ram" else _DISK
        self._used[file] = False

    def hide(self, file: int) -> bool:
        """The copy goes; whether a program of this run had opened it."""
        if self._shown[file]:
            self.board.withdraw(file)
            self._shown[file] = _NONE
            self._asked[file] = False
        return bool(self._used[file])

    def until(self, file: int) -> int | None:
        """Opens until the file is next opened; None: not known."""
        with self._lock:
            opens = self._foresight.until(np.array([file]))
        return None if opens is None else int(opens[0])

    def needed_last(self, grace: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Files with copies in memory, what is needed last first, and the opens until then."""
        files = np.flatnonzero(self._shown == _RAM)
        with self._lock:
            until = self._foresight.until(files, grace)
        if until is None:
            return files[:0], files[:0]
        order = np.argsort(-until, kind="stable")
        return files[order], until[order]

    def awaited(self, file: int) -> bool:
        """Whether the file was asked for, and not opened since."""
        return bool(self._asked[file])

    # -- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended:
            try:
                # Opens of copies do not wake this thread each time.
                active = time.monotonic() - self._opened_s < ACTIVE_S
                reports = self.ring.take(ACTIVE_WAIT_S if active else WAIT_S)
                if len(reports):
                    self._take(reports)
                    time.sleep(DOZE_S if self._near.bypassed and not self._far.any() else BATCH_S)
                now = time.monotonic()
                if now - self._rest_s > REST_S:
                    self._ahead()
                    self._read_rest(anew=False)
            except Exception:  # noqa: BLE001 - the program goes on without it
                _log.exception("the opens of a program are not followed any more")
                return

    def _take(self, reports: NDArray[np.int64]) -> None:
        ring = _native.OpenRing
        of_file = (reports[:, 0] >= 0) & (reports[:, 0] < len(self.paths))
        of_file &= np.isin(reports[:, 2], (ring.ORIGINAL, ring.COPY, ring.WRITING, ring.REFUSED))
        of_none = (reports[:, 0] == -1) & np.isin(
            reports[:, 2], (ring.UNKNOWN, ring.ATTACHED, ring.BLIND)
        )
        others = self.figures.others
        others["hostile"] += len(reports) - int((of_file | of_none).sum())
        others["unknown"] += int((of_none & (reports[:, 2] == ring.UNKNOWN)).sum())
        file, what = reports[of_file, 0], reports[of_file, 2]
        original, copied = what == ring.ORIGINAL, what == ring.COPY
        refused, written = what == ring.REFUSED, what == ring.WRITING
        for number in set(file[refused | written].tolist()):
            self._spoil(number, written=bool(written[file == number].any()))
        of_tier = self._tiers_of(file, original, copied)
        opened = file[~written]
        if len(opened):
            self._opened_s = now = time.monotonic()
            late_s = now - ACTIVE_S
            self._openers |= dict.fromkeys(reports[of_file, 1][~written].tolist(), now)
            self._openers = {p: at for p, at in self._openers.items() if at > late_s}
            self._tell_readers(file, original, copied)
            self._note(opened)
        # Last: who sees an open counted sees what followed from it.
        others["refused"] += int(refused.sum())
        others["written"] += int(written.sum())
        for name, mask in of_tier.items():
            self.figures.files[name] += int(mask.sum())
            self.figures.bytes[name] += int(self._sizes[file[mask]].sum())

    def _tell_readers(
        self, file: NDArray[np.int64], original: NDArray[np.bool_], copied: NDArray[np.bool_]
    ) -> None:
        """How the program fares, to those who read for it."""
        for root, (low, high) in zip(self.roots, self._ranges, strict=True):
            mine = (original | copied) & (file >= low) & (file < high)
            if root.far and mine.any():
                nbytes, waited = int(self._sizes[file[mine]].sum()), int((original & mine).sum())
                root.reader.opened(self, int(mine.sum()), nbytes, waited, len(self._openers))

    def _tiers_of(
        self, file: NDArray[np.int64], original: NDArray[np.bool_], copied: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.bool_]]:
        """Which opens were served from where."""
        ahead = np.zeros(len(file), bool)
        ahead[original] = self._near.opened(file[original])
        tier = self._shown[file]
        # A copy that has gone since was one in memory.
        on_disk = copied & (tier == _DISK)
        self._used[file[copied]] = True
        return {
            "ram": copied & ~on_disk, "disk": on_disk, "ahead": ahead, "source": original & ~ahead,
        }  # fmt: skip

    def _note(self, opened: NDArray[np.int64]) -> None:
        """Go on in the order, and ask for what comes."""
        new = np.unique(opened[~self._ever[opened]])
        self._ever[new] = True
        self._ever_count += len(new)
        self._fresh |= len(new) > 0
        with self._lock:
            before, epochs = self._foresight.order, self._foresight.epochs
            self._foresight.note(opened)
            order, now = self._foresight.order, self._foresight.epochs
        self._asked[opened] = False
        if before and order != before:
            # The program does not keep to the order: nothing is read ahead by it any more.
            self._asked[:] = False
            self._near.forget()
            for root in self.roots:
                root.reader.want(self, np.empty(0, np.int64), anew=True)
        self._ahead()
        if now != epochs:
            self._settled, self._fresh = not self._fresh, False
        if now != epochs or (not now and self._ever_count >= self._rest_due):
            self._rest_due = 2 * self._ever_count
            self._read_rest()

    def _ahead(self) -> None:
        """Ask for the files that come next, those that were not asked for yet."""
        mean = max(1, self.nbytes // max(1, len(self.paths)))
        count = min(AHEAD_FILES_MAX, max(AHEAD_FILES_MIN, 2 * AHEAD_BYTES // mean))
        with self._lock:
            coming = self._foresight.coming(count)
        # Where memory for copies is short, most of it keeps what it has.
        short = [
            root.copies.quota_bytes // AHEAD_SHARE
            for root in self.roots
            if root.far and root.copies.quota_bytes < root.want().needed_bytes
        ]
        within = np.cumsum(self._sizes[coming]) <= min([AHEAD_BYTES, *short])
        within[:1] = True
        coming = coming[within]
        new = coming[~self._asked[coming]]
        self._asked[new] = True
        far = self._far[new]
        if not far.all():
            self._near.want(new[~far])
        for root, (low, high) in zip(self.roots, self._ranges, strict=True):
            if root.far:
                root.reader.want(self, new[(new >= low) & (new < high)])

    def _read_rest(self, *, anew: bool = True) -> None:
        """Have the rest of the data set read while there is room, and nothing more urgent.

        `anew`: what is opened next has changed; otherwise look only whether there is new room.
        """
        self._rest_s = time.monotonic()
        with self._lock:
            opened, epochs = self._foresight.opened_mask(), self._foresight.epochs
        for root, (low, high) in zip(self.roots, self._ranges, strict=True):
            copies = root.copies
            room = copies.quota_bytes, copies.held_bytes, copies.disk_bytes, copies.disk_stopped
            if not anew and (root.reader.has_rest(self) or self._room.get(root) == room):
                continue
            self._room[root] = room
            if root.far and len(copies) < high - low:
                numbers = np.arange(low, high)
                if epochs:
                    self._let_go(root, numbers)
                numbers = numbers[self._shown[numbers] == _NONE]
                small = self._sizes[numbers] <= BIG_BYTES
                numbers = numbers[(False if self._settled else small) | self._ever[numbers]]
                rank = np.where(opened[numbers], 1, np.where(self._likely()[numbers], 0, 2))
                first = np.argsort(rank, kind="stable")
                root.reader.want_rest(self, iter(numbers[first].tolist()))
        near = np.flatnonzero(~self._far & ~opened)
        if not epochs and self._sizes[near].sum() <= available_memory() // 2:
            self._near.want_when_idle(near)

    def _likely(self) -> NDArray[np.bool_]:
        """Files that the program has opened, or such that lie beside one and are named like it."""
        if not self._ever_count or self._ever_count == len(self.paths):
            return np.ones(len(self.paths), bool)
        if self._kinds is None:
            numbers: dict[tuple[bytes, bytes], int] = {}
            parts = (path.rpartition(b"/") for path in self.paths)
            kinds = ((folder, name[name.rfind(b".") :]) for folder, _, name in parts)
            self._kinds = np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds])
        opened = np.zeros(int(self._kinds.max()) + 1, bool)
        opened[self._kinds[self._ever]] = True
        likely: NDArray[np.bool_] = opened[self._kinds]
        return likely

    def _let_go(self, root: RootFiles, numbers: NDArray[np.int64]) -> None:
        """An epoch has shown what the program opens: where that finds no room, the others' copies go."""
        shown, ever = self._shown[numbers], self._ever[numbers]
        lacking = numbers[ever & (shown == _NONE)]
        needed = sum(map(copy_bytes, self._sizes[lacking].tolist()))
        root.copies.let_go(self, numbers[~ever & (shown == _RAM)].tolist(), needed)

    def _spoil(self, file: int, *, written: bool) -> None:
        """A file is written to, or its copy was refused: is it what it was?"""
        if not written:
            try:
                same = identity(os.stat(self.paths[file])) == self.identity(file)
            except OSError:
                same = False
            if same:
                return
        for root, (low, high) in zip(self.roots, self._ranges, strict=True):
            if low <= file < high:
                root.copies.withdraw(self.paths[file])

    # -- figures ----------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What was done for the program."""
        # First: when an open is counted, what follows from it is there.
        served = self.figures.describe()
        with self._lock:
            foresight = self._foresight
            order = {
                "order": foresight.order, "epochs": foresight.epochs,
                "divergences": foresight.divergences,
                "learned": foresight.learned is not None,
            }  # fmt: skip
        near = self._near.figures
        return {
            "job": self.job,
            "roots": [root.path.decode(errors="replace") for root in self.roots],
            "files": len(self.paths),
            "bytes_of_files": self.nbytes,
            **served,
            **order,
            "reports_lost": self.ring.lost,
            "ahead_files": near.read_files,
            "ahead_bytes": near.read_bytes,
            "ahead_hot_files": near.hot_files,
            "ahead_wasted_files": near.wasted_files,
            "ahead_wasted_bytes": near.wasted_bytes,
            "errors": near.errors,
        }
