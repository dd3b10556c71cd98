"""Data that tests of several rooms make: small images and folders of them."""

from __future__ import annotations

import random
import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

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
