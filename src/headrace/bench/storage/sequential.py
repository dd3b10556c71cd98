"""Sequential bandwidth: large pieces in a row, past the page cache where the file system lets one."""

from __future__ import annotations

import errno
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from headrace.bench.content import Content
from headrace.store.output_file import OutputFile, WriteBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PIECE_BYTES", "can_read_direct", "read_bytes_per_s", "write_bytes_per_s"]

PIECE_BYTES: Final = 4 << 20
"""Of one read: beyond it a disk's bandwidth does not grow."""


def can_read_direct(path: str) -> bool:
    """Whether a file can be read past the page cache."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        return False
    try:
        with mmap.mmap(-1, 4096) as buffer:
            os.preadv(fd, [buffer], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def write_bytes_per_s(paths: Sequence[str], nbytes: int) -> float:
    """Write `nbytes` to each path at the same time, until the disk has them.

    Raises:
        VolumeError: the disk is full, or the system refuses.
    """
    content = Content(len(paths))
    buffers = [WriteBuffer() for _ in paths]

    def write(number: int) -> None:
        with OutputFile(paths[number], buffers[number], sync=True) as out:
            for block in content.stream(number).blocks(nbytes):
                out.write(block)

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(paths), "storage-write") as pool:
        list(pool.map(write, range(len(paths))))
    return nbytes * len(paths) / (time.perf_counter() - begin)


def read_bytes_per_s(path: str, *, streams: int, direct: bool, seconds: float) -> float:
    """Read a file in pieces, `streams` at the same time, each its part from the beginning, for some time."""
    size = os.stat(path).st_size
    part = max(PIECE_BYTES, size // streams // PIECE_BYTES * PIECE_BYTES)
    until = time.perf_counter() + seconds

    def read(stream: int) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd, done = os.open(path, flags), 0
        try:
            with mmap.mmap(-1, PIECE_BYTES) as buffer:
                for at in range(stream * part, min(size, (stream + 1) * part), PIECE_BYTES):
                    done += os.preadv(fd, [buffer], at)
                    if time.perf_counter() > until:
                        break
        finally:
            os.close(fd)
        return done

    begin = time.perf_counter()
    with ThreadPoolExecutor(streams, "storage-read") as pool:
        total = sum(pool.map(read, range(streams)))
    return total / (time.perf_counter() - begin)
