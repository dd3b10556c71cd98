"""Running: one run of the command in a process of its own, its output kept, and which of its opens were data.

A Python program opens thousands of files before its first sample: modules, libraries, the time zone. None of
these is data. What remains, and was not written by the run itself, is.

A program with several processes that read opens files in an order that depends on which of them was quicker:
then each process's own order is compared. A loader that reads ahead opens files when it likes, and some twice:
then only which files they are can be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.cluster.processes import descendants
from headrace.errors import ProgramError
from headrace.insight.ab.one_run import HANDED_OVER, Ran, Task
from headrace.insight.record.job import is_data, is_system
from headrace.posix.opens import OpenLog

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from headrace.insight.ab.experiment import Cached
    from headrace.posix.opens import FileOpen


class Side(StrEnum):
    """How a run is made."""

    WITHOUT = "without"
    WITH = "with"


def turns(seed: int) -> Iterator[tuple[Side, Side]]:
    """Pairs without an end, each with its order."""
    draw = random.Random(seed)  # noqa: S311 - a coin
    while True:
        order = [Side.WITHOUT, Side.WITH]
        if draw.random() < 0.5:
            order.reverse()
        yield order[0], order[1]
        yield order[1], order[0]


# -- options -----------------------------------------------------------------------------------------

PAIRS: Final = 6
"""Pairs unless told otherwise: with runs that differ by 3 % the interval is about 3 % to either side."""

PAIRS_MOST: Final = 40  # of `until_confident`, unless told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class AbOptions:
    """How a command is compared with itself under headrace: `headrace ab --help` tells of each.

    Attributes:
        pairs: runs of each side, at most; None: `PAIRS`, or `PAIRS_MOST` with `until_confident`, or what
            `seconds` allow.
    """

    pairs: int | None = None
    seconds: float | None = None
    """No pair begins that would probably end later than so long after the start."""
    cold: bool = True
    until_confident: bool = False
    width: float = 0.05  # what narrow is: half of the interval's width, as a fraction
    drop_in: bool = False
    """The other side is torch's DataLoader exchanged for headrace's, instead of `headrace run`."""
    with_order: bool = False
    roots: tuple[str, ...] = ()
    limit_s: float = 3600.0
    compare: str | None = None
    """A regular expression; lines of stdout in which it is found must be the same on both sides."""
    compare_files: tuple[str, ...] = ()
    simulate: str | None = None  # a slow storage that the roots lie on, on both sides
    stdin: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pairs is not None and self.pairs < 1:
            raise ValueError(f"{self.pairs} pairs, expected 1 or more")
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"{self.seconds:g} seconds, expected more than 0")
        if not 0 < self.width < 1:
            raise ValueError(f"a width of {self.width:g}, expected between 0 and 1: 0.05 is 5 %")
        if self.limit_s <= 0:
            raise ValueError(f"a limit of {self.limit_s:g} s, expected more than 0")
        if self.drop_in and (self.simulate or self.with_order):
            raise ValueError(
                "--drop-in reads by itself: it has no simulated storage, and no order to be told; leave "
                "--simulate and --with-order out, or compare with headrace run, without --drop-in"
            )

    @property
    def pairs_most(self) -> int:
        """Pairs that are run at most."""
        if self.pairs is not None:
            return self.pairs
        return PAIRS_MOST if self.until_confident or self.seconds is not None else PAIRS


# -- reading -----------------------------------------------------------------------------------------

ROOTS_MAX: Final = 16  # folders that headrace is told to serve, at most


@dataclass(frozen=True, slots=True)
class RunReads:
    """What one run read of its data."""

    opens: tuple[tuple[int, bytes], ...]  # process and path of each, by time
    written: frozenset[bytes]
    first_ns: int | None  # when the first of them was opened (CLOCK_MONOTONIC); None when none was
    nbytes: int  # what calls returned; reads through a mapping are not seen
    busy_ns: int  # time spent opening and reading, over all threads
    readers: int  # threads that read
    mapped: int  # files that were mapped into memory
    dropped: int = 0

    @property
    def files(self) -> tuple[bytes, ...]:
        """Each file once, in the order of its first open."""
        return tuple(dict.fromkeys(path for _, path in self.opens))

    def below(self, roots: Sequence[str]) -> RunReads:
        """With the opens alone that lie below folders; the other figures stay."""
        folders = _spellings(roots)
        return replace(self, opens=tuple(one for one in self.opens if one[1].startswith(folders)))


def reading_of(
    opens: Sequence[FileOpen], *, not_data: Collection[bytes] = (), roots: Sequence[str] = (),
    dropped: int = 0,
) -> RunReads:  # fmt: skip
    """What of a run's opens, in their order, is data: what lies below `roots`, or is not code or the system's.

    `not_data` are files of the program itself; `dropped` is how many opens are missing.
    """
    written = frozenset(one.path for one in opens if one.writes and not is_system(one.path))
    below = _spellings(roots)
    data = [
        one
        for one in opens
        if not (one.writes or one.path in written or one.path in not_data)
        and (one.path.startswith(below) if below else is_data(one.path))
    ]
    return RunReads(
        tuple((one.process, one.path) for one in data), written,
        data[0].began_ns if data else None, sum(one.read_bytes for one in data),
        sum(one.open_ns + one.read_ns for one in data),
        len({(one.process, one.thread) for one in data}), sum(one.mapped > 0 for one in data), dropped,
    )  # fmt: skip


def _spellings(roots: Sequence[str]) -> tuple[bytes, ...]:
    """How paths below folders may begin."""
    spelled = {path for root in roots for path in (os.path.abspath(root), os.path.realpath(root))}
    return tuple(os.fsencode(path).rstrip(b"/") + b"/" for path in sorted(spelled))


def folders_of(files: Iterable[bytes], avoid: Collection[bytes] = ()) -> list[str]:
    """At most `ROOTS_MAX` folders below which files lie, and not much else; those with the most first.

    Sisters become their parent where they are most of what is in it (`train`, `val`): so a data set's own
    folder is found, and not the home folder that it lies in.
    """
    counts = Counter(os.path.dirname(path) for path in files)
    total = sum(counts.values())
    # A list of labels beside a data set's folder is not worth serving all that lies there.
    folders = {
        folder: count
        for folder, count in counts.items()
        if folder not in (b"", b"/")
        and (count * 100 >= total or not any(_is_below(other, folder) for other in counts))
    }
    while (parent := _common(folders, avoid)) is not None:
        below = [folder for folder in folders if folder == parent or _is_below(folder, parent)]
        folders[parent] = sum(folders.pop(folder) for folder in below)
    ranked = sorted(folders, key=lambda folder: (-folders[folder], folder))
    return [os.fsdecode(folder) for folder in ranked[:ROOTS_MAX]]


def _common(folders: dict[bytes, int], avoid: Collection[bytes]) -> bytes | None:
    """A folder that takes the place of several; None where there is none."""
    for folder in folders:
        if any(_is_below(other, folder) for other in folders):
            return folder
    for parent, count in Counter(os.path.dirname(folder) for folder in folders).most_common():
        if count < 2 or parent == b"/" or any(_is_below(a, parent) or a == parent for a in avoid):
            continue
        try:
            with os.scandir(parent) as entries:
                sisters = sum(entry.is_dir(follow_symlinks=True) for entry in entries)
        except OSError:
            sisters = 0
        if count * 2 >= sisters:
            return parent
    return None


def _is_below(path: bytes, folder: bytes) -> bool:
    return path.startswith(folder.rstrip(b"/") + b"/")


# -- order check -------------------------------------------------------------------------------------


class Agreement(StrEnum):
    """How much two runs agree, best first."""

    SAME = "same order"
    BY_PROCESS = "same order in each process"
    AHEAD = "same files, read ahead"
    OTHER_ORDER = "same files, another order"
    OTHER_FILES = "other files"


@dataclass(frozen=True, slots=True)
class Match:
    """What two runs have in common."""

    sameness: Agreement
    opens: int  # of the first run
    moved: int = 0
    """How far an open is from its place in the first run, at most; 0 in the same order."""
    only_first: tuple[bytes, ...] = ()  # files that the second did not open as often, a few of them
    only_second: tuple[bytes, ...] = ()  # files that the first did not open as often, a few of them

    @property
    def in_order(self) -> bool:
        """Whether each process opened the same files in the same order."""
        return self.sameness in (Agreement.SAME, Agreement.BY_PROCESS)


_NAMES_MAX = 3


def compare_orders(
    first: Sequence[tuple[int, bytes]], second: Sequence[tuple[int, bytes]], *, ahead: bool = False
) -> Match:
    """Compare the opens of two runs: (process, path) by time; `ahead`: one reads ahead, only files count."""
    paths, others = [path for _, path in first], [path for _, path in second]
    if ahead:
        paths, others = sorted(set(paths)), sorted(set(others))
    if paths == others:
        return Match(Agreement.AHEAD if ahead else Agreement.SAME, len(first))
    counts, other_counts = Counter(paths), Counter(others)
    if counts != other_counts:
        only = (counts - other_counts, other_counts - counts)
        some = [tuple(sorted(more)[:_NAMES_MAX]) for more in only]
        return Match(Agreement.OTHER_FILES, len(first), 0, *some)
    places = defaultdict[bytes, deque[int]](deque)
    for place, path in enumerate(others):
        places[path].append(place)
    moved = max(abs(place - places[path].popleft()) for place, path in enumerate(paths))
    same = _by_process(first) == _by_process(second)
    return Match(Agreement.BY_PROCESS if same else Agreement.OTHER_ORDER, len(paths), moved)


def _by_process(opens: Sequence[tuple[int, bytes]]) -> Counter[tuple[bytes, ...]]:
    """What each process opened; their numbers differ from run to run."""
    paths = defaultdict[int, list[bytes]](list)
    for process, path in opens:
        paths[process].append(path)
    return Counter(map(tuple, paths.values()))


def worst(matches: Iterable[Match]) -> Match | None:
    """The one that agrees least; None of none."""
    ranks = list(Agreement)
    return max(matches, key=lambda m: (ranks.index(m.sameness), m.moved), default=None)


# -- running -----------------------------------------------------------------------------------------

_GRACE_S: Final = 5.0
_LINES: Final = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave, as far as it is compared."""

    status: int
    lines: tuple[str, ...]  # of stdout that match what is compared
    files: tuple[str | None, ...]
    """Digests of files that are compared; None of one that is not there."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run."""

    number: int  # of the pair, from 1; 0: the run that everything is learned from
    side: Side
    ran: Ran
    reading: RunReads
    before: Cached | None  # what of that was in memory when it began
    outcome: Outcome
    swapped: tuple[str, ...] = ()  # what the exchange of the DataLoader did
    uses_headrace: bool = False  # the command itself imports one of headrace's loaders

    @property
    def after_first_read_s(self) -> float | None:
        """From the first open of data to the end: without the start of interpreter and frameworks."""
        if self.reading.first_ns is None:
            return None
        return max(0.0, (self.ran.ended_ns - self.reading.first_ns) / 1e9)

    @property
    def reading_share(self) -> float | None:
        """Of the time of its reading threads after the first read, what they spent in opens and reads."""
        after = self.after_first_read_s
        if not after or not self.reading.readers or self.reading.mapped:
            return None
        return min(1.0, self.reading.busy_ns / 1e9 / after / self.reading.readers)


