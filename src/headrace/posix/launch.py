"""Launch: runs one program with a library of ours preloaded, stays beside it, and says what it did.

The launcher owns the page by which programs find the plane, so it lives as long as the program: it hands
signals on, stops when the program is stopped, and ends as the program ends.

The dynamic linker loads the shim, so there has to be one: not in static programs, and it does not do so
for programs that change their user, that are of another architecture, or that bring another C library.
All that is seen in the file before it is started (`why_unseen`); scripts are followed to their interpreter.

`record_program` preloads the library that logs what a program reads and changes nothing. Each process of the
run leaves a file in the run's folder (`native/record/log_layout.h`), which holds what it did however it ended.
`run.json` says what was run, and at the end how that ended: where the latter is missing, the recording itself
was cut off.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import stat
import struct
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.documents import DocumentKind
from headrace.base.files import replace_file
from headrace.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.posix.opens import OpenLog


_SCRIPTS_MAX = 5  # scripts whose interpreter is a script: the kernel follows no more
_HEAD_BYTES = 4096
_ELF = struct.Struct("<4sBBBBB7sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_PT_INTERP = 3
_CLASS_64, _LITTLE = 2, 1


def find_program(name: str) -> str:
    """The file that a command names.

    Raises FileNotFoundError if there is none, and PermissionError if it cannot be run.
    """
    path = shutil.which(name)
    if path is not None:
        return path
    if os.sep in name and os.path.isfile(name):
        raise PermissionError(13, "it is not executable", name)
    raise FileNotFoundError(2, "no such file" if os.sep in name else "no such command", name)


def why_unseen(path: str) -> str:
    """Why the shim cannot see what the program at a path opens; '' when it can."""
    for _ in range(_SCRIPTS_MAX):
        try:
            if _changes_user(path):
                return f"{path} runs as another user, or with more rights"
            with open(path, "rb") as f:
                head = f.read(_HEAD_BYTES)
                if head[:2] != b"#!":
                    return _of_elf(path, head, f.fileno())
        except OSError as e:
            return f"{path} cannot be looked at: {e.strerror}"
        words = head[2:].split(b"\n", 1)[0].split()
        if not words:
            return ""  # the shell runs it
        path = os.fsdecode(words[0])
        if os.path.basename(path) == "env" and len(words) > 1:
            names = [w for w in words[1:] if not w.startswith(b"-") and b"=" not in w]
            interpreter = shutil.which(os.fsdecode(names[0])) if names else None
            path = interpreter or path
    return ""


def _of_elf(path: str, head: bytes, fd: int) -> str:
    if head[:4] != b"\x7fELF":
        return ""  # the shell runs it
    with open(sys.executable, "rb") as f:
        ours = f.read(_ELF.size)
    if len(head) < _ELF.size or head[4] != _CLASS_64 or head[5] != _LITTLE:
        return f"{path} is not a 64-bit program"
    fields = _ELF.unpack_from(head)
    if fields[8] != _ELF.unpack(ours)[8]:
        return f"{path} is a program of another architecture"
    offset, size, count = fields[11], fields[15], fields[16]
    if size != _SEGMENT.size:
        return f"{path} is no program that the system knows"
    table = os.pread(fd, size * count, offset)
    for segment in _SEGMENT.iter_unpack(table[: len(table) // size * size]):
        if segment[0] == _PT_INTERP:
            linker = os.fsdecode(os.pread(fd, min(segment[5], 4096), segment[2]).rstrip(b"\0"))
            return _of_linker(path, linker)
    return f"{path} is linked statically"


def _of_linker(path: str, linker: str) -> str:
    if not os.path.exists(linker):
        return f"{path} needs {linker}, which is not here"
    if "musl" in os.path.basename(linker):
        return f"{path} brings another C library (musl)"
    return ""


def _changes_user(path: str) -> bool:
    status = os.stat(path)
    if status.st_mode & stat.S_ISUID and status.st_uid != os.geteuid():
        return True
    if status.st_mode & stat.S_ISGID and status.st_gid != os.getegid():
        return True
    try:
        return bool(os.getxattr(path, "security.capability")) and os.geteuid() != 0
    except OSError:
        return False


def library(name: str) -> Path:
    """The file of a library that is preloaded, as it was installed: `preload`, `opens` or `record`."""
    from headrace import _native

    return Path(_native.__file__).parent / "lib" / f"libheadrace_{name}.so"


def why_not_loaded(name: str) -> str:
    """Why the dynamic linker cannot load a library of ours; '' when it can."""
    path = library(name)
    if not path.exists():
        return f"{path} is missing"
    if any(c in str(path) for c in ": \t"):  # which separate the linker's list
        return f"{path} cannot be preloaded, for its spaces or colons"
    return ""


def preloading(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """The environment with a library of ours before all that are preloaded already."""
    libraries = [str(library(name)), environment.get("LD_PRELOAD", "")]
    return {**environment, "LD_PRELOAD": ":".join(filter(None, libraries))}


_FORWARDED = frozenset(
    {
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
        signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH, signal.SIGALRM,
    }
)  # fmt: skip
_OF_THE_TERMINAL = 128
"""si_code SI_KERNEL: a key was pressed, and the program has the signal already."""

_KEYS = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGHUP})

_LOOK_S = 0.1  # how long a signal that another thread got may wait
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit statuses that shells give


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """How a program is run."""

    roots: Sequence[str]  # folders whose files are served
    order: str | None = None
    """A file that lists paths in the order in which the program will open them."""
    seed: int | None = None  # the program opens all files, in headrace's order of this seed
    record_order: str | None = None  # where to write the order in which it opened them
    immutable: bool = False  # nothing below the roots changes while the program runs
    simulate: str | None = None  # a slow storage that the roots lie on
    plane: bool = True  # False: only simulate, as a baseline
    wait_s: float = 2.0  # how long to wait for a board before the program starts
    log: OpenLog | None = None  # where its opens are noted, whether they are served or not


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How the program ended."""

    status: int = 0  # its exit status
    signal: int = 0  # what ended it instead; 0: nothing


