"""Experiment: learns what a command reads, then runs it with and without headrace in turn, cold or warm.

The page cache is prepared without root, and without touching what is not ours: `posix_fadvise(DONTNEED)` for
each file that the program read, never the kernel's switch that empties the cache of the whole machine. What
remains in memory is measured and named. Names and attributes (dentries and inodes) stay, as does what a
storage server has in its own memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import ProgramError
from headrace.insight.ab.comparison import Comparison, EndReason, is_narrow
from headrace.insight.ab.running import ROOTS_MAX, MeasuredRun, Side, folders_of, run_once, turns
from headrace.machine.host import is_network, mount_of, mounts
from headrace.posix.launch import find_program, why_not_loaded, why_unseen
from headrace.posix.opens import OpenLog
from headrace.store.residency import resident_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.insight.ab.running import AbOptions

_BLOCK: Final = 1 << 20
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_NAMES_MAX: Final = 3
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(slots=True)
class Cached:
    """What of some files lies in memory."""

    nbytes: int = 0  # of these
    resident: int | None = 0  # of these bytes, in memory; None where the kernel does not tell
    not_cold: list[tuple[bytes, str]] = field(default_factory=list)
    """Some files that were to be out of memory and are not, with the reason."""

    @property
    def share(self) -> float | None:
        """Of the bytes, as a fraction."""
        return None if self.resident is None else self.resident / max(1, self.nbytes)


def prepare(files: Iterable[bytes], *, cold: bool) -> Cached:
    """Put files out of the page cache, or read what is not in it, and look at what then is."""
    cached, table = Cached(), mounts()
    for path in files:
        try:
            size, pages = _prepared(path, cold=cold)
        except OSError:  # it is gone, or no file
            continue
        cached.nbytes += size
        if pages is None or cached.resident is None:
            cached.resident = None
            continue
        here = min(size, pages * _PAGE)
        cached.resident += here
        if cold and here and len(cached.not_cold) < _NAMES_MAX:
            mount = mount_of(os.fsdecode(path), table)
            why = "another program uses it, or the file system keeps it"
            if mount is not None and mount.kind in _IN_MEMORY:
                why = f"it lies on {mount.kind}, which is memory"
            cached.not_cold.append((path, why))
    return cached


def _prepared(path: bytes, *, cold: bool) -> tuple[int, int | None]:
    """Prepare a file: its size, and how many of its pages are in memory then (None: not told)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        if not size:
            return 0, 0
        if cold:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pages = resident_pages(fd, size)
        if cold and pages:  # what is not written yet stays: write it
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            pages = resident_pages(fd, size)
        elif not cold and pages is not None and pages * _PAGE < size:
            while os.read(fd, _BLOCK):
                pass
            pages = resident_pages(fd, size)
        return size, pages
    finally:
        os.close(fd)


def remote_kinds(files: Iterable[bytes]) -> list[str]:
    """File systems of files whose server has a memory of its own, which nobody here can empty."""
    table = mounts()
    folders = {os.path.dirname(os.path.realpath(os.fsdecode(path))) for path in files}
    below = {mount_of(folder, table) for folder in folders}
    return sorted({m.kind for m in below if m is not None and is_network(m.kind, m.source)})


# -- experiment --------------------------------------------------------------------------------------

_PAIRS_LEAST: Final = 2  # even if they take longer than was asked for: one pair says nothing

_INTERPRETERS: Final = ("python", "pypy", "bash", "sh", "dash", "zsh", "perl", "ruby", "Rscript")


def compare(
    command: Sequence[str],
    options: AbOptions,
    after_run: Callable[[MeasuredRun], None] = lambda _run: None,
) -> Comparison:
    """Compare a command with itself under headrace; `after_run` is called after each run.

    After Ctrl-C, too, it returns what is known then, and nothing that was started runs any more.

    Raises ProgramError if it failed, took too long, or read nothing that could be seen (what is known until
    then is in `comparison`, where that is something), FileNotFoundError if there is no such program, and
    PermissionError if it cannot be run.
    """
    if why := why_unseen(find_program(command[0])) or why_not_loaded("opens"):
        raise ProgramError(
            f"{why}: what it reads cannot be seen, and headrace cannot serve it.",
            next_step="Give a command that the dynamic linker starts, such as: python train.py",
        )
    for root in options.roots:
        if not os.path.isdir(root):
            raise ValueError(f"{root}: no such folder, expected a root whose files are served")
    with tempfile.TemporaryDirectory(prefix="headrace-ab-") as folder:
        return _compare(list(command), options, Path(folder), after_run)


