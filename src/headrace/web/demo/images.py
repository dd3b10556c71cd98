"""Images: a small store of pictures for the demo, drawn here, so that nobody's data are shown."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["demo_store", "png"]

SIDE: Final = 192
KINDS: Final = ("ripples", "dunes", "petals")
EACH: Final = 40


def png(pixels: NDArray[np.uint8]) -> bytes:
    """[height, width, 3] as a PNG file."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def demo_store(path: Path) -> Path:
    """Pack the demo's store at a path that does not exist."""
    from headrace import pack

    pack(_samples(), path)
    return path


def _samples() -> Iterator[dict[str, object]]:
    random = np.random.default_rng(11)
    y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    for label, kind in enumerate(KINDS):
        for number in range(EACH):
            cx, cy, turn, fine = random.uniform(-0.6, 0.6, 4)
            r, angle = np.hypot(x - cx, y - cy), np.arctan2(y - cy, x - cx)
            if kind == "ripples":
                wave = np.sin(18 * (1 + fine / 2) * r + 6 * turn)
            elif kind == "dunes":
                wave = np.sin(9 * y + 3 * np.sin(4 * x + 5 * turn) + 4 * fine)
            else:
                wave = np.cos(round(3 + 4 * abs(turn)) * angle + 5 * fine) - 2.2 * r + 0.6
            tint = random.uniform(0.35, 1.0, 3)
            light = (0.5 + 0.5 * np.tanh(1.6 * wave))[..., None] * tint + 0.12 * (1 - r)[..., None]
            yield {
                "name": f"{kind}/{number:03d}.png",
                "data": png((255 * np.clip(light, 0, 1)).astype(np.uint8)),
                "label": label,
            }
