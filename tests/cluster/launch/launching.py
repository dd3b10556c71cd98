"""Launches for tests: `headrace launch` as a process, and the proof that nothing of it is left."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace as hr
from tests_shared import comes_true

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

HEADRACE = (sys.executable, "-c", "from headrace.cli import main; main()")
TRAINER = Path(__file__).with_name("trainer.py")
MARK = "TEST_LAUNCH_MARK"


def processes_with(mark: str) -> dict[int, str]:
    """Living processes that inherited the mark, and their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        try:
            if wanted not in (path / "environ").read_bytes().split(b"\0"):
                continue
            if (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue
    return found


def open_below(folder: Path) -> list[str]:
    """Files below a folder that any process of this machine has open, unnamed ones too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(path.readlink())
        except OSError:
            continue
        if target.startswith(f"{folder}/"):
            found.append(f"{path}: {target}")
    return found


class Launch:
    """One `headrace launch` in a folder of its own.

    Attributes:
        mark: that all of its processes inherit.
        disk: the nodes' local disk.
        process: of the launcher.
    """

    def __init__(self, folder: Path, disk: Path | None = None) -> None:
        self.folder = folder
        self.disk = disk or Path(tempfile.mkdtemp(prefix="hr-"))  # a socket's path is short
        self.mark = secrets.token_hex(8)
        self.process: subprocess.Popen[str] | None = None
        self.report_file = folder / "report.json"

    def start(
        self, *words: str, nodes: int = 2, without: tuple[str, ...] = (), **environment: str
    ) -> Launch:
        """Begins; `words` are options, the script and its arguments."""
        clean = {
            k: v for k, v in os.environ.items()
            if not k.startswith(("SLURM", "HEADRACE", "RANK", "WORLD_SIZE"))
        }  # fmt: skip
        if "--agent" not in words:
            words = ("--no-agent", *words)  # it costs a second of CPU on each node
        names = ",".join(f"n{i}" for i in range(nodes))
        own = {
            "HEADRACE_JOB_NODES": names, "HEADRACE_JOB_ID": "7", MARK: self.mark,
            "HEADRACE_HISTORY": str(self.folder / "history"), **environment,
        }  # fmt: skip
        for name in without:
            own.pop(name, None)
        self.process = subprocess.Popen(
            [*HEADRACE, "launch", "--local", str(self.disk), "--report", str(self.report_file), *words],
            cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**clean, **own},
        )  # fmt: skip
        return self

    def end(self, seconds: float = 60.0) -> tuple[int, str, str]:
        """Waits for it: exit status, output, errors."""
        assert self.process is not None
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = self.process.communicate()
            raise AssertionError(f"the launch did not end:\n{out}\n{err}") from None
        return self.process.returncode, out, err

    def kill_all(self) -> None:
        """For tests that went wrong."""
        for pid in processes_with(self.mark):
            os.kill(pid, signal.SIGKILL)

    @property
    def report(self) -> dict[str, Any]:
        """What `--report` wrote."""
        found: dict[str, Any] = json.loads(self.report_file.read_text())
        return found

    def pids(self, words: str) -> list[int]:
        """Its processes whose command lines hold some words."""
        return [pid for pid, line in processes_with(self.mark).items() if words in line]

    def ranks(self) -> list[int]:
        """Of `TRAINER`; the launcher has its name in its words, too."""
        return self._running(f"{sys.executable} {TRAINER}")

    def _running(self, words: str) -> list[int]:
        """Its processes whose command lines begin so; srun and the launcher hold them further on."""
        return [pid for pid, line in processes_with(self.mark).items() if line.startswith(words)]

    def guards(self) -> list[int]:
        """The guard of each node: a supervisor is its child, with the same command line."""
        both = self._running(f"{sys.executable} -m headrace.cluster.launch.node")
        return [pid for pid in both if parent(pid) not in both]

    def supervisors(self) -> list[int]:
        """The supervisor of each node."""
        both = self._running(f"{sys.executable} -m headrace.cluster.launch.node")
        return [pid for pid in both if parent(pid) in both]

    def wait_for_steps(self, log: Path, ranks: int, steps: int = 1, seconds: float = 40.0) -> None:
        """Until every rank has made some steps in this life."""

        def there() -> bool:
            files = [p for p in log.glob("rank-*") if p.read_text().count("\n") >= steps]
            return len({p.name.split(".")[0] for p in files}) >= ranks

        if not comes_true(there, seconds):
            self.kill_all()
            out, err = self.end()[1:] if self.process else ("", "")
            raise AssertionError(f"no {ranks} ranks made {steps} steps:\n{out}\n{err}")

    def left(self) -> list[str]:
        """What is left of it: processes, their sockets and memory with them, files, staged bytes."""
        found = [f"process {pid}: {line}" for pid, line in processes_with(self.mark).items()]
        found += [f"file {p}" for p in self.disk.rglob("*")]
        found += [f"open {text}" for text in open_below(self.disk)]
        found += [f"folder {p}" for p in self.folder.glob(".headrace-launch-*")]
        return found

    def leaves_nothing(self, seconds: float = 15.0) -> list[str]:
        """What is left a little later; what was still ending has ended."""
        comes_true(lambda: not self.left(), seconds)
        return self.left()


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def seen_counts(checkpoints: Path, ranks: int) -> np.ndarray:
    """What all ranks together have learned from, by their last checkpoint: (epochs, samples)."""
    trees = [
        hr.checkpoint.load(checkpoints, rank=rank, world_size=ranks).tree for rank in range(ranks)
    ]
    total: np.ndarray = sum(tree["parts"]["seen"]["counts"] for tree in trees)
    return total


def steps_logged(log: Path) -> Iterator[tuple[int, int, list[int]]]:
    """Every step that any rank has made in any life: epoch, step, samples."""
    for path in sorted(log.glob("rank-*")):
        for line in path.read_text().splitlines():
            epoch, step, indices = json.loads(line)
            yield epoch, step, indices
