"""Writer: the thread that writes what loaders of this process do. It never makes them wait.

A loader's `StepLog` keeps its last steps; the thread takes them from there a few times a second, and once a
second (less often in long runs) it looks at stages and tuner. The thread begins with the first
step, so a loader that is only made, or copied to a worker, leaves no file. A forked child begins files of
its own with its own first step. Whoever takes a loader's state waits until the steps before it are written:
a process that is killed then is known to have done what its state says. Whatever fails here is logged once,
and ends the trace of that loader, never the run.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import queue
import secrets
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.job import clean, identity_of, torch_worker
from headrace.base.text import redacted
from headrace.control.stalls.live import evidence_of
from headrace.machine.host import start_time, this_host
from headrace.trace.format import RUN, TraceFile, bytes_max, write_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.control.controller import Change, Plane
    from headrace.plane.batch_trace import PassMark, StepLog


_DIGITS: Final = 6


def _look(plane: Plane, now: float) -> dict[str, Any] | None:
    """Where knobs stand, and since the loader began: latencies of stages, who served; None: they are gone."""
    reading = plane.now()
    if reading is None:
        return None
    stages = {
        stage.name: {"latency_us": {str(at): n for at, n in enumerate(stage.latency_us) if n}}
        for stage in reading.stages
        if stage.reads
    }
    knobs = {name: value for name, value in asdict(plane.knobs).items() if value}
    look = {"kind": "look", "at_s": round(now, _DIGITS), "stages": stages, "knobs": knobs}
    for remote in (stage.remote for stage in reading.stages):
        if remote is not None and remote.bytes:
            look["from_peers"] = remote.peer_bytes / remote.bytes
    return look


LOG = logging.getLogger("headrace.trace")

PERIOD_S: Final = 0.25
"""Between two looks at the steps: a log of 4,096 holds those of 16,000 a second."""

LOOK_S: Final = 1.0  # between two looks at stages and tuner

LOOKS_SHARE: Final = 1 / 600
"""Of the run's age: later looks are further apart, so that a day has 4,000 of them and not 86,400."""

EVIDENCE_S: Final = 10.0  # between two looks at what explains waits: it takes a millisecond
_TEXT_MAX: Final = 1024  # characters of a sample's name, and of what is wrong with it
END_S: Final = 2.0  # how long a state, and the end of the process, wait for a disk that may hang


