"""Small stores whose samples say who they are."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import headrace as hr

SAMPLES = 503  # prime: no batch or world size divides it


def content(index: int) -> bytes:
    """Bytes that name their sample, of very different lengths; every 50th sample is empty."""
    if index % 50 == 7:
        return b""
    random = np.random.default_rng(index)
    return struct.pack("<Q", index) + random.bytes(int(random.integers(0, 9000)))


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plane") / "store.hr"
    hr.pack(((f"{i:05d}", content(i), i % 7) for i in range(SAMPLES)), folder)
    return folder


@pytest.fixture
def store(packed):
    with hr.open(packed) as opened:
        yield opened


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder of files in the classes c0 to c6, and what is in them by name."""
    folder = tmp_path_factory.mktemp("photos")
    files = {}
    for i in range(SAMPLES):
        name = f"c{i % 7}/{i:05d}.bin"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content(i))
        files[name] = content(i)
    return folder, files
