"""The checksum of a buffer: of anything that holds bytes."""

from typing import Any

from headrace import _native


def crc32c(data: Any, value: int = 0) -> int:
    """CRC-32C of a contiguous buffer of bytes, continued from `value`."""
    # numpy would cost commands that only write a document most of their time.
    view: Any = memoryview(data)
    return _native.crc32c(view.cast("B"), value) if view.nbytes else value
