"""Running: one run of the command in a process of its own, with its output kept, and its end looked at."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import ProgramError
from headrace.insight.ab.one_run import HANDED_OVER, Ran, Task, descendants_of
from headrace.insight.ab.reading import Reading, reading_of
from headrace.insight.ab.turns import Side
from headrace.posix.opens import OpenLog

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headrace.insight.ab.options import AbOptions
    from headrace.insight.ab.page_cache import Cached

__all__ = ["Outcome", "Run", "run_once"]

_GRACE_S: Final = 5.0
_LINES: Final = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave, as far as it is compared.

    Attributes:
        status: exit status.
        lines: of stdout that match what is compared.
        files: digests of files that are compared; None of one that is not there.
    """

    status: int
    lines: tuple[str, ...]
    files: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        number: of the pair, from 1; 0: the run that everything is learned from.
        ran: its figures.
        reading: what it read.
        before: what of that was in memory when it began.
        outcome: what it gave.
        swapped: what the exchange of the DataLoader did.
        uses_headrace: the command itself imports one of headrace's loaders.
    """

    number: int
    side: Side
    ran: Ran
    reading: Reading
    before: Cached | None
    outcome: Outcome
    swapped: tuple[str, ...] = ()
    uses_headrace: bool = False

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

    @property
    def name(self) -> str:
        """As people say it."""
        how = "with headrace" if self.side is Side.WITH else "without headrace"
        return f"run {self.number} {how}" if self.number else f"the first run, {how}"


def run_once(
    command: Sequence[str],
    side: Side,
    number: int,
    options: AbOptions,
    folder: Path,
    *,
    roots: Sequence[str] = (),
    not_data: Collection[bytes] = (),
    order: Path | None = None,
    before: Cached | None = None,
) -> Run:
    """Run the command once.

    Args:
        command: a program and its arguments.
        side: how it is run.
        number: of the pair; 0: the run that all is learned from.
        options: of the comparison.
        folder: for files of the run; emptied by whoever made it.
        roots: what is served, and what is data.
        not_data: files that are the command itself.
        order: what `headrace run` is told.
        before: kept in the result.

    Raises:
        ProgramError: it failed, or took too long.
    """
    served = side is Side.WITH and not options.drop_in
    swap = folder / f"swap-{number}-{side}"
    environment = {"HEADRACE_RUNTIME_DIR": str(folder / "runtime"), "HEADRACE_JOB": "ab"}
    if side is Side.WITH and options.drop_in:
        environment |= _swapping(folder, swap)
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
    swapped = tuple(swap.read_text().splitlines()) if swap.exists() else ()
    used = any(b"/headrace/frameworks/" in one.path for one in opens.opens)
    run = Run(number, side, ran, reading, before, _outcome(ran, folder, options), swapped, used)
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
                f"{name} took longer than {options.limit_s:g} s, and was ended.{_said(folder)}",
                next_step="Give it less to do, or more time: --limit SECONDS.",
            ) from None
        finally:
            _end(process)
    try:
        return Ran(**HANDED_OVER.decode(Path(task.result).read_bytes(), task.result).plain())
    except (OSError, ProgramError, TypeError):
        raise ProgramError(
            f"{name} ended without its figures (status {process.returncode}): whoever measured it "
            f"was killed.{_said(folder)}",
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
    while (left := descendants_of(process.pid)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.kill()
    process.wait()


def _swapping(folder: Path, said: Path) -> dict[str, str]:
    from headrace.insight.ab import swap

    place = folder / "sitecustomize"
    if not place.exists():
        place.mkdir()
        source = Path(swap.__file__).read_text(encoding="utf-8")
        (place / "sitecustomize.py").write_text(source, encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": f"{place}{os.pathsep}{before}" if before else str(place),
        "HEADRACE_SWAP": str(said),
    }


# -- what it gave ------------------------------------------------------------------------------------


def _outcome(ran: Ran, folder: Path, options: AbOptions) -> Outcome:
    lines: tuple[str, ...] = ()
    if options.compare is not None:
        wanted = re.compile(options.compare)
        text = (folder / "stdout").read_bytes().decode("utf-8", "backslashreplace")
        lines = tuple(line for line in text.splitlines() if wanted.search(line))
    return Outcome(ran.status, lines, tuple(map(_digest, options.compare_files)))


def _digest(path: str) -> str | None:
    try:
        with open(path, "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError:
        return None


def _failed(run: Run, folder: Path) -> ProgramError:
    ran = run.ran
    how = f"with status {ran.status}"
    if ran.signal:
        known = {number.value: number.name for number in signal.Signals}
        how = f"by signal {ran.signal} ({known.get(ran.signal, 'of its own')})"
    hints = {
        Side.WITHOUT: "Nothing of headrace served it then: see that the command works by itself.",
        Side.WITH: "Without headrace it ended well: please report what is different.",
    }
    hint = hints[run.side]
    if "EOFError" in _tail(folder / "stderr"):
        hint = "It reads its standard input, which is empty: give a file with --stdin FILE."
    return ProgramError(f"{run.name} ended {how}.{_said(folder)}", next_step=hint, run=run)


def _said(folder: Path) -> str:
    """The last lines of what it wrote to stderr, or to stdout where that is all."""
    for name in ("stderr", "stdout"):
        if text := _tail(folder / name):
            return f" Its last lines on {name}:\n" + "\n".join(
                f"  | {line}" for line in text.splitlines()
            )
    return " It wrote nothing."


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - (64 << 10)))
            text = f.read().decode("utf-8", "backslashreplace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-_LINES:])
