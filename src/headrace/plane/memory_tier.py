"""MemoryTier: samples kept in memory within a quota.

What was read once is delivered from memory afterwards. A placement is kept, not churned: when the
quota is full, the rest goes on being read below. A batch of both is put together in one native call.
With `auto`, memory is given back when the machine or the job's cgroup runs short of it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import _native
from headrace.machine.host import available_memory
from headrace.plane.stage import ReadStage, StageStats, own_knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from headrace.plane.stage import BatchReads, PendingReads


_PRESSURE_CHECK_S = 1.0

_GIB = 1 << 30
_MIB = 1 << 20

RAM_SHARE = 0.5
"""Of the memory that is available: the training program needs the rest."""

MEMORY_RESERVE_BYTES = 2 * _GIB
"""Memory that is left alone, however much there is."""


def memory_quota(
    given: int | str | None, *, far: bool, data_bytes: int, available_bytes: int
) -> int:
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
    room = min(RAM_SHARE * available_bytes, available_bytes - MEMORY_RESERVE_BYTES)
    # An eighth more than the data: slabs are not filled to the last byte.
    return max(0, min(int(room), data_bytes + data_bytes // 8 + 4 * _MIB))


class MemoryTier(ReadStage):
    """Keeps samples in memory.

    Args:
        below: what reads those that are not held.
        samples: in the data set.
        parts: parts that are read of each.
        quota_bytes: memory that may be taken, not counting batches under way.
        yielding: give memory back when it runs short.
        available: bytes of memory that can still be taken.
        shared: hold and deliver in memory that other processes may map.
    """

    name = "ram"

    def __init__(
        self,
        below: BatchReads,
        samples: int,
        parts: int,
        quota_bytes: int,
        *,
        yielding: bool = False,
        available: Callable[[], int] = available_memory,
        shared: bool = False,
    ) -> None:
        super().__init__(below)
        self._cache = _native.SampleCache(
            samples=samples, parts=parts, quota_bytes=quota_bytes, shared=shared
        )
        self._yielding = yielding
        self._available = available
        self._looked_at = time.monotonic()
        self._lock = threading.Lock()
        self._samples = self._bytes = self._hit_bytes = 0
        self._busy_s = 0.0

    def _own_bytes(self) -> int:
        """Of held samples and of batches."""
        return self._cache.mapped_bytes + self._cache.delivered_bytes

    @property
    def cache(self) -> _native.SampleCache:
        """The held samples; other processes may map them where they are shared."""
        return self._cache

    @property
    def held_bytes(self) -> int:
        """Memory of held samples and their index: at most the quota."""
        return self._cache.mapped_bytes

    @property
    def held_samples(self) -> int:
        """How many samples are held."""
        return self._cache.held_samples

    def missing(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the indices that are not held."""
        return indices[self._cache.look_up(indices).missing]

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        """Ask for one batch; what is not held is read below."""
        hits = self._cache.look_up(indices)
        missing = hits.missing
        if not len(missing) and len(indices):
            return _Pending(self, hits, None)
        return _Pending(self, hits, self._below.submit(indices[missing]))

    def close(self) -> None:
        """Give all memory back, and close what is below."""
        self._cache.set_quota(0)
        self._below.close()

    def stats(self) -> StageStats:
        """What passed, how much of it from memory, and what is held."""
        with self._lock:
            return StageStats(
                name=self.name,
                busy_s=self._busy_s,
                samples=self._samples,
                bytes=self._bytes,
                buffered_bytes=self._cache.mapped_bytes,
                bytes_by_tier={"ram": self._hit_bytes},
            )

    def knobs(self) -> Mapping[str, int]:
        """The quota."""
        return {"cache_bytes": self._cache.quota_bytes}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set `cache_bytes`. Less gives memory back at once; more is filled as samples come.

        Raises:
            ValueError: the quota is not positive.
        """
        for quota in own_knobs(knobs, {"cache_bytes"}).values():
            self._cache.set_quota(quota)

    def join(self, hits: _native.Hits, job: PendingReads | None) -> _native.Batch:
        """Take what was read, keep it, and put the batch together."""
        read = None if job is None else job.take()
        began = time.perf_counter()
        if read is not None:
            self._yield_memory()
            self._cache.insert(read)
        if read is not None and len(hits.missing) == len(hits.indices):
            batch = read
        else:
            batch = self._cache.gather(hits, read)
            batch.made_of(read, hits.bytes)
        with self._lock:
            self._busy_s += time.perf_counter() - began
            self._samples += batch.samples
            self._hit_bytes += hits.bytes
            self._bytes += hits.bytes + (0 if read is None else int(read.lengths.sum()))
        return batch

    def _yield_memory(self) -> None:
        """Shrink where less than the reserve is left: training must not be killed for a cache."""
        now = time.monotonic()
        if not self._yielding or now - self._looked_at < _PRESSURE_CHECK_S:
            return
        self._looked_at = now
        short = MEMORY_RESERVE_BYTES // 2 - self._available()
        if short > 0:
            self._cache.set_quota(max(0, self._cache.mapped_bytes - short))


@dataclass(slots=True)
class _Pending:
    """A batch of which some is held and the rest is being read."""

    tier: MemoryTier
    hits: _native.Hits
    job: PendingReads | None

    @property
    def ram_bytes(self) -> int:
        """Bytes of the batch that are held."""
        return self.hits.bytes

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        return self.job is None or self.job.done

    def take(self) -> _native.Batch:
        """Wait for the batch."""
        return self.tier.join(self.hits, self.job)
