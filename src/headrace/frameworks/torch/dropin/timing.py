"""Timing: what torch's own loop spends on a batch: waiting for files, decoding, collating.

The loop runs untouched: `Making` is told when a batch is begun, stands around `collate_fn`, and says how
the batch came (`BatchTrace`) when it is made. One process makes one batch after the other.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.io.replaced import real_open
from headrace.order import order_hash
from headrace.plane.batch_trace import BatchTrace, read_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.frameworks.torch.dropin.watching import Watcher

__all__ = ["Made", "Making", "hash_of"]

_SCHEDSTAT = "/proc/thread-self/schedstat"

_LONG_S = 0.001
"""Whoever stood still for less has not waited for files; asking why costs 20 microseconds."""


class Made(NamedTuple):
    """When and how a batch was made; monotonic seconds."""

    begun_s: float
    collating_s: float
    collated_s: float
    made_s: float
    waited_s: float
    """For files, in all."""
    opened_s: float
    """Of that, for opening them."""
    cpu_s: float
    """Processor time until it was collated."""

    def way(self) -> BatchTrace:
        """The same as a way: what was waited for comes first."""
        ready_s = min(self.begun_s + self.waited_s, self.collating_s)
        way = BatchTrace(read_record(self.begun_s, ready_s, self.waited_s, self.opened_s))
        way.serial = True
        way.decoding_s = ready_s
        way.decoded_s, way.collated_s = self.collating_s, self.collated_s
        way.work_s, way.cpu_s = way.decoded_s - way.decoding_s, self.cpu_s
        return way


class Making:
    """Stands around the making of batches in one thread.

    Args:
        watcher: knows how long opens of files that were read ahead had to wait; None: nobody does.
        collate: torch's `collate_fn`.
    """

    def __init__(self, collate: Callable[[Any], Any], watcher: Watcher | None = None) -> None:
        self.collate = collate
        self.watcher = watcher
        self._begun_s = self._collating_s = self._collated_s = 0.0
        self._cpu_s = self._collating_cpu_s = 0.0
        self._queued_ns = 0
        self._waited_s = self._opened_s = 0.0

    def begin(self) -> None:
        """A batch is begun."""
        self._collating_s = 0.0
        self._waited_s = 0.0 if self.watcher is None else self.watcher.waited_s
        self._cpu_s = time.thread_time()
        self._begun_s = time.perf_counter()

    def __call__(self, samples: Any) -> Any:
        """Collate, and note when."""
        self._collating_s = time.perf_counter()
        self._collating_cpu_s = time.thread_time()
        batch = self.collate(samples)
        self._collated_s = time.perf_counter()
        return batch

    def made(self) -> Made | None:
        """The batch is made; None: nobody said that it was begun."""
        begun_s, self._begun_s = self._begun_s, 0.0
        if not begun_s:
            return None
        now_s = time.perf_counter()
        if not self._collating_s:  # an error, or an end
            return Made(begun_s, now_s, now_s, now_s, 0.0, 0.0, 0.0)
        cpu_s = self._collating_cpu_s - self._cpu_s
        ahead_s = 0.0 if self.watcher is None else self.watcher.waited_s - self._waited_s
        # What neither ran nor waited for a processor waited for something else: for files, here.
        stopped_s = self._collating_s - begun_s - cpu_s
        if stopped_s > _LONG_S:
            stopped_s -= self._queued_s()
        waited_s = max(0.0, ahead_s, stopped_s)
        return Made(begun_s, self._collating_s, self._collated_s, now_s, waited_s, 0.0, cpu_s)

    def _queued_s(self) -> float:
        """How long this thread has waited for a processor since this was last asked."""
        before, self._queued_ns = self._queued_ns, _queued_ns()
        return (self._queued_ns - before) * 1e-9 if before else 0.0

    def __reduce__(self) -> Any:
        return Making, (self.collate,)


def hash_of(position: int, index: Any) -> tuple[int, int]:
    """How many samples a list of indices names, and their order hash; 0 where they are no numbers."""
    if not isinstance(index, (list, tuple)):
        return 1, 0
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        indices = np.asarray(index, dtype=np.int64)
        if indices.ndim == 1:
            return len(index), order_hash(position, indices)
    return len(index), 0


def _queued_ns() -> int:
    """How long this thread has waited for a processor; 0 where the kernel does not say."""
    try:
        with real_open(_SCHEDSTAT, "rb", 0) as f:
            return int(f.read(64).split()[1])
    except (OSError, ValueError, IndexError):
        return 0
