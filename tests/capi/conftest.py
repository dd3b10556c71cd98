"""The example program as a user compiles it, and the library over ctypes for what it does not show."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from capi.compiling import EXAMPLE, Line, compile_c, printed
from capi.library import Library
from headrace import capi

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Compiles a C source as strict C99."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed")
    folder = tmp_path_factory.mktemp("c")

    def make(source: Path) -> Path:
        return compile_c(source, folder)

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
        return printed(ended.stdout)

    run.program = program  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="session")
def library() -> Library:
    return Library(capi.library_dir() / "libheadrace.so")
