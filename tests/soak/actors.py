"""Actors: processes that can be started, killed and stopped, and what they leave is known.

A new kind of process takes part by being an `Actor`: `spawn` starts it, `victims` says what of it may
be hurt. Whoever hurts it counts only what the kernel confirms.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from soak.page import Page

START_S = 60.0
"""On a machine where everybody waits for a processor."""


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z, ...; '' when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_for(condition, seconds: float = START_S) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


class Actor:
    """One process that comes back whenever it is killed.

    Args:
        name: of it, unique.
        role: what the kills of it are counted as.
        work: a folder for its log.
        environment: of the process.
    """

    workers_role = ""
    ends_with_worker = False
    """Whether it ends when its worker is killed."""

    weight = 2
    """How often it is hurt, beside others."""

    def __init__(self, name: str, role: str, work: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.role = role
        self.environment = environment
        self.log = work / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.page: Page | None = None
        self.pids: list[int] = []
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._ending = False

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Start it, or start it again."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, cwd="/",
            )  # fmt: skip
        self.pids.append(self.process.pid)
        self.counts["starts"] += 1

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ready(self) -> bool:
        """Whether it does what it is there for."""
        return self.alive

    def victims(self) -> dict[str, list[int]]:
        """Processes that may be hurt, by role."""
        assert self.process is not None
        found = {self.role: [self.process.pid]} if self.alive else {}
        if self.workers_role and self.alive:
            workers = children_of(self.process.pid)
            if workers:
                found[self.workers_role] = workers
        return found

    def kill(self) -> bool:
        """SIGKILL; whether that is what it died of."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.after_death()
        return self.process.returncode == -signal.SIGKILL

    def after_death(self) -> None:
        """What a client's page says of a process that is gone is put right."""
        if self.page is not None:
            self.page.call_began_ns = 0
            self.page.attached = 0

    def look(self) -> None:
        """See that it did not end by itself."""
        if self.process is not None and not self._ending and not self.alive:
            self.problems.append(
                f"{self.name} ended by itself with {self.process.returncode}: {self.tail()}"
            )
            self.after_death()
            self.start()

    def end(self, seconds: float = START_S) -> None:
        """Ask it to end, and wait for it; one that does not is a problem, and is killed."""
        self._ending = True
        if self.process is None:
            return
        if self.alive:
            self.process.terminate()
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            self.process.kill()
            self.process.wait()
            self.problems.append(f"{self.name} did not end within {seconds} s: {self.tail()}")
        else:
            if code:
                self.problems.append(f"{self.name} ended with {code}: {self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


class Daemon(Actor):
    """`headrace node start --foreground`.

    Args:
        work: a folder for its log.
        environment: with the runtime folder.
        rng: chooses how much memory each has.
    """

    weight = 4

    def __init__(self, work: Path, environment: dict[str, str], rng) -> None:
        super().__init__("daemon", "daemon", work, environment)
        self.rng = rng
        self.folder = Path(environment["HEADRACE_RUNTIME_DIR"])

    def command(self) -> list[str]:
        ram = self.rng.choice(["0B", "2M", "64M", "64M"])
        window = self.rng.choice(["1M", "256M", "256M"])
        own = ["--controller", "own"] if has("control") else []
        return headrace("node", "start", "--foreground", "--ram", ram, "--window", window, *own)

    def ready(self) -> bool:
        from headrace.node.daemon import ask_status
        from headrace.node.link import LinkLost
        from headrace.runtime import RuntimeFolder

        assert self.process is not None
        with contextlib.suppress(OSError, LinkLost):
            return bool(ask_status(RuntimeFolder(self.folder))["pid"] == self.process.pid)
        return False


class Controller(Actor):
    """`headrace control start --foreground`: the daemon reports to it, and does without it."""

    def __init__(self, work: Path, environment: dict[str, str]) -> None:
        super().__init__("controller", "controller", work, environment)
        runtime = Path(environment["HEADRACE_RUNTIME_DIR"])
        self.folder = runtime.with_name(f"{runtime.name}-control")
        self.database = work / "control.db"

    def command(self) -> list[str]:
        return headrace("control", "start", "--foreground", "--db", str(self.database))

    def ready(self) -> bool:
        return self.alive and (self.folder / "socket").exists()


class Program(Actor):
    """`headrace run` over a program that knows nothing of headrace, see `program`."""

    workers_role = "program"
    ends_with_worker = True

    def __init__(self, name: str, work: Path, environment: dict[str, str], folder: Path) -> None:
        super().__init__(name, "launcher", work, environment)
        page = work / f"{name}.page"
        self.page = Page(page)
        self.root = folder
        self.options = {"page": str(page), "folder": str(folder)}

    def command(self) -> list[str]:
        program = [sys.executable, "-m", "soak.program", json.dumps(self.options)]
        return headrace("run", "--quiet", "--root", str(self.root), "--", *program)

    def ready(self) -> bool:
        assert self.page is not None
        return self.alive and self.page.batches > 0

    def kill(self) -> bool:
        """A program whose launcher is killed goes on, as under `nice`; it is ended here."""
        killed = super().kill()
        self._end_programs()
        return killed

    def start(self) -> None:
        assert self.page is not None
        self._before = self.page.batches
        super().start()

    def end(self, seconds: float = START_S) -> None:
        page = self.page
        assert page is not None
        wait_for(lambda: page.batches > self._before)  # it has said what SIGTERM shall do
        super().end(seconds)
        self._end_programs()

    def _end_programs(self) -> None:
        """Those whose launcher was killed, found by their arguments."""
        mine = json.dumps(self.options).encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if mine in path.read_bytes() and int(path.parent.name) != os.getpid():
                    os.kill(int(path.parent.name), signal.SIGKILL)


def has(command: str) -> bool:
    """Whether this headrace has a command."""
    from headrace.cli.app import NAMES

    return command in NAMES


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from headrace.cli import main; main()", *arguments]


class Client(Actor):
    """A program that reads, see `client`."""

    def __init__(
        self, name: str, kind: str, work: Path, environment: dict[str, str], **options: object
    ) -> None:
        super().__init__(name, kind, work, environment | {"HEADRACE_JOB": f"job-{name[-1]}"})
        self.workers_role = "worker" if kind == "torch" else ""
        page = work / f"{name}.page"
        self.page = Page(page)
        self.options = {"kind": kind, "page": str(page), **options}
        if kind == "resume":
            self.options["state"] = str(work / f"{name}.state")

    def command(self) -> list[str]:
        return [sys.executable, "-m", "soak.client", json.dumps(self.options)]

    def ready(self) -> bool:
        assert self.page is not None
        return self.alive and self.page.batches > 0


def environment_of(work: Path) -> dict[str, str]:
    """Of all actors: everything that they make lies in folders that are looked at."""
    tests = Path(__file__).resolve().parents[1]
    return os.environ | {
        "PYTHONPATH": str(tests),
        "HEADRACE_RUNTIME_DIR": str(work / "rt"),
        "TMPDIR": str(work / "tmp"),
        "OMP_NUM_THREADS": "1",
    }
