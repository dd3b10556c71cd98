"""Small data sets and the tools to look at them and to damage them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.store import Store


def make_folder(root: Path, *, seed: int = 1, classes: int = 3, files: int = 20, size: int = 3000):
    """A folder in ImageFolder's shape; returns {name: bytes}."""
    r = random.Random(seed)
    want = {}
    for c in range(classes):
        folder = root / f"class{c}"
        folder.mkdir(parents=True)
        for i in range(files):
            data = r.randbytes(r.choice([0, 1, r.randrange(size), size]))
            (folder / f"{i}.bin").write_bytes(data)
            want[f"class{c}/{i}.bin"] = data
    return want


def contents(store: Store) -> dict[str, bytes]:
    """All single-part samples of a store."""
    return {name: bytes(store.read(i)) for i, name in enumerate(store.names)}


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flips bits of one byte."""
    data = bytearray(path.read_bytes())
    before = data[offset]
    data[offset] ^= mask
    path.write_bytes(data)
    assert path.read_bytes()[offset] != before


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    root = tmp_path / "photos"
    return root, make_folder(root)


@pytest.fixture(params=["reference", "native"])
def reference(request: pytest.FixtureRequest) -> bool:
    """Both directories and readers, the plain one and the native one."""
    return request.param == "reference"


COMPRESSIONS = ("gz", "bz2", "xz", "zst")


def compress(end, data):
    """`data` as one stream of the compression whose files end so."""
    if end == "zst":
        return pytest.importorskip(
            "zstandard", reason="the extra `text` is not installed"
        ).compress(data)
    return {"gz": gzip, "bz2": bz2, "xz": lzma}[end].compress(data)