def run_once(
    command: Sequence[str], side: Side, number: int, options: AbOptions, folder: Path, *,
    roots: Sequence[str] = (), not_data: Collection[bytes] = (), order: Path | None = None,
    before: Cached | None = None,
) -> MeasuredRun:  # fmt: skip
    """Run the command once, as run `number` of its side; 0: the run that all is learned from.

    Raises ProgramError if it failed, or took too long.
    """
    served = side is Side.WITH and not options.drop_in
    swap_log = folder / f"swap-{number}-{side}"
    environment = {"HEADRACE_RUNTIME_DIR": str(folder / "runtime"), "HEADRACE_JOB": "ab"}
    if side is Side.WITH and options.drop_in:
        place = folder / "sitecustomize"
        place.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("swap.py"), place / "sitecustomize.py")
        before_it = os.environ.get("PYTHONPATH")
        path = f"{place}{os.pathsep}{before_it}" if before_it else str(place)
        environment |= {"PYTHONPATH": path, "HEADRACE_SWAP": str(swap_log)}
    with OpenLog() as log:
        task = Task(
            command=list(command), served=served, log_fd=log.fd, roots=list(roots),
            order=None if order is None else str(order),
            simulate=options.simulate if roots else None,
            environment=environment, result=str(folder / "ran.json"),
        )  # fmt: skip
        ran = _supervise(task, folder, options, log.fd, _name(side, number))
        opens = log.read()
    reading = reading_of(opens.opens, not_data=not_data, roots=roots, dropped=opens.dropped)
    swapped = tuple(swap_log.read_text().splitlines()) if swap_log.exists() else ()
    used = any(b"/headrace/frameworks/" in one.path for one in opens.opens)
    lines: tuple[str, ...] = ()
    if options.compare is not None:
        wanted = re.compile(options.compare)
        text = (folder / "stdout").read_bytes().decode("utf-8", "backslashreplace")
        lines = tuple(line for line in text.splitlines() if wanted.search(line))
    outcome = Outcome(ran.status, lines, tuple(map(_digest, options.compare_files)))
    run = MeasuredRun(number, side, ran, reading, before, outcome, swapped, used)
    if ran.status:
        raise _failed(run, folder)
    return run