@dataclass(slots=True, eq=False)
class _Followed:
    """One loader."""

    folder: str
    about: Mapping[str, Any]
    begun: Callable[[], Mapping[str, Any]]
    most: int
    steps: StepLog
    loader: weakref.ref[Any]
    plane: Plane | None
    seen: int = 0
    file: TraceFile | None = None
    began_s: float = 0.0
    look_at_s: float = 0.0
    evidence_at_s: float = 0.0
    mark: PassMark | None = None  # what was counted when its first pass began
    last_change: Change | None = None
    ended: bool = False

    @property
    def idle(self) -> bool:
        """Whether its loader is gone and has never delivered anything."""
        return self.loader() is None and self.file is None and self.steps.added == self.seen

    def take(self) -> None:
        """Write the steps that are new."""
        rows, seen = self.steps.since(self.seen)
        if not len(rows):
            return
        if self.file is None:
            self._begin()
        assert self.file is not None
        lost = seen - self.seen - len(rows)
        if lost > 0:
            self.file.event({"kind": "lost", "at_s": time.monotonic(), "steps": lost})
        self.seen = seen
        self.file.steps(rows)
        while self.steps.left_out:
            epoch, step, position, sample = self.steps.left_out.popleft()
            self.file.event({
                "kind": "left out", "at_s": time.monotonic(), "epoch": epoch, "step": step,
                "position": position, "index": sample.index, "name": sample.name[:_TEXT_MAX],
                "reason": sample.reason[:_TEXT_MAX],
            })  # fmt: skip

    def _begin(self) -> None:
        now = time.monotonic()
        clock = {"began_unix_s": time.time(), "began_s": now}
        about = {"rank": 0, **self.about, **self.begun()}
        facts = _run(about, clock["began_unix_s"])
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        write_once(Path(self.folder, "run.json"), RUN.encode(facts, indent=1))
        pid, identity = os.getpid(), identity_of(os.environ)
        here = {
            "host": clean(socket.gethostname()), "node": identity.node if identity else "",
            "machine": this_host(), "pid": pid, "started": start_time(pid) or 0, "process": _writer.process,
        }  # fmt: skip
        origin = "state" if self.steps.resumed else "beginning"
        header = {**about, **clock, **here, "origin": origin}
        self.file = TraceFile(self.folder, about["rank"], header, self.most)
        self.began_s = self.look_at_s = now

    def look(self, now: float) -> None:
        """Write what stages and tuner say, if it is time for that."""
        file, plane = self.file, self.plane
        if file is None or now < self.look_at_s:
            return
        self.look_at_s = now + max(LOOK_S, (now - self.began_s) * LOOKS_SHARE)
        if plane is not None:
            for change in self._changes(plane):
                event = {"kind": "decision", "at_s": round(plane.started + change.at_s, _DIGITS)}
                file.event(event | {
                    "action": change.action, "before": asdict(change.before),
                    "after": asdict(change.after), "reason": change.reason,
                    "evidence": change.evidence,
                })  # fmt: skip
            if (seen := _look(plane, now)) is not None:
                file.event(seen)
        if now >= self.evidence_at_s:
            self.evidence_at_s = now + EVIDENCE_S
            self._evidence(now)

    def _evidence(self, now: float) -> None:
        """Write what explains the waits so far, and is not in the steps."""
        loader = self.loader()
        if loader is None or self.file is None:
            return
        if self.mark is None:
            self.mark = next(iter(self.steps.marks), None)
        evidence = asdict(evidence_of(loader, self.mark))
        known = {name: v for name, v in evidence.items() if v not in (0, "") and v == v}  # noqa: PLR0124
        skipped = len(getattr(loader, "skipped", ()))
        self.file.event({"kind": "evidence", "at_s": now, "skipped": skipped, "found": known})

    def _changes(self, plane: Plane) -> list[Change]:
        """The tuner's decisions since the last look; the oldest are forgotten if there were very many."""
        changes = list(plane.changes)
        known = [at for at, change in enumerate(changes, 1) if change is self.last_change]
        self.last_change = changes[-1] if changes else self.last_change
        return changes[known[-1] if known else 0 :]

    def end(self, why: str) -> None:
        """Write what is left, and close the file."""
        self.ended = True
        self.take()
        if self.file is not None:
            self.look_at_s = self.evidence_at_s = 0.0
            self.look(time.monotonic())
            self.file.close(why)


class _Writer:
    """The thread, and whom it follows."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: a forked child has neither the thread nor the lock's owner, and other files."""
        followed = getattr(self, "_followed", [])
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._ending = threading.Event()
        # Of those who wait for a round. A signal's handler may take a state while one is taken: so may this.
        self._asked: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self._hangs = False
        self._thread: threading.Thread | None = None
        self.process = secrets.token_hex(8)
        self._followed: list[_Followed] = followed
        for each in followed:
            if each.file is not None:
                each.file.forget()
            each.file, each.seen = None, each.steps.added
            each.steps.left_out.clear()
            each.steps.first = self.wake

    def __reduce__(self) -> str:
        # A log that is copied to another process refers to that process's writer.
        return "_writer"

    def follow(self, followed: _Followed) -> None:
        with self._lock:
            self._followed = [each for each in self._followed if not each.idle] + [followed]
        followed.steps.first, followed.steps.settle = self.wake, self.settle

    def wake(self) -> None:
        """A loader of this process delivers: see to it that somebody writes."""
        if self._thread is not None or _is_worker():
            return
        with self._lock:
            if self._thread is None and not self._ending.is_set():
                thread = threading.Thread(target=self._run, name="headrace-trace", daemon=True)
                self._thread = thread
                thread.start()
                if multiprocessing.parent_process() is not None:
                    # A forked one ends without `atexit`.
                    util.Finalize(None, self.stop, exitpriority=0)

    def settle(self) -> None:
        """A state is taken: return when what was delivered is written, or the disk seems to hang."""
        if self._thread is None or self._hangs:
            return
        written = threading.Event()
        self._asked.put(written)
        if self._thread is not None and not self._ending.is_set():
            self._hangs = not written.wait(END_S)

    def _run(self) -> None:
        asked: list[threading.Event] = []
        while not self._ending.is_set():
            with suppress(queue.Empty):
                asked.append(self._asked.get(timeout=PERIOD_S))
            with self._lock:
                self._followed = [each for each in self._followed if not each.ended]
                followed = list(self._followed)
                if not followed:
                    self._thread = None
            self._round(followed)
            self._hangs = False
            with suppress(queue.Empty):
                while not followed:
                    asked.append(self._asked.get_nowait())
            while asked:
                asked.pop().set()
            if not followed:
                return
        with self._writing:
            for each in list(self._followed):
                _safely(each, lambda one: one.end("exit"))

    def flush(self) -> None:
        """Write all that there is, now, in the caller's thread."""
        with self._lock:
            followed = list(self._followed)
        self._round(followed)

    def _round(self, followed: Sequence[_Followed]) -> None:
        now = time.monotonic()
        with self._writing:
            for each in followed:
                self._write(each, now)

    def _write(self, each: _Followed, now: float) -> None:
        gone = each.loader() is None
        _safely(each, _Followed.take)
        if gone:
            _safely(each, lambda one: one.end("closed"))
        elif each.file is not None:
            _safely(each, lambda one: one.look(now))

    def stop(self) -> None:
        """The process ends."""
        self._ending.set()
        self._asked.put(threading.Event())
        thread = self._thread
        if thread is not None:
            thread.join(END_S)


