"""Data that many tests share: a small folder of images, and the store packed from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import headrace as hr
from tests_shared import write_photos


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 36 PNG files in three class folders. Not to be changed."""
    return write_photos(tmp_path_factory.mktemp("source") / "photos")


@pytest.fixture(scope="session")
def packed_photos(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store packed from `photos`. Not to be changed: see `own_store`."""
    target = tmp_path_factory.mktemp("packed") / "photos.hr"
    hr.pack(photos, target)
    return target


@pytest.fixture
def own_store(packed_photos: Path, tmp_path: Path) -> Path:
    """A copy of `packed_photos` that the test may damage."""
    return Path(shutil.copytree(packed_photos, tmp_path / "own.hr"))