def _name(side: Side, number: int) -> str:
    how = "with headrace" if side is Side.WITH else "without headrace"
    return f"run {number} {how}" if number else f"the first run, {how}"


def _supervise(task: Task, folder: Path, options: AbOptions, log_fd: int, name: str) -> Ran:
    task_file = folder / "task.json"
    Path(task.result).unlink(missing_ok=True)
    task_file.write_bytes(HANDED_OVER.encode(asdict(task)))
    program = [sys.executable, "-m", "headrace.insight.ab.one_run", str(task_file)]
    with (
        Path(options.stdin or os.devnull).open("rb") as stdin,
        (folder / "stdout").open("wb") as out,
        (folder / "stderr").open("wb") as err,
    ):
        process = subprocess.Popen(  # noqa: S603 - this Python, and a module of ours
            program, stdin=stdin, stdout=out, stderr=err, pass_fds=[log_fd], start_new_session=True
        )
        try:
            process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            raise ProgramError(
                f"{name} took longer than {options.limit_s:g} s, and was ended.{_last_lines(folder)}",
                next_step="Give it less to do, or more time: --limit SECONDS.",
            ) from None
        finally:
            _end(process)
    try:
        return Ran(**HANDED_OVER.decode(Path(task.result).read_bytes(), task.result).plain())
    except (OSError, ProgramError, TypeError):
        raise ProgramError(
            f"{name} ended without its figures (status {process.returncode}): whoever measured it "
            f"was killed.{_last_lines(folder)}",
            next_step="Look whether the machine has run out of memory.",
        ) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and all that came of it; one that has ended already is left alone."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
        return
    # What ignores that: the run's processes first, so that none is orphaned and missed.
    deadline = time.monotonic() + _GRACE_S
    while (left := descendants(process.pid)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.kill()
    process.wait()


def _digest(path: str) -> str | None:
    try:
        with open(path, "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError:
        return None


def _failed(run: MeasuredRun, folder: Path) -> ProgramError:
    how = f"with status {run.ran.status}"
    if number := run.ran.signal:
        known = {each.value: each.name for each in signal.Signals}
        how = f"by signal {number} ({known.get(number, 'of its own')})"
    hint = "Nothing of headrace served it then: see that the command works by itself."
    if run.side is Side.WITH:
        hint = "Without headrace it ended well: please report what is different."
    if any("EOFError" in line for line in _tail(folder / "stderr")):
        hint = "It reads its standard input, which is empty: give a file with --stdin FILE."
    what = f"{_name(run.side, run.number)} ended {how}.{_last_lines(folder)}"
    return ProgramError(what, next_step=hint, run=run)


def _last_lines(folder: Path) -> str:
    """Of what it wrote to stderr, or to stdout where that is all."""
    for name in ("stderr", "stdout"):
        if lines := _tail(folder / name):
            return f" Its last lines on {name}:\n" + "\n".join(f"  | {line}" for line in lines)
    return " It wrote nothing."


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - (64 << 10)))
            text = f.read().decode("utf-8", "backslashreplace")
    except OSError:
        return []
    return text.strip().splitlines()[-_LINES:]
