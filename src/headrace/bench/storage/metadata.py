"""Metadata: how many files a second are made, looked at, opened, listed, renamed and removed, by one thread."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from headrace.bench.metrics.own import percentiles

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["metadata_per_s", "sync_s"]


def metadata_per_s(folder: str, files: int) -> dict[str, float]:
    """Operations per second, as this client sees them: what it has cached is quick.

    Args:
        folder: an empty one.
        files: to be made, and removed again.
    """
    paths = [os.path.join(folder, f"{number:06d}") for number in range(files)]

    def each(do: Callable[[str], object]) -> float:
        begin = time.perf_counter()
        for path in paths:
            do(path)
        return files / (time.perf_counter() - begin)

    rates = {"create": each(_create), "stat": each(os.stat), "open": each(_open)}
    begin = time.perf_counter()
    with os.scandir(folder) as entries:
        listed = sum(1 for _ in entries)
    rates["list"] = listed / (time.perf_counter() - begin)
    rates["rename"] = each(lambda path: os.rename(path, path + "r"))
    rates["unlink"] = each(lambda path: os.unlink(path + "r"))
    return rates


def _create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _open(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def sync_s(folder: str, count: int, seconds: float) -> dict[str, float]:
    """Percentiles of writing 4 KiB and waiting for the disk, `count` times or for some time."""
    path, found = os.path.join(folder, "sync"), []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.perf_counter() + seconds
    try:
        for _ in range(count):
            begin = time.perf_counter()
            os.write(fd, bytes(4096))
            os.fsync(fd)
            found.append(time.perf_counter() - begin)
            if time.perf_counter() > until:
                break
    finally:
        os.close(fd)
        os.unlink(path)
    return percentiles(found)
