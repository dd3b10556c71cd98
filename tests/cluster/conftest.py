"""A real Slurm for the tests of this folder, or the reason why there is none."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.slurm import Slurm, missing
from cluster.story import add_option as pytest_addoption  # noqa: F401 - a hook

pytest.register_assert_rewrite("cluster.executor_tests")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def real_slurm() -> Iterator[Slurm]:
    """Four nodes with two GPUs each. Not to be used as it is: see `slurm`."""
    if lacks := missing():
        text = f"no {', '.join(lacks)}: `tools/debian-packages cluster` as root installs them"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    # The socket of munge lies in it, and a socket's path is short.
    folder = Path(tempfile.mkdtemp(prefix="headrace-slurm-"))
    try:
        with Slurm(folder / "s") as slurm:
            yield slurm
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(real_slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A real Slurm that this process's commands find: all nodes idle, no job; so it is left, too."""
    for name in [n for n in os.environ if n.startswith(("SLURM", "SBATCH", "SRUN"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(real_slurm.conf))
    if "XDG_STATE_HOME" not in os.environ:  # what is written down of jobs stays with their cluster
        monkeypatch.setenv("XDG_STATE_HOME", str(real_slurm.folder / "home"))
    monkeypatch.setenv("PATH", real_slurm.environment["PATH"])
    real_slurm.heal()
    yield real_slurm
    real_slurm.heal()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes programs that stand in for Slurm's; no other ones are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin/nowhere:/bin/nowhere")

    def make(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        path.chmod(0o755)
        return path

    return make
