"""How much the tiers take: plain functions of sizes."""

from __future__ import annotations

__all__ = [
    "disk_reserve",
    "publish_after_s",
    "ram_quota",
    "segment_bytes",
    "writer_share",
    "writes_direct",
]

_MIB = 1 << 20
_GIB = 1 << 30

RAM_SHARE = 0.5
"""Of the memory that is available: the training program needs the rest."""

BUSY_SHARE = 0.15
"""Of a data set that is packed in an epoch whose consumer only waits: all of it after seven."""

SLOW_BYTES_PER_S = 400e6
"""Less than any local NVMe device gives, more than most shared file systems give a node."""

RAM_RESERVE_BYTES = 2 * _GIB
"""Memory that is left alone, however much there is."""


def ram_quota(given: int | str | None, *, far: bool, data_bytes: int, available_bytes: int) -> int:
    """Bytes of the RAM tier; 0 for none.

    Args:
        given: a quota, `auto`, or None for the default: `auto` where the source is far, else none.
            Local volumes have the page cache, and a copy of it would take the memory twice.
        far: the source is remote, or behaves so.
        data_bytes: of all samples.
        available_bytes: memory that can be taken.
    """
    if isinstance(given, int):
        return given
    if given is None and not far:
        return 0
    room = min(RAM_SHARE * available_bytes, available_bytes - RAM_RESERVE_BYTES)
    # An eighth more than the data: slabs are not filled to the last byte.
    return max(0, min(int(room), data_bytes + data_bytes // 8 + 4 * _MIB))


def segment_bytes(data_bytes: int) -> int:
    """Bytes that are published at a time: what a kill can cost, and one file of the cache."""
    return min(max(data_bytes // 32, 64 * _MIB), _GIB)


def publish_after_s(segments: int) -> float:
    """Seconds after which a segment is published though it is not full.

    A slow source would otherwise make thousands of small segments: the more there are, the longer.
    """
    return 30.0 * max(1.0, segments / 64)


def disk_reserve(disk_bytes: int) -> int:
    """Bytes of a file system that a cache without a quota leaves free."""
    return min(disk_bytes // 20, 2 * _GIB)


def writer_share(source_bytes_per_s: float, waiting: float) -> float:
    """Bytes that may be written to the cache for each byte that is delivered.

    While the consumer works, or the source is slow, all of them. While it waits for a fast source,
    the reader needs the disk and the processors itself, and gains least from the cache: where both lie
    on one NVMe device, writing a quarter of what is read costs an eighth of the speed.

    Args:
        source_bytes_per_s: how fast the source can be, see `Tee.saw`; 0.0: not known yet.
        waiting: how often the consumer had to wait lately, 0.0 to 1.0.
    """
    slow = 0.0 < source_bytes_per_s < SLOW_BYTES_PER_S
    return 1.0 if slow or waiting < 0.5 else BUSY_SHARE


def writes_direct(source_bytes_per_s: float) -> bool:
    """Whether the cache is written past the page cache.

    Beside a slow source, processors have time for the page cache, and what it keeps makes the next epoch
    faster than the disk. A fast one needs the time: a buffered write takes 0.5 to 1.1 CPU s/GB and
    a thread of the kernel's for writing back, a direct one 0.3 (measured on a loaded machine).

    Args:
        source_bytes_per_s: how fast the source can be, see `Tee.saw`; 0.0: not known yet.
    """
    return not 0.0 < source_bytes_per_s < SLOW_BYTES_PER_S
