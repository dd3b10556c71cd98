"""Opens: how many files a second are opened, and how Python reads them, as torch's workers do."""

from __future__ import annotations

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.insight.doctor.findings import Cpu, Opens, PlainReads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.insight.doctor.pieces import Piece

__all__ = ["copy_speeds", "open_rates", "plain_reads"]

THREADS: Final = 16
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_COPY_BYTES: Final = 4 << 20
_COPIES: Final = 4


def open_rates(paths: Sequence[str], seconds: float, stop: Callable[[], bool]) -> Opens | None:
    """Open and close files, first one at a time, then by several threads; None if none can be opened.

    Args:
        paths: each is opened once as far as they go, those first that nobody has asked about.
        seconds: for both.
        stop: asked now and then.
    """
    half = max(1, len(paths) // 4)
    one = _opened(paths[:half], seconds / 2, 1, stop)
    many = _opened(paths[half:] or paths, seconds / 2, THREADS, stop)
    if not one or not many:
        return None
    return Opens(one_per_s=one, many_per_s=max(one, many), threads=THREADS)


def _opened(paths: Sequence[str], seconds: float, threads: int, stop: Callable[[], bool]) -> float:
    lock = threading.Lock()
    left = iter(paths)
    until = time.monotonic() + seconds

    def work(_: int) -> int:
        done = 0
        while time.monotonic() < until and not stop():
            with lock:
                path = next(left, None)
            if path is None:
                break
            try:
                os.close(os.open(path, _FLAGS))
            except OSError:
                continue
            done += 1
        return done

    begun = time.monotonic()
    with ThreadPoolExecutor(threads, "doctor-open") as pool:
        total = sum(pool.map(work, range(threads)))
    return total / max(1e-9, time.monotonic() - begun)


def plain_reads(
    pieces: Sequence[Piece], seconds: float, stop: Callable[[], bool], *, whole_files: bool
) -> tuple[PlainReads | None, list[bytes]]:
    """Read samples by Python's own `open` and `read`, twice.

    Returns:
        The times, and the samples' bytes, for those who decode.
    """
    until = time.monotonic() + seconds / 2
    kept: list[tuple[Piece, bytes]] = []
    first = (time.perf_counter(), time.thread_time())
    for piece in pieces:
        if kept and (time.monotonic() > until or stop()):
            break
        data = _read(piece, whole_files=whole_files)
        if data is not None:
            kept.append((piece, data))
    between = (time.perf_counter(), time.thread_time())
    again = 0
    until = time.monotonic() + seconds / 2
    for piece, _ in kept:
        if again and (time.monotonic() > until or stop()):
            break
        _read(piece, whole_files=whole_files)
        again += 1
    end = (time.perf_counter(), time.thread_time())
    if not kept:
        return None, []
    n = len(kept)
    times = PlainReads(
        first_s=(between[0] - first[0]) / n, first_cpu_s=(between[1] - first[1]) / n,
        again_s=(end[0] - between[0]) / again, again_cpu_s=(end[1] - between[1]) / again, reads=n,
    )  # fmt: skip
    return times, [data for _, data in kept]


def _read(piece: Piece, *, whole_files: bool) -> bytes | None:
    try:
        with open(piece.path, "rb") as file:
            if whole_files:
                return file.read()
            file.seek(piece.offset)
            return file.read(piece.length)
    except OSError:
        return None


def copy_speeds(others: float = 0.0) -> Cpu:
    """How fast memory is filled: fresh, as a new tensor's, and used, as a recycled buffer's."""
    source = np.ones(_COPY_BYTES, np.uint8)
    fresh = used = 0.0
    for _ in range(_COPIES):
        # Not numpy's own: the allocator may hand out memory that was used before.
        target = np.frombuffer(mmap.mmap(-1, _COPY_BYTES), np.uint8)
        begun = time.thread_time()  # of the processor's own: others may want it, too
        target[:] = source
        between = time.thread_time()
        target[:] = source
        end = time.thread_time()
        fresh = max(fresh, _COPY_BYTES / (between - begun))
        used = max(used, _COPY_BYTES / (end - between))
    return Cpu(others=others, fresh_bytes_per_s=fresh, used_bytes_per_s=used)
