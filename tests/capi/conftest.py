"""The example program as a user compiles it, and the library over ctypes for what it does not show."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from capi.library import Library
from headrace import capi

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "c" / "read_epoch.c"


class Line(NamedTuple):
    """A line of `read_epoch -v`."""

    epoch: int
    position: int
    index: int
    label: int
    nbytes: int
    crc: int


def flags() -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", "config", "--cflags", "--libs"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return shlex.split(ended.stdout)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Compiles a C source as strict C99."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed")
    folder = tmp_path_factory.mktemp("c")

    def make(source: Path) -> Path:
        program = folder / source.stem
        subprocess.run(
            ["cc", "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O1", "-g", "-pedantic", "-Wall",
             "-Wextra", "-Werror", source, *flags(), "-o", program],
            check=True, timeout=120,
        )  # fmt: skip
        return program

    return make


@pytest.fixture(scope="session")
def read_epoch(compiled: Callable[[Path], Path]) -> Callable[..., tuple[list[Line], str]]:
    """Runs the example with `-v`; returns its lines and its last one."""
    program = compiled(EXAMPLE)

    def run(where: str | Path, *options: str) -> tuple[list[Line], str]:
        ended = subprocess.run(
            [program, "-v", *options, where],
            check=False, capture_output=True, text=True, timeout=120, env={},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        *lines, last = ended.stdout.splitlines()
        return [Line(*map(int, line.split()[:5]), int(line.split()[5], 16)) for line in lines], last

    run.program = program  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="session")
def library() -> Library:
    return Library(capi.library_dir() / "libheadrace.so")