def _compare(
    command: list[str], options: AbOptions, folder: Path, after_run: Callable[[MeasuredRun], None]
) -> Comparison:
    began_s, not_data = time.monotonic(), _own_files(command)
    run = partial(run_once, command, options=options, folder=folder, not_data=not_data)
    # The first run, without headrace: what it reads, and whether it works at all.
    learned = run(Side.WITHOUT, 0, roots=options.roots if options.simulate else ())
    after_run(learned)
    if not learned.reading.opens:
        raise ProgramError(
            f"{' '.join(command)} opened no data file that could be seen, so there is nothing that "
            "headrace could make faster.",
            next_step="Its data may come over the network, from a program that cannot be seen "
            "(static, another user), or from no file at all.",
        )
    roots = _roots(learned, options)
    learned = replace(learned, reading=learned.reading.below(roots))
    files = dict.fromkeys(learned.reading.files)
    comparison = Comparison(command, options, roots, learned)
    comparison.remote = remote_kinds(files) if options.cold else []
    order = None
    if options.with_order:
        order = folder / "order"
        names = [name for _, name in learned.reading.opens if b"\n" not in name]
        order.write_bytes(b"".join(name + b"\n" for name in names))

    def one(side: Side, number: int) -> MeasuredRun:
        before = prepare(files, cold=options.cold)
        measured = run(side, number, roots=roots, order=order, before=before)
        if side is Side.WITH and options.drop_in:
            _check_swapped(measured)
        files.update(dict.fromkeys(measured.reading.files))
        after_run(measured)
        return measured

    longest_s = 0.0
    try:
        for number, sides in enumerate(islice(turns(options.seed), options.pairs_most), 1):
            pair_s = time.monotonic()
            late = pair_s - began_s + longest_s > (options.seconds or float("inf"))
            if late and len(comparison.pairs) >= _PAIRS_LEAST:
                comparison.ended = EndReason.SECONDS
                break
            runs = {side: one(side, number) for side in sides}
            comparison.pairs.append((runs[Side.WITHOUT], runs[Side.WITH]))
            longest_s = max(longest_s, time.monotonic() - pair_s)
            if options.until_confident and is_narrow(comparison.wall.ratio, options.width):
                comparison.ended = EndReason.NARROW
                break
        comparison.recording_s = recording_cost(folder)
    except KeyboardInterrupt:
        comparison.ended = EndReason.INTERRUPTED
    except ProgramError as e:
        comparison.ended = EndReason.FAILED
        e.comparison = comparison  # type: ignore[attr-defined]
        raise
    return comparison


def _roots(learned: MeasuredRun, options: AbOptions) -> list[str]:
    if options.roots:
        return [os.path.abspath(root) for root in options.roots]
    # What is gone by now it had made for itself.
    files = [path for path in learned.reading.files if os.path.exists(path)]
    roots = folders_of(files, avoid=[os.fsencode(Path.cwd())])
    if not roots:
        raise ProgramError(
            "the files that it reads lie in no folder that headrace could serve: "
            f"{os.fsdecode(learned.reading.files[0])}.",
            next_step=f"Name the folders: --root DIR, up to {ROOTS_MAX} times.",
        )
    return roots


def _check_swapped(run: MeasuredRun) -> None:
    """Raise where the DataLoader was not exchanged: the two sides are then the same."""
    if "made" in run.swapped:
        return
    failed = [line for line in run.swapped if line.startswith("failed")]
    if failed:
        why = f"headrace.torch cannot be imported in it ({failed[0].removeprefix('failed: ')})"
        step = "Install headrace beside the torch that the command uses."
    elif run.swapped:
        why = "it makes no torch.utils.data.DataLoader"
        step = "Compare without --drop-in: then the files that it opens are served."
    else:
        why = "it does not import torch, or its Python does not look at PYTHONPATH (-I, -E, -S)"
        step = "Compare without --drop-in, or start Python without these."
    raise ProgramError(f"its DataLoader could not be exchanged: {why}.", next_step=step)


def _own_files(command: Sequence[str]) -> set[bytes]:
    """Files of the command that are read and are no data: the program, or the interpreter's script."""
    own = [command[0]]
    if os.path.basename(command[0]).startswith(_INTERPRETERS):
        own += [word for word in command[1:] if not word.startswith("-")][:1]
    return {os.fsencode(os.path.abspath(word)) for word in own}


# -- what recording costs ----------------------------------------------------------------------------

_OPENS: Final = 20_000
_ROUNDS: Final = 3
_LOOP: Final = (
    "import os, sys, time\n"
    "path, count = sys.argv[1], int(sys.argv[2])\n"
    "began = time.process_time()\n"
    "for _ in range(count):\n"
    "    fd = os.open(path, os.O_RDONLY); os.read(fd, 4096); os.close(fd)\n"
    "print(time.process_time() - began)\n"
)


def recording_cost(folder: Path) -> float:
    """CPU seconds that noting adds to the open, a read and the close of a file; both sides have it."""
    sample = folder / "sample"
    sample.write_bytes(bytes(4096))
    command = [sys.executable, "-S", "-E", "-c", _LOOP, str(sample), str(_OPENS)]
    best = {False: float("inf"), True: float("inf")}
    for recorded in [*best] * _ROUNDS:
        with OpenLog() as log:
            environment = log.environment(os.environ) if recorded else dict(os.environ)
            printed = subprocess.run(  # noqa: S603 - this Python, and a loop of ours
                command, env=environment, capture_output=True, check=True, text=True
            ).stdout
        best[recorded] = min(best[recorded], float(printed) / _OPENS)
    return max(0.0, best[True] - best[False])
