"""C programs as users compile them, and what the example prints."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "c" / "read_epoch.c"


class Line(NamedTuple):
    """A line of `read_epoch -v`."""

    epoch: int
    position: int
    index: int
    label: int
    nbytes: int
    crc: int


def flags() -> list[str]:
    """What `headrace config` tells a compiler."""
    ended = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", "config", "--cflags", "--libs"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return shlex.split(ended.stdout)


def compile_c(source: Path, folder: Path) -> Path:
    """Compiles a source as strict C99; returns the program."""
    program = folder / source.stem
    subprocess.run(
        ["cc", "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O1", "-g", "-pedantic", "-Wall",
         "-Wextra", "-Werror", source, *flags(), "-o", program],
        check=True, timeout=120,
    )  # fmt: skip
    return program


def printed(out: str) -> tuple[list[Line], str]:
    """The example's lines, and its last one."""
    *lines, last = out.splitlines()
    return [Line(*map(int, line.split()[:5]), int(line.split()[5], 16)) for line in lines], last
