"""The page cache before a run: emptied or filled, and the proof of it.

Cold: dirty pages are written back and the kernel drops page cache, dentries and inodes, which
needs root. Hot: what the run will read is read through just before it, because some machines
reclaim page cache that nobody touched for a minute. Both record the resident fraction.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks import datasets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.datasets import DataSet

Temperature = Literal["hot", "cold"]

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_SYS_CACHESTAT = 451  # Linux 6.5 and later, the same number on every architecture
_WARM_THREADS = 8
_STRIPE_BYTES = 16 << 20
_SAMPLED_FILES = 256


class CannotDropCachesError(Exception):
    """Cold runs need root."""


def drop() -> None:
    """Empties page cache, dentries and inodes of the whole machine."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3")
    except OSError as error:
        raise CannotDropCachesError(
            f"{_DROP_CACHES}: {error.strerror}. A cold run must drop the page cache, which needs "
            "root. Run as root, or measure --cache hot only."
        ) from error


def files_below(path: Path) -> list[Path]:
    """All files of a form, in a stable order."""
    return sorted(entry for entry in path.rglob("*") if entry.is_file())


def files_of_run(data: DataSet, form: str, path: Path, seed: int, samples: int) -> list[Path]:
    """The files that a run of at most `samples` may touch.

    Only a folder with one file a sample lets a part of it be warmed: a million small files take
    minutes to fetch, and every engine over files reads the same known order.
    """
    if form != "files":
        return files_below(path)
    order = datasets.epoch_order(data, seed)[:samples].tolist()
    return [path / datasets.file_name(index) for index in order]


def _in_threads(task: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=task, args=(at,)) for at in range(_WARM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def warm(paths: list[Path]) -> None:
    """Reads every byte of `paths` once, in a few threads, into buffers that are thrown away."""
    stripes = list(_stripes(paths))

    def read_share(first: int) -> None:
        buffer = memoryview(bytearray(1 << 20))
        for path, start, end in stripes[first::_WARM_THREADS]:
            fd = os.open(path, os.O_RDONLY)
            try:
                _read_through(fd, start, end, buffer)
            finally:
                os.close(fd)

    _in_threads(read_share)


def _stripes(paths: Iterable[Path]) -> Iterable[tuple[Path, int, int]]:
    several = list(paths)
    if len(several) > 4 * _WARM_THREADS:  # many files: threads share out files
        yield from ((path, 0, 1 << 62) for path in several)
        return
    for path in several:
        size = path.stat().st_size
        for start in range(0, size, _STRIPE_BYTES):
            yield path, start, min(start + _STRIPE_BYTES, size)


def _read_through(fd: int, start: int, end: int, buffer: memoryview) -> None:
    at = start
    while at < end:
        wanted = min(len(buffer), end - at)
        got = os.preadv(fd, [buffer[:wanted]], at)
        at += got
        if got < wanted:
            return


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


_libc = ctypes.CDLL(None, use_errno=True)


def _resident_pages(path: Path) -> int | None:
    """Pages of `path` in the page cache; None where the kernel has no cachestat."""
    whole, result = _Range(0, 0), _Stat()
    fd = os.open(path, os.O_RDONLY)
    try:
        failed = _libc.syscall(
            ctypes.c_long(_SYS_CACHESTAT),
            ctypes.c_int(fd),
            ctypes.byref(whole),
            ctypes.byref(result),
            ctypes.c_uint(0),
        )
    finally:
        os.close(fd)
    if failed and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        return None
    return int(result.cache)


def resident_fraction(paths: list[Path]) -> float | None:
    """How much of `paths` is in the page cache; of many files an even sample is asked."""
    step = max(1, len(paths) // _SAMPLED_FILES)
    page = os.sysconf("SC_PAGESIZE")
    resident = total = 0
    for path in paths[::step]:
        pages = _resident_pages(path)
        if pages is None:
            return None
        resident += pages
        total += -(-path.stat().st_size // page)
    return resident / total if total else None
