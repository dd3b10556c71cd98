"""Native doors: the one place of `store` that touches `headrace._native`.

Checksums are always native. Bigger pieces (the mapped directory, the name-tree builder, the batched
reader) are asked for by name, so that the plain-Python reference takes over where one is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]  # Python 3.12 and newer

    from numpy.typing import NDArray

_native: Any = importlib.import_module("headrace._native")


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C of a contiguous buffer of bytes, continued from `value`."""
    return int(_native.crc32c(np.frombuffer(data, np.uint8), value))


def crc32c_blocks(data: NDArray[np.uint8], block_bytes: int) -> NDArray[np.uint32]:
    """CRC-32C of each block of `block_bytes` bytes; the last block may be short."""
    checksums: NDArray[np.uint32] = _native.crc32c_blocks(data, block_bytes)
    return checksums


def find(name: str) -> Any | None:
    """The native function or class `name`, or None where this build has none."""
    return getattr(_native, name, None)
