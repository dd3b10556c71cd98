"""AheadReader: has files read natively, from the first order on; its knobs, and what its reads say.

Not safe for concurrent users: ReadAhead holds its lock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace import _native
from headrace.io.simulated_paths import simulated_paths
from headrace.plane.ahead.cold import ColdChoice
from headrace.plane.stage import latency_percentile_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.plane.ahead.options import AheadOptions

__all__ = ["AheadReader", "Lately"]

_ORDER_FILES_MAX = 64
_ORDERS_MAX = 64
_ORDERS_IN_BUFFER = 8  # an order's memory is free again when the last of its files is
_MEAN_BYTES_FIRST = 128 << 10  # of a file, until some were seen


class Lately(NamedTuple):
    """What reads say of where the files lie."""

    bytes: int
    """Read since the start."""
    resident_bytes: int
    """Of them from the page cache."""
    latency_s: float
    """The median of the reads since the last time that this was asked."""


class AheadReader:
    """Reads files in orders of some at a time. Its threads begin with the first order.

    Args:
        options: bounds and first settings.
        samples: of the dataset.
        knobs: where they stand; by default as in the options.

    Attributes:
        knobs: `reads_in_flight` and `buffer_bytes`.
        simulation: the label of the simulated storage that is read; '': it is real.
        began_s: when the first files were ordered, monotonic; 0.0: not yet.
    """

    def __init__(
        self, options: AheadOptions, samples: int, knobs: Mapping[str, int] | None = None
    ) -> None:
        self.knobs = {
            "reads_in_flight": options.reads_in_flight,
            "buffer_bytes": options.buffer_bytes,
            **(knobs or {}),
        }
        self.simulation = ""
        self.began_s = 0.0
        self._native: _native.FileReader | None = None
        self._cold = ColdChoice(options.cold, samples)
        self._latencies: tuple[int, ...] = ()
        self._mean_bytes = float(_MEAN_BYTES_FIRST)

    @property
    def working(self) -> bool:
        """Whether files were ordered."""
        return self._native is not None

    def sizes(self) -> tuple[int, int]:
        """How many files make one order, and how many orders may be under way: the buffer holds them."""
        files = self.knobs["buffer_bytes"] / self._mean_bytes
        each = min(max(int(files / _ORDERS_IN_BUFFER), 1), _ORDER_FILES_MAX)
        return each, min(int(files / each) + 1, _ORDERS_MAX)

    def order(self, paths: list[bytes]) -> _native.FileJob:
        """Have some files read; returns at once."""
        if self._native is None:
            self._native = self._begin()
        return self._native.submit(paths)

    def _begin(self) -> _native.FileReader:
        simulated = simulated_paths()
        self.simulation = "" if simulated is None else simulated.model.label
        self.began_s = time.monotonic()
        return _native.FileReader(
            reads_in_flight=self.knobs["reads_in_flight"],
            buffer_bytes=self.knobs["buffer_bytes"],
            cold=self._cold.now,
            simulate=None if simulated is None else simulated.model,
            simulated_roots=[] if simulated is None else list(simulated.roots),
        )

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Turn those of the knobs that are its own.

        Raises:
            ValueError: a value is not positive.
        """
        mine = {name: knobs[name] for name in self.knobs if name in knobs}
        for name, value in mine.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        self.knobs.update(mine)
        if self._native is not None and mine:
            self._native.turn(
                reads_in_flight=mine.get("reads_in_flight"), buffer_bytes=mine.get("buffer_bytes")
            )

    def note_served(self, size: int, waited_s: float) -> None:
        """A file was used.

        Args:
            size: its bytes.
            waited_s: by all who wanted a file, since the start.
        """
        self._mean_bytes += (max(size, 4096) - self._mean_bytes) / 64
        if self._native is not None and self._cold.note_served():
            busy_s, allowed = self._native.stats()["busy_s"], self.knobs["reads_in_flight"]
            if self._cold.judge(waited_s, busy_s, allowed, self._mean_bytes):
                self._native.turn(cold=self._cold.now)

    def lately(self) -> Lately | None:
        """What reads say since this was last asked; None before there were any."""
        if self._native is None:
            return None
        stats = self._native.stats()
        latencies = stats["latency_us"]
        before = self._latencies or (0,) * len(latencies)
        self._latencies = latencies
        new = [a - b for a, b in zip(latencies, before, strict=True)]
        resident_bytes = stats["bytes_by_tier"]["page_cache"]
        return Lately(stats["bytes"], resident_bytes, latency_percentile_s(new, 0.5))

    def stats(self) -> dict[str, Any]:
        """The native reader's figures since the first order; {} before."""
        return {} if self._native is None else self._native.stats()

    def detach(self) -> _native.FileReader | None:
        """Let go of what has threads and memory, for whoever closes it; None: nothing was ordered."""
        native, self._native = self._native, None
        return native