@dataclass(slots=True)
class RunReport:
    """What a run did."""

    command: list[str]
    roots: list[str]
    ended: ProgramEnd = field(default_factory=ProgramEnd)
    wall_s: float = 0.0
    opens: Mapping[str, int] = field(default_factory=dict)
    """By kind, as the programs themselves counted."""
    daemon: Mapping[str, Any] = field(default_factory=dict)  # the daemon's figures of the run
    private_daemon: bool = False
    simulated: str | None = None
    unseen: list[str] = field(default_factory=list)  # why something could not be seen
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def line(self) -> str:
        """In one line."""
        o = self.opens
        copies = o.get("copy", 0)
        tier = o.get("tier_copy", 0)
        ahead = self.daemon.get("opens", {}).get("ahead", 0)
        originals = o.get("original", 0) + o.get("unknown", 0)
        parts = [
            f"{copies - tier:,} opens from memory",
            f"{tier:,} from local disk",
            f"{ahead:,} read ahead",
            f"{max(0, originals - ahead):,} from the source",
        ]
        if originals and self.daemon and not (copies or ahead):
            hot = self.daemon.get("ahead_hot_files")
            parts.append("which is the page cache" if hot else "no copy of them was there yet")
        if divergences := self.daemon.get("divergences"):
            parts.append(f"{divergences:,} divergences from the order")
        if o.get("stat"):
            parts.append(f"{o['stat']:,} looks at files answered")
        if o.get("writing"):
            parts.append(f"{o['writing']:,} opens for writing")
        text = ", ".join(parts)
        if self.simulated:
            text += f" (simulated {self.simulated})"
        return "; ".join([text, *self.unseen, *self.notes])


