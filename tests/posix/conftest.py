"""Folders of files of many kinds, and planes that serve them."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from posix_placing import Plane


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder of files that programs of all kinds read. Not to be changed."""
    root = tmp_path_factory.mktemp("unmodified") / "data"
    (root / "deep" / "er").mkdir(parents=True)
    draw = random.Random(1)
    for i in range(12):
        (root / f"f{i:02}.bin").write_bytes(draw.randbytes(i * 977))
    (root / "deep" / "er" / "text.txt").write_text("".join(f"line {i}\n" for i in range(500)))
    (root / "empty").write_bytes(b"")
    (root / "deep" / "odd name ü\n.dat").write_bytes(b"odd")
    os.symlink("f03.bin", root / "link")
    os.symlink("deep", root / "folder")
    (root / "f06.bin").chmod(0o640)
    # Looked at after it was changed: with relatime, reading it changes nothing any more.
    for path in filter(Path.is_file, root.rglob("*")):
        odd = 1_234_567_890_123_456_789 if path.name == "f05.bin" else path.stat().st_mtime_ns
        os.utime(path, ns=(time.time_ns() + 3_600_000_000_000, odd))
    return root


@pytest.fixture
def plane():
    """Makes planes; all are closed after the test."""
    planes = []

    def make(root, **options):
        planes.append(Plane(root, **options))
        return planes[-1]

    yield make
    for one in planes:
        one.close()
