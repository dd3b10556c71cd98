"""The two seeded data sets, A and B: how many samples, how long, and what is in them.

Pure functions of (name, scale): nothing here touches the disk, `forms` does. A sample carries its
own index in its first 8 bytes and the same index, masked, in its last 8, so that whoever receives
it can say which sample it is and whether it arrived whole by touching 16 bytes. Between them lie
bytes of a seeded random pool at an offset that depends on the index: incompressible, and no two
samples alike.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Name = Literal["A", "B"]
NAMES: tuple[Name, ...] = ("A", "B")

VERSION = 1
"""Raise it when the content of a sample changes: it is part of the folder's name."""

CLASSES = 1000
TAIL_MASK = 0xA5C3_5A3C_0F1E_E1F0
STAMP = struct.Struct("<Q")
STAMPS_BYTES = 2 * STAMP.size

_SEED = 20261121
_POOL_BYTES = 16 << 20
_KNUTH = 2654435761  # spreads neighbouring indices over the pool


@dataclass(frozen=True, slots=True)
class DataSet:
    """One data set at one scale."""

    name: Name
    """A: images' sizes. B: tiny samples."""

    samples: int
    """How many samples it has."""

    batch_size: int
    """The batch that every engine delivers."""

    @property
    def folder(self) -> str:
        """Names the data set on disk; another scale or version is another folder."""
        return f"{self.name}-{self.samples}-v{VERSION}"

    @property
    def total_bytes(self) -> int:
        """The sum of all samples' lengths."""
        return int(sizes(self).sum())


def data_set(name: Name, scale: float = 1.0) -> DataSet:
    """Data set `name`, shrunk to `scale` of its samples."""
    full, batch_size = {"A": (50_000, 256), "B": (1_000_000, 1024)}[name]
    samples = round(full * scale)
    if samples < 1:
        raise ValueError(f"scale {scale} leaves no sample of data set {name}")
    return DataSet(name=name, samples=samples, batch_size=batch_size)


@functools.lru_cache(maxsize=4)
def sizes(data: DataSet) -> NDArray[np.int64]:
    """The length of each sample in bytes."""
    rng = np.random.default_rng([_SEED, ord(data.name)])
    if data.name == "B":
        drawn = rng.integers(512, 4096, size=data.samples, endpoint=True)
    else:
        # A lognormal's mean is exp(mu + sigma^2 / 2): this mu makes it 110 kB before the clip.
        sigma = 0.5
        mu = np.log(110_000) - sigma**2 / 2
        drawn = np.clip(rng.lognormal(mu, sigma, size=data.samples), 4_000, 1_000_000)
    lengths: NDArray[np.int64] = drawn.astype(np.int64)
    lengths.flags.writeable = False
    return lengths


@functools.cache
def _pool() -> bytes:
    return np.random.default_rng(_SEED).bytes(_POOL_BYTES)


def payload(data: DataSet, index: int) -> bytes:
    """The bytes of sample `index`."""
    middle = int(sizes(data)[index]) - STAMPS_BYTES
    start = index * _KNUTH % (_POOL_BYTES - middle)
    return b"".join(
        (
            STAMP.pack(index),
            _pool()[start : start + middle],
            STAMP.pack(index ^ TAIL_MASK),
        )
    )


def label(index: int) -> int:
    """The class of sample `index`."""
    return index % CLASSES


def file_name(index: int) -> str:
    """The path of sample `index` below the data set's folder of files."""
    return f"n{label(index):04d}/{index:07d}.bin"


def epoch_order(data: DataSet, seed: int) -> NDArray[np.int64]:
    """The exact random order that is handed to engines which have no order of their own."""
    return np.random.default_rng(seed).permutation(data.samples)
