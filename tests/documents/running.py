"""Running: the blocks of a page, one after the other, as a reader would type them.

In a folder with real images in `photos/`, a folder per class; it is the reader's home, too. Folder and
exported variables last from block to block. What a page starts, it must stop.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import warm
from documents.blocks import blocks_of, page_remarks
from documents.output import difference
from tests_shared import CLIPART, ROOT, comes_true, until, write_photos

if TYPE_CHECKING:
    from collections.abc import Mapping

    from documents.blocks import Block

__all__ = ["Reader", "read_page"]

TIMEOUT_S: Final = 150
CLASSES: Final = ("cats", "dogs", "owls")


def read_page(page: Path, folder: Path, environment: Mapping[str, str] | None = None) -> int:
    """Runs the blocks of a page in an empty folder; returns how many. What fails is an AssertionError."""
    with Reader(page, folder, environment) as reader:
        for block in blocks_of(page):
            reader.take(block)
    return reader.ran


class Reader:
    """Somebody who works through one page. Use it as a context: it stops what it started."""

    def __init__(
        self,
        page: Path,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ):
        self._interpreter = python
        self.ran = 0
        self.folder = folder / "home"
        self._state = folder / "state"
        self._state.mkdir(parents=True)
        _real_photos(self.folder / "photos")
        (self._state / "cwd").write_text(str(self.folder))
        self._here = {}
        for kind, text in page_remarks(page):
            if kind == "here":
                there, _, here = text.partition(" = ")
                self._here[there] = here or str(_free_port())
        self._servers: list[tuple[Block, subprocess.Popen[str]]] = []
        base = environment or os.environ
        self.environment = {
            **{k: v for k, v in base.items() if k == "SLURM_CONF" or not k.startswith(_FOREIGN)},
            "PATH": f"{_commands(folder / 'bin', python)}:{base['PATH']}",
            "HOME": str(self.folder),
            "HEADRACE_RUNTIME_DIR": str(folder / "run"),
            "ROOT": str(ROOT),
            "COLUMNS": "100",
            "LC_ALL": "C.UTF-8",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._stop_servers()
        finally:
            left = self._end_what_is_left()
        assert kind or not left, f"still running after the page's end: {left}"

    def _stop_servers(self, of: Block | None = None) -> None:
        """Ends what goes on as Ctrl-C would; what takes it amiss is an error."""
        for block, server in [each for each in self._servers if of in (None, each[0])]:
            self._servers.remove((block, server))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
            assert server.returncode in (0, 130, -signal.SIGINT), (
                f"{block.place}: {server.returncode}"
            )

    def _end_what_is_left(self) -> dict[int, str]:
        comes_true(lambda: not self._left())
        left = self._left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def take(self, block: Block) -> None:
        """Does with a block what its language and its remarks say."""
        if before := block.remarks.get("before"):
            self._shell(before, block)
        if name := block.remarks.get("file"):
            cwd = Path((self._state / "cwd").read_text().strip())
            (cwd / name).write_text(self._of_here(block.text))
        elif block.runs:
            self.ran += 1
            if block.language in ("python", "py"):
                self._python(block)
            elif block.language == "console":
                self._console(block)
            elif "serves" in block.remarks:
                self._serve(block.text, block)
            else:
                self._shell(block.text, block)
        if after := block.remarks.get("after"):
            self._stop_servers(of=block)
            self._shell(after, block)

    def _python(self, block: Block) -> None:
        cwd = (self._state / "cwd").read_text().strip()
        if "torch" not in block.text or self._interpreter != sys.executable:
            self._ends_well([self._interpreter, *_WARNINGS, "-c", block.text], block, cwd)
            return
        ended = warm.run(
            block.text, warnings=["error"], cwd=cwd, env=self.environment, timeout=TIMEOUT_S
        )
        self._check(ended.returncode, ended.stdout + ended.stderr, block)

    def _console(self, block: Block) -> None:
        """Commands behind `$`, each with the output that the page shows below it, if it shows any."""
        first, *parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
        assert not first, f"{block.place}: {first!r} comes before the first `$ `"
        for part in parts:
            lines = part.splitlines(keepends=True)
            length = next(i for i, line in enumerate(lines, 1) if not line.endswith("\\\n"))
            command, shown = "".join(lines[:length]), "".join(lines[length:])
            run = self._serve if "serves" in block.remarks else self._shell
            said = run(command, block)
            if shown.strip():
                found = difference(shown, said)
                assert not found, f"{block.place}: {command}{found}\nall of it:\n{said}"

    def _shell(self, script: str, block: Block) -> str:
        state = self._state
        whole = (
            f'[ -f {state}/env ] && . {state}/env; cd "$(cat {state}/cwd)"\n'
            f"trap 'rc=$?; pwd >{state}/cwd; export -p >{state}/env; exit $rc' EXIT\n"
            f"set -euo pipefail\n{self._of_here(script)}"
        )  # fmt: skip
        return self._ends_well(["bash", "-c", whole], block, self.folder)

    def _serve(self, script: str, block: Block) -> str:
        """Starts what goes on, and waits until it says what it is known by."""
        log = self._state / f"serves-{block.line}-{len(self._servers)}"
        cwd = (self._state / "cwd").read_text().strip()
        with log.open("w") as out:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {self._of_here(script).strip()}"],
                cwd=cwd, env=self.environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        self._servers.append((block, server))
        wanted = block.remarks["serves"]
        until(lambda: wanted in log.read_text() or server.poll() is not None, 60.0)
        assert wanted in log.read_text(), f"{block.place}: {log.read_text()}"
        return log.read_text()

    def _ends_well(self, command: list[str], block: Block, cwd: str | Path) -> str:
        ended = subprocess.run(
            command, cwd=cwd, env=self.environment, check=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
        )  # fmt: skip
        said = ended.stdout.decode(errors="replace")
        self._check(ended.returncode, said, block)
        return said

    def _check(self, code: int, said: str, block: Block) -> None:
        wanted = int(block.remarks.get("ends with", "0"))
        assert code == wanted, f"{block.place} ended with {code}:\n{said}"

    def _of_here(self, text: str) -> str:
        for there, here in self._here.items():
            text = text.replace(there, here)
        return text

    def _left(self) -> dict[int, str]:
        """Processes that the page started, by their runtime folder."""
        mark = f"HEADRACE_RUNTIME_DIR={self.environment['HEADRACE_RUNTIME_DIR']}".encode()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found[int(process.name)] = (
                        (process / "cmdline").read_bytes().decode().replace("\0", " ")
                    )
        return found


# Ray warns of its own defaults.
_WARNINGS: Final = ("-W", "error", "-W", "ignore::DeprecationWarning:ray.data.context")

_FOREIGN: Final = ("SLURM", "SBATCH", "HEADRACE", "AWS_", "XDG_", "OMPI_", "PMI")


def _commands(folder: Path, python: str) -> Path:
    """A folder with the package's commands and `python`, of one interpreter."""
    folder.mkdir()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        code = f"import sys; sys.argv[0] = '{name}'; from {module} import {function} as f; sys.exit(f())"
        (folder / name).write_text(f'#!/bin/sh\nexec "{python}" -c "{code}" "$@"\n')
    for name in ("python", "python3"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    for command in folder.iterdir():
        command.chmod(0o755)
    return folder


def _real_photos(folder: Path) -> None:
    """72 images of clip art under the names of `write_photos`, or noise where there is no clip art."""
    write_photos(folder, per_class=24)
    if not CLIPART.is_dir():
        return
    found = sorted((CLIPART / "animals").rglob("*.png"), key=lambda p: (p.stat().st_size, p))
    # Palettes with transparency make PIL warn, and warnings are errors here.
    plain = (path for path in found if path.read_bytes()[25:26] in (b"\2", b"\6"))
    for path in sorted(folder.rglob("*.png")):
        shutil.copy(next(plain), path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