def launch(command: Sequence[str], options: ProgramOptions) -> RunReport:
    """Run a command, a program and its arguments, to its end.

    Raises FileNotFoundError or PermissionError if there is no such program or it cannot be run, ValueError if
    a root is no folder.
    """
    for root in options.roots:
        if not os.path.isdir(root):
            raise ValueError(
                f"{os.path.abspath(root)}: no such folder, expected one whose files are served. Correct "
                "--root; without it, folders that the program is given are served."
            )
    program = find_program(command[0])
    report = RunReport(list(command), [os.path.abspath(root) for root in options.roots])
    report.simulated = options.simulate
    why = why_unseen(program) or why_not_loaded("preload")
    if not why:
        return _launch_seen(program, command, options, report)
    mount = f"headrace mount {shlex.quote(report.roots[0])} FOLDER"
    report.unseen.append(
        f"{why}: headrace cannot see what it opens. Mount what it reads (`{mount}`) and name FOLDER to it"
    )
    sys.stderr.write(f"headrace run: {report.unseen[0]}; it runs all the same.\n")
    began = time.monotonic()
    report.ended = run_program(program, command, _recorded(os.environ, options.log))
    report.wall_s = time.monotonic() - began
    return report


def _launch_seen(
    program: str, command: Sequence[str], options: ProgramOptions, report: RunReport
) -> RunReport:
    from headrace.io import simulation_of
    from headrace.posix.attachment import RUN_VARIABLE, Attachment, Page

    simulation = None if options.simulate is None else simulation_of(options.simulate)
    page = Page(report.roots, simulation)
    if options.record_order is not None:
        page.record()
    attachment = Attachment(page, replace(options, roots=report.roots))
    if options.plane:
        attachment.start()
    began = time.monotonic()
    try:
        environment = preloading(os.environ, "preload") | {RUN_VARIABLE: page.address}
        report.ended = run_program(program, command, _recorded(environment, options.log))
    finally:
        report.wall_s = time.monotonic() - began
        if options.record_order is not None:
            with open(options.record_order, "wb") as f:
                f.writelines(name + b"\n" for name in page.order if b"\n" not in name)
        report.daemon = attachment.end()
    report.private_daemon = attachment.private
    report.opens = opens = page.counts()
    report.notes.extend(attachment.notes)
    if opens.get("blind"):
        report.unseen.append(
            f"{opens['blind']:,} started programs could not be seen (static, of another user or "
            "architecture, or without the environment): give them a folder of `headrace mount`"
        )
    if options.record_order is not None and (left_out := opens.get("unknown")):
        report.notes.append(
            f"{left_out:,} opens are not in {options.record_order}: the files were new, or headrace had "
            "not looked at all files below the roots yet"
        )
    if not opens.get("attached"):
        report.unseen.append(
            "no program of the run opened or looked at a file where the shim sees it"
        )
    elif not any(opens.get(k) for k in ("copy", "original", "unknown", "writing", "stat")):
        report.unseen.append(
            "nothing below the roots was opened, or only in ways that cannot be seen (system calls "
            "without the C library)"
        )
    page.close()
    return report


def _recorded(environment: Mapping[str, str], log: OpenLog | None) -> Mapping[str, str]:
    """The recorder comes first: it sees what is asked for, the shim what is not served."""
    return environment if log is None else log.environment(environment)


# -- the program -------------------------------------------------------------------------------------


