"""Run: one iterator's way through the rest of an epoch, or through several.

TensorFlow takes batches ahead, in its own threads, and hands them to the training step later. What
is taken and what is delivered are therefore counted apart: `batches` reads, and only `delivered`,
which is called when the consumer gets a batch, moves the cursor.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy as np
    from numpy.typing import NDArray

    from headrace.plane import Batch, Loader
    from headrace.plane.batch_trace import BatchTrace

__all__ = ["Run"]


class _Taken(NamedTuple):
    """A batch that TensorFlow took, and what its delivery is counted with."""

    asked: NDArray[np.int64]
    epoch: int
    samples: int
    nbytes: int
    reads: dict[str, int]
    way: BatchTrace


class Run:
    """The way of one iterator. A new run ends the one before.

    Args:
        loader: gives order, cursor and reader.
        epochs: epochs to go through, the rest of the current one included; None: for ever.
        decodes: TensorFlow decodes the samples; else it only cuts or copies them.

    Attributes:
        error: what ended it, which reaches TensorFlow's user as text only.
    """

    def __init__(self, loader: Loader, epochs: int | None, *, decodes: bool = False) -> None:
        self.error: Exception | None = None
        self._loader = loader
        self._decodes = decodes
        self._pass = loader.begin()
        self._epochs_left = epochs
        self._begin = self._pass.epoch, self._pass.begin
        self._taken: deque[_Taken] = deque()
        self._step = 0
        self._delivered_s = 0.0

    def batches(self) -> Generator[Batch, None, None]:
        """Yield the batches of the run, ahead of their delivery.

        Raises:
            HeadraceError: a sample cannot be read and `on_error` is `raise`.
        """
        first, begin = self._begin
        epochs = (
            count(first) if self._epochs_left is None else range(first, first + self._epochs_left)
        )
        try:
            for epoch in epochs:
                yield from self._epoch(epoch, begin)
                begin = 0
        except GeneratorExit:  # TensorFlow's iterator was left early
            self._rest()
            raise

    def _epoch(self, epoch: int, begin: int) -> Generator[Batch, None, None]:
        slices = self._loader.slices
        spans = (slices.span(step, begin) for step in range(slices.steps(begin)))
        fetched = self._loader.reader.stream(self._loader.order, epoch, spans)
        try:
            for one in fetched:
                batch = one.batch
                if self._decodes:
                    one.way.decoding_s = time.perf_counter()
                self._taken.append(
                    _Taken(one.asked, epoch, len(batch), batch.nbytes, one.reads, one.way),
                )
                yield batch
        finally:
            fetched.close()

    @property
    def next_delivery(self) -> tuple[NDArray[np.int64], int] | None:
        """Indices and epoch of the batch that would be delivered next, if it was taken."""
        return (self._taken[0].asked, self._taken[0].epoch) if self._taken else None

    def delivered(self, asked_unix_s: float, made_unix_s: float) -> None:
        """Count the next batch: the consumer has it.

        Args:
            asked_unix_s: when the consumer asked for it, as TensorFlow's clock has it.
            made_unix_s: when TensorFlow had made it.

        Raises:
            RuntimeError: a newer run began, or the loader was closed or went elsewhere.
        """
        self._pass.check()
        taken, stats = self._taken.popleft(), self._loader.stats
        got_s, unix_s = time.perf_counter(), time.time()
        asked_s = max(self._delivered_s, got_s - max(0.0, unix_s - asked_unix_s))
        made_s = got_s - max(0.0, unix_s - made_unix_s)
        if self._decodes:
            # Nothing is copied on the way from there to here: while TensorFlow has further batches to
            # decode, a batch that waits to be counted waits for a thread that decodes those.
            taken.way.decoded_s = got_s if self._taken else made_s
        else:
            taken.way.collated_s = made_s
        stats.count(taken.samples, taken.nbytes, taken.reads, got_s - asked_s)
        place = self._pass.delivered(self._step, taken.asked)
        stats.steps.came(place, len(taken.asked), (asked_s, got_s), taken.way)
        self._delivered_s = got_s
        self._step += 1
        if self._step == self._pass.steps:
            self._end_epoch()

    def _rest(self) -> None:
        """Nothing is asked for any more; and nothing is to be said of it if another run has begun."""
        with contextlib.suppress(RuntimeError):
            self._pass.check()
            self._loader.stats.rest()

    def _end_epoch(self) -> None:
        self._pass.finish()
        self._step = 0
        if self._epochs_left is not None:
            self._epochs_left -= 1
        self._loader.stats.rest()
        if self._epochs_left != 0:
            self._pass = self._loader.begin()
