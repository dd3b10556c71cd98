"""Checksums of buffers: of anything that holds bytes, and by blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace import _native

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def crc32c(data: Any, value: int = 0) -> int:
    """CRC-32C of a contiguous buffer of bytes, continued from `value`."""
    # numpy would cost commands that only write a document most of their time.
    view: Any = memoryview(data)
    return _native.crc32c(view.cast("B"), value) if view.nbytes else value


def crc32c_blocks(data: NDArray[np.uint8], block_bytes: int) -> NDArray[np.uint32]:
    """CRC-32C of each block of `block_bytes` bytes; the last block may be short."""
    return _native.crc32c_blocks(data, block_bytes)
