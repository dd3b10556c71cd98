"""Page: what the programs of one run find, kept by their launcher.

The page says where board and ring are. There is always a board: without a daemon it is an empty one, on
which nothing is placed, but opens below the roots are counted all the same, and cost what a simulated
storage says.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.io import Simulation

__all__ = ["Page", "shim_path", "spellings"]

RUN_VARIABLE = "HEADRACE_RUN"
"""Where programs look for the page."""

_QUANTILES = 1024


def shim_path() -> Path:
    """The shim's file, as it was installed."""
    return Path(_native.__file__).parent / "lib" / "libheadrace_preload.so"


def spellings(roots: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """How programs may write each root, and what it is without links."""
    found: dict[bytes, bytes] = {}
    for root in roots:
        real = os.path.realpath(root)
        for spelled in (real, os.path.normpath(os.path.abspath(root))):
            found.setdefault(os.fsencode(spelled), os.fsencode(real))
    return list(found.items())


class Page:
    """The page of one run, and the boards and rings that it has named.

    Args:
        roots: absolute paths.
        simulation: what opens of originals cost; None: what they cost.
    """

    def __init__(self, roots: Sequence[str], simulation: Simulation | None = None) -> None:
        self._lock = threading.Lock()
        slow = None if simulation is None else _slow_memory(simulation)
        self._native = _native.RunPage(slow)
        nothing = np.zeros((0, 4), np.int64), np.zeros((0, 9), np.int64)
        self._empty = _native.FileBoard([], *nothing, roots=spellings(roots))
        self._own_ring = _native.OpenRing(1 << 10)
        self._board_fd = -1
        self._rings: list[int] = []
        self._follower: _native.OpenFollower | None = None
        self._order: list[bytes] | None = None
        self.clear()

    @property
    def address(self) -> str:
        """The value of HEADRACE_RUN."""
        return f"/proc/{os.getpid()}/fd/{self._native.fd}:{self._native.inode}"

    def record(self) -> None:
        """Keep the order of opens from now on: see `order`."""
        with self._lock:
            self._order = []

    def publish(self, process: int, board: tuple[int, int], ring: tuple[int, int]) -> None:
        """Name another board and ring.

        Args:
            process: whose descriptors the copies are.
            board: descriptor, which becomes the page's, and inode.
            ring: the same.
        """
        with self._lock:
            self._follow()
            before, self._board_fd = self._board_fd, board[0]
            self._rings.append(ring[0])
            self._native.publish(process, *board, *ring)
            if self._order is not None:
                self._follower = _native.OpenFollower(board[0], ring[0])
            if before >= 0:
                os.close(before)

    def clear(self) -> None:
        """There is no daemon: originals are opened."""
        with self._lock:
            self._follow()
            self._follower = None
            ring = self._own_ring
            self._native.publish(
                os.getpid(), self._empty.fd, self._empty.inode, ring.fd, ring.inode
            )
            if self._board_fd >= 0:
                os.close(self._board_fd)
                self._board_fd = -1

    def counts(self) -> Mapping[str, int]:
        """What programs opened, by kind; bytes are those of whole files."""
        with self._lock:
            found = Counter(self._own_ring.counts)
            for ring in self._rings:
                found.update(_native.open_counts(ring))
            return dict(found)

    def follow(self) -> None:
        """Take opens into the recorded order; to be called often enough."""
        with self._lock:
            self._follow()

    def _follow(self) -> None:
        if self._order is not None and self._follower is not None:
            self._order.extend(self._follower.take())

    @property
    def order(self) -> list[bytes]:
        """Paths in the order in which they were opened, since `record`."""
        self.follow()
        return self._order or []

    def close(self) -> None:
        """Let go of the rings and the board."""
        with self._lock:
            for fd in (*self._rings, self._board_fd):
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._rings.clear()
            self._board_fd = -1


def _slow_memory(simulation: Simulation) -> _native.SlowMemory:
    return _native.SlowMemory(
        open_ns=_quantiles(simulation.open_s, simulation.open_p99_s),
        read_ns=_quantiles(simulation.latency_s, simulation.latency_p99_s),
        servers=simulation.parallelism,
        link_bytes_per_s=int(simulation.bandwidth_bytes_per_s),
        stream_bytes_per_s=int(simulation.stream_bytes_per_s),
        seed=simulation.seed,
    )


def _quantiles(median_s: float, p99_s: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A lognormal latency as a table, so that the shim needs no mathematics: nanoseconds."""
    from statistics import NormalDist

    normal = NormalDist()
    sigma = np.log(p99_s / median_s) / normal.inv_cdf(0.99) if p99_s > median_s > 0 else 0.0
    z = np.array([normal.inv_cdf((k + 0.5) / _QUANTILES) for k in range(_QUANTILES)])
    return np.asarray(median_s * np.exp(sigma * z) * 1e9, np.int64)
