"""What every engine under test is: it opens an epoch for an accelerator, and gives batch after batch."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace.bench.plan import StepPlan
    from headrace.bench.schema import Workload


@dataclass(frozen=True, slots=True)
class Delivered:
    """A batch that is there.

    Attributes:
        nbytes: bytes that were read for it; 0 where the engine cannot tell.
        at_s: when it was there, of `time.perf_counter`, where the engine knows: who waits for it is woken
            later, on a busy host much later, and that is not the storage's fault. None: when `next` returns.
    """

    samples: int
    nbytes: int
    at_s: float | None = None


class BatchSource(Protocol):
    """One accelerator's batches of one epoch, in order.

    One that reads ahead may have `ask() -> bool`: ask for one batch more of those that are read ahead; False
    when all are asked for. At an epoch's begin the accelerators ask in turns, so that the first step does not
    wait until the first accelerator's fourth batch is read.

    It may also have `poll() -> Delivered | None`: as `next`, but None where that would wait. What is there
    already then costs no thread its turn, for which it waits long on a busy host.
    """

    def next(self) -> Delivered:
        """Wait for the next batch.

        Raises:
            BenchError: it cannot be read; names the file.
        """
        ...

    def close(self) -> None:
        """Give back what the epoch needed."""
        ...


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What an engine reads for: plans, and paths in the order that samples are counted in, by split."""

    workload: Workload
    plans: Mapping[str, StepPlan]
    files: Mapping[str, Sequence[str]]
    accelerators: int
    simulate: Any = None
    deadline_s: float = 300.0

    def paths(self, split: str, indices: NDArray[np.int64]) -> list[bytes]:
        """The files that samples lie in, each once, in the order of the samples."""
        files = dict.fromkeys((indices // self.plans[split].samples_per_file).tolist())
        return [os.fsencode(self.files[split][file]) for file in files]


class Engine(ABC):
    """A way to read batches. One for all accelerators of a process.

    Attributes:
        name: for reports.
        ahead: whether the next batch may be waited for while the one before is computed upon. Engines
            that prefetch by themselves as their framework does are asked when the accelerator is idle.
    """

    name: str
    ahead: bool

    @abstractmethod
    def open(self, split: str, epoch: int, accelerator: int) -> BatchSource:
        """Begin an epoch for an accelerator, whose number counts over all processes."""

    def figures(self) -> dict[str, Any]:
        """What the engine says about itself, ready for JSON."""
        return {}

    def close(self) -> None:  # noqa: B027 - many have nothing to give back
        """Give back everything."""


class NullEngine(Engine):
    """Batches are there at once. What is lost with it, the harness loses."""

    name = "null"
    ahead = True

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def open(self, split: str, epoch: int, accelerator: int) -> BatchSource:  # noqa: ARG002
        """Begin an epoch of nothing."""
        return _NullSource(Delivered(self._context.plans[split].batch, 0))


class _NullSource:
    def __init__(self, batch: Delivered) -> None:
        self._batch = batch

    def next(self) -> Delivered:
        return self._batch

    def poll(self) -> Delivered:
        return self._batch

    def close(self) -> None:
        pass


def batches_ahead(read_threads: int, prefetch_size: int) -> int:
    """Batches of an accelerator that are read ahead: PyTorch's workers times DLIO's prefetch factor."""
    workers = max(1, read_threads)
    factor = -(-prefetch_size // workers) if prefetch_size > 0 else 2
    return workers * factor
