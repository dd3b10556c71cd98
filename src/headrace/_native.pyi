from typing import Annotated

import numpy
from numpy.typing import NDArray


build_type: str = 'Release'

def crc32c(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], value: int = 0) -> int:
    """CRC-32C of a one-dimensional uint8 array, continued from `value`."""

def crc32c_blocks(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], block_bytes: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
    """
    CRC-32C of each block of `block_bytes` bytes; the last block may be short.
    """

crc32c_implementation: str = 'sse4.2'

class Permutation:
    """A keyed permutation of [0, n) in O(1) memory."""

    def __init__(self, n: int, key: int) -> None: ...

    @property
    def n(self) -> int:
        """The number of elements."""

    @property
    def key(self) -> int:
        """The 64-bit key."""

    def range(self, start: int, stop: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The indices at positions start to stop - 1."""

    def at(self, positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The index at each position (int64)."""

    def inverse(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The position of each index (int64)."""

    def __getstate__(self) -> tuple[int, int]: ...

    def __setstate__(self, state: tuple[int, int]) -> None: ...

def order_hash(position_start: int, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Sum over the batch of a hash of (position, index), mod 2^64."""
