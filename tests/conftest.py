"""Data that many tests share: a small folder of images, and the store packed from it."""

from __future__ import annotations

import random
import shutil
import struct
import zlib
from pathlib import Path

import pytest

import headrace as hr

CLASSES = ("cats", "dogs", "owls")
IMAGES_PER_CLASS = 12


def png(seed: int, side: int = 8) -> bytes:
    """A valid PNG of noise, different for each seed."""
    noise = random.Random(seed)
    rows = b"".join(b"\0" + noise.randbytes(3 * side) for _ in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def write_photos(folder: Path, per_class: int = IMAGES_PER_CLASS) -> Path:
    """Writes a folder of PNG files, a folder per class."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            path = folder / name / f"{i}.png"
            path.write_bytes(png(label * per_class + i, side=4 + i))
    return folder


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
