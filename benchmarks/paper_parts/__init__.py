"""The parts of `benchmarks/paper.py`: `run(options)` measures one paper's claims and returns what was seen.

Here is what they share: how much is measured, and a training program that is run and watched.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.05
TIMEOUT_S = 600.0

_READING = frozenset({0, 17, 19, 257, 295, 426, 35, 230})
"""System calls in which a thread reads: read, pread64, readv, openat, preadv, io_uring_enter; and the sleeps
that simulated storage consists of. x86-64's numbers."""

_SLEEPS = frozenset({35, 230})


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured."""

    dir: Path
    quick: bool
    tiny: bool = False
    """Does it work at all? For tests."""


def forget(files: Sequence[Path]) -> None:
    """Put files out of the page cache; dirty ones are written first."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Watch(threading.Thread):
    """Looks at every process below this one: CPU time, memory, and how many threads are reading.

    Args:
        trainer: the training process, whose main thread sleeps in the accelerator's place.
    """

    def __init__(self, trainer: int) -> None:
        super().__init__(daemon=True)
        self._trainer = trainer
        self._ending = threading.Event()
        self._cpu_s = processes.cpu_seconds_so_far()
        self._first_mb = self._peak_mb = self._memory_mb()
        self._threads: Counter[int] = Counter()
        self.start()

    def run(self) -> None:
        """Look until `end`."""
        look_again_s = 0.0
        while not self._ending.wait(LOOK_S):
            self._threads[self._reading()] += 1
            if (now := time.monotonic()) > look_again_s:
                self._peak_mb = max(self._peak_mb, self._memory_mb())
                look_again_s = now + (time.monotonic() - now) / processes.SAMPLE_DUTY

    def _memory_mb(self) -> float:
        return processes.memory_of(processes.tree(os.getpid())[1:]).private_mb

    def _reading(self) -> int:
        count = 0
        for pid in processes.tree(os.getpid())[1:]:
            for task in Path(f"/proc/{pid}/task").glob("*/syscall"):
                try:
                    number = task.read_text().split()[0]
                except OSError:  # it has ended
                    continue
                if number.isdigit() and int(number) in _READING:
                    own_sleep = int(number) in _SLEEPS and task.parent.name == str(self._trainer)
                    count += not own_sleep
        return count

    def end(self) -> dict[str, Any]:
        """CPU seconds, megabytes beyond what was there at the beginning, and looks by threads reading."""
        self._ending.set()
        self.join()
        return {
            "cpu_s": processes.cpu_seconds_so_far() - self._cpu_s,
            "memory_mb": max(0.0, self._peak_mb - self._first_mb),
            "reading": {str(n): looks for n, looks in sorted(self._threads.items())},
        }


def train(
    command: Sequence[str], environment: Mapping[str, str], cold: Sequence[Path]
) -> dict[str, Any]:
    """Run a program of `benchmarks/programs`; the page cache is without `cold` where an epoch begins.

    Raises:
        RuntimeError: it failed; the message has the end of what it wrote.
    """
    # Else each process compiles torch or TensorFlow again.
    environment = {k: v for k, v in environment.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        text=True, cwd=ROOT,
    ) as program:  # fmt: skip
        timer = threading.Timer(TIMEOUT_S, program.kill)
        timer.start()
        assert program.stdin is not None
        assert program.stdout is not None
        watch: Watch | None = None
        seen: dict[str, Any] = {}
        try:
            for line in program.stdout:
                word, _, rest = line.partition(" ")
                if line.startswith("{"):
                    seen |= json.loads(line)
                    continue
                if word == "begin":
                    forget(cold)
                    watch = watch or Watch(int(rest))
                elif word == "end" and watch is not None:
                    seen |= watch.end()
                else:
                    continue
                program.stdin.write("\n")
                program.stdin.flush()
        finally:
            timer.cancel()
        if program.wait() or "bytes" not in seen:
            errors.seek(0)
            raise RuntimeError(
                f"{' '.join(command[:6])} ... ended with {program.returncode}: {errors.read()[-2000:]}"
            )
    return seen
