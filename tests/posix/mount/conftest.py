"""Mounts for tests: each is taken away when its test is over, whatever became of it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.errors import MountError
from headrace.posix.mount import MountedStore, MountOptions, mount
from headrace.posix.mount.process import TYPE, attach, detach, mounted_at
from tests_shared import comes_true

if TYPE_CHECKING:
    from collections.abc import Iterator


def table() -> set[str]:
    """Folders on which this process's tests mounted something; other processes mount, too."""
    lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    own = f"/popen-{worker}/" if worker else "/"
    places = {line.split()[4] for line in lines if f" - {TYPE} " in line}
    return {place for place in places if own in place}


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="session")
def fuse(tmp_path_factory) -> None:
    """Skips where this user cannot mount."""
    folder = tmp_path_factory.mktemp("probe")
    try:
        device = attach(str(folder), "probe")
    except MountError as e:
        pytest.skip(f"no FUSE here: {e}")
    os.close(device)
    detach(str(folder), lazy=True)


class Mounts:
    """Makes mounts and remembers them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.states: list[MountedStore] = []

    def folder(self) -> Path:
        """A new empty folder."""
        path = self._folder / f"mount-{len(list(self._folder.glob('mount-*')))}"
        path.mkdir()
        return path

    def __call__(self, store: Path, folder: Path | None = None, **options) -> Path:
        """Mounts a store in the background."""
        target = folder or self.folder()
        self.states.append(mount(str(store), str(target), MountOptions(**options)))
        return target

    @staticmethod
    def gone(pid: int) -> bool:
        """Whether a process has ended."""
        return gone(pid)

    @staticmethod
    def table() -> set[str]:
        """Folders on which a store is mounted."""
        return table()

    def take_away(self) -> None:
        for state in self.states:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGCONT)
            if mounted_at(state.folder) is not None:
                detach(state.folder, lazy=True)
            with contextlib.suppress(ProcessLookupError):
                if not comes_true(lambda state=state: gone(state.pid)):
                    os.kill(state.pid, signal.SIGKILL)
                    pytest.fail(f"process {state.pid} outlived its mount")


@pytest.fixture
def mounts(fuse, tmp_path, monkeypatch) -> Iterator[Mounts]:
    """Mounts stores; nothing is left in the mount table, no process and no temporary file."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary))
    before = table()
    new_mounts = Mounts(tmp_path)
    yield new_mounts
    new_mounts.take_away()
    assert table() <= before
    assert not list(temporary.iterdir())


@pytest.fixture(scope="module")
def module_mounts(fuse, tmp_path_factory) -> Iterator[Mounts]:
    """As `mounts`, for all tests of a module."""
    new_mounts = Mounts(tmp_path_factory.mktemp("mounts"))
    yield new_mounts
    new_mounts.take_away()