def _safely(followed: _Followed, act: Callable[[_Followed], None]) -> None:
    if followed.ended:
        return
    try:
        act(followed)
    except Exception as e:
        # What the system says is enough; a mistake of ours needs its place.
        LOG.error(  # noqa: TRY400 - the same
            "%s: the trace of this loader ends, the run goes on: %s", followed.folder, e,
            exc_info=not isinstance(e, OSError),
        )  # fmt: skip
        followed.ended = True
        if followed.file is not None:
            followed.file.close("it could not be written")


def _is_worker() -> bool:
    """Whether this process makes batches for another one, whose steps they are."""
    if torch_worker() is not None:
        return True
    return "grain" in sys.modules and multiprocessing.current_process().daemon


_writer = _Writer()
os.register_at_fork(after_in_child=_writer.reset)
atexit.register(_writer.stop)


def flush() -> None:
    """Write what loaders of this process have delivered so far, and end the files of those that are gone.

    Not needed: it happens by itself a moment later. For who reads a run that this process has just made.
    """
    if not _is_worker():
        _writer.flush()


def follow(
    folder: str,
    about: Mapping[str, Any],
    loader: Any,
    *,
    plane: Plane | None = None,
    begun: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Write what a loader does into a run's folder, from its first step on until it is gone.

    `about` is what the trace's header says: the fields of `RankTrace` from `rank` to `tail`; `begun` gives
    more of it once there is a first step, and must not keep the loader alive. Nor is the loader, which has
    `stats`, kept alive here. `plane` has its stages under watch.

    Raises ValueError if HEADRACE_TRACE_BYTES makes no sense.
    """
    # Subclasses of the drop-in may have a `stats` of their own.
    steps: StepLog = getattr(loader, "_headrace", loader).stats.steps
    _writer.follow(
        _Followed(folder, dict(about), begun, bytes_max(), steps, weakref.ref(loader), plane)
    )


_SECRET: Final = ("token", "password", "passwd", "secret", "key", "credential")


def _run(about: Mapping[str, Any], began_unix_s: float) -> dict[str, Any]:
    from headrace import __version__

    names = (
        "world_size", "source", "framework", "fingerprint", "samples", "order", "order_digest", "length",
        "batch_size", "tail",
    )  # fmt: skip
    command = _without_secrets([sys.executable, *sys.argv])
    facts = {"headrace": __version__, "command": command, "began_unix_s": began_unix_s}
    return facts | {name: about[name] for name in names if name in about}


def _without_secrets(words: list[str]) -> list[str]:
    """A command line, without the values of options whose names say that nobody is to see them."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and any(part in name.lower() for part in _SECRET)
        if secret and equals:
            shown.append(f"{name}=***")
        else:
            shown.append("***" if hide and not word.startswith("-") else redacted(word)[:1024])
        hide = secret and not equals
    return shown
