"""What the samples of these tests hold."""

from __future__ import annotations

SAMPLES = 60
BATCH = 16
STEPS = 4
LENGTH = 64


def content(index: int) -> bytes:
    """The bytes of a sample: its index, and as many bytes as that asks for."""
    return index.to_bytes(4, "little") + bytes([index % 256]) * (20 + 7 * index % 100)
