"""`--update-contract` writes the kept texts anew: `python -m pytest tests/contract --update-contract`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-contract", action="store_true", help="write tests/contract/expected anew"
    )


@pytest.fixture
def updating(request: pytest.FixtureRequest) -> bool:
    """Whether the kept texts are to be written anew."""
    # The option is unknown where pytest was not started with this folder by name.
    return bool(request.config.getoption("--update-contract", default=False))


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, without settings of this machine, its user or another test."""
    import os

    for name in list(os.environ):
        if name.startswith(("HEADRACE_", "SLURM_", "DLIO_")):
            monkeypatch.delenv(name)
    for name, value in {
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "TZ": "UTC",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