def run_program(program: str, command: Sequence[str], environment: Mapping[str, str]) -> ProgramEnd:
    """Start it, and wait for its end; signals that come meanwhile are handed on.

    The first word of `command` is the program's name as it was given.
    """
    watched = _FORWARDED | {signal.SIGCHLD}
    # We wait for them here, and are told who sent them. But libraries' threads (those of linear algebra)
    # do not block them: what the kernel gives to one of these is noted by the handlers.
    stray = deque[int]()
    handlers = {
        number: signal.signal(number, lambda number, _: stray.append(number)) for number in watched
    }
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        pid = os.posix_spawn(
            program, list(command), environment,
            # Python ignores these two; the program shall not.
            setsigmask=before, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )  # fmt: skip
        return _wait(pid, watched, stray)
    finally:
        # What came for the program and not for us is not to end us now.
        while signal.sigtimedwait(watched, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(pid: int, watched: frozenset[signal.Signals], stray: deque[int]) -> ProgramEnd:
    while True:
        received = signal.sigtimedwait(watched, _LOOK_S)
        if received is None or received.si_signo == signal.SIGCHLD:
            pid_of_change, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if pid_of_change and os.WIFSTOPPED(status):  # then so are we
                os.kill(os.getpid(), signal.SIGSTOP)
                os.kill(pid, signal.SIGCONT)
            elif pid_of_change and os.WIFSIGNALED(status):
                return ProgramEnd(128 + os.WTERMSIG(status), os.WTERMSIG(status))
            elif pid_of_change:
                return ProgramEnd(os.WEXITSTATUS(status))
        elif received.si_code != _OF_THE_TERMINAL:
            os.kill(pid, received.si_signo)
        while stray:
            number = stray.popleft()
            # Of these nobody says where they come from; the terminal's reach the program too.
            if number != signal.SIGCHLD and not (number in _KEYS and os.isatty(0)):
                os.kill(pid, number)


def end_like(ended: ProgramEnd) -> None:
    """End this process as the program ended, where that was by a signal."""
    if not ended.signal:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
    if ended.signal != signal.SIGKILL:
        signal.signal(ended.signal, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended.signal})
    os.kill(os.getpid(), ended.signal)


RUN_FILE: Final = "run.json"
RUN: Final = DocumentKind(
    name="what a recording left",
    version=2,
    unchecked=1,
    error=RecordError,
    next_step="Give the folder NAME.yaml.part that lies beside the output.",
    marks={"kind": "headrace record"},
)
TRACE_FOLDER: Final = "trace"  # where headrace's own loaders leave their exact figures
_VARIABLE: Final = "HEADRACE_RECORD"
_SLOTS_VARIABLE: Final = "HEADRACE_RECORD_SLOTS"
_SLOT_BYTES: Final = 40


@dataclass(slots=True)
class RecordedRun:
    """One recorded run."""

    command: list[str]
    folder: str
    began_unix_s: float = 0.0
    working_folder: str = ""
    processors: int = 0
    process: int = 0  # that records
    unseen: str = ""  # why nothing could be seen; '' where it could
    ended: ProgramEnd | None = None  # None: the recording was cut off before
    wall_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Put `run.json` in its place."""
        replace_file(folder / RUN_FILE, RUN.encode(asdict(self), indent=2), sync=False)


def record_program(command: Sequence[str], folder: Path, log_bytes: int) -> RecordedRun:
    """Run a command to its end, and log what it reads, at most `log_bytes` for each process.

    Raises:
        FileNotFoundError: there is no such program.
        PermissionError: it cannot be run.
        FileExistsError: the folder is there.
    """
    program = find_program(command[0])
    folder.mkdir(mode=0o700, parents=True)
    run = RecordedRun(
        list(command), str(folder), time.time(), os.getcwd(), len(os.sched_getaffinity(0)),
        os.getpid(),
    )  # fmt: skip
    why = why_unseen(program) or why_not_loaded("record")
    if not why and len(os.fsencode(folder.absolute())) > 480:
        why = f"{folder} is too long a name for a log"
    if why:
        run.unseen = why
        sys.stderr.write(
            f"headrace record: {why}: what it reads cannot be seen; it runs all the same.\n"
        )
    run.write(folder)
    environment = dict(os.environ)
    if not why:
        environment = preloading(environment, "record")
        environment[_VARIABLE] = str(folder.absolute())
        environment[_SLOTS_VARIABLE] = str(max(1024, log_bytes // _SLOT_BYTES))
        # What headrace's own loaders open through a ring of the kernel passes by every library, and what
        # they have read ahead nobody opens again.
        environment.setdefault("HEADRACE_ENGINE", "threads")
        environment.setdefault("HEADRACE_AHEAD", "0")
        environment.setdefault("HEADRACE_TRACE", str(folder.absolute() / TRACE_FOLDER))
    began = time.monotonic()
    try:
        run.ended = run_program(program, command, environment)
    finally:
        run.wall_s = time.monotonic() - began
        run.write(folder)
    return run
