"""EpochSource: one accelerator's batches of an epoch, which checkpoints may part into several blocks.

It is opened with the first block, so that starting counts as time of the first step, and goes on reading
ahead while a checkpoint is written, as a framework's workers do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.bench.emulate.engines.base import Delivered, Engine, Source

__all__ = ["EpochSource"]


class EpochSource:
    """Batches of an epoch.

    Args:
        engine: what reads.
        split: train or valid.
        epoch: from 1.
        accelerator: its number among all processes'.
    """

    def __init__(self, engine: Engine, split: str, epoch: int, accelerator: int) -> None:
        self._engine, self._what = engine, (split, epoch, accelerator)
        self._source: Source | None = None
        self._idle = True

    def part(self) -> EpochSource:
        """Begin a block: opens with the first, goes on with the others."""
        if self._source is None:
            self._source = self._engine.open(*self._what)
        self._idle = False
        return self

    def ask(self) -> bool:
        """Ask for one batch more of those that are read ahead; False when all are asked for."""
        ask: Callable[[], bool] | None = getattr(self._source, "ask", None)
        return ask is not None and ask()

    def poll(self) -> Delivered | None:
        """The next batch if it is there; None: ask `next`, which waits."""
        poll: Callable[[], Delivered | None] | None = getattr(self._source, "poll", None)
        return None if poll is None else poll()

    def next(self) -> Delivered:
        """The next batch; errors as the engine's."""
        assert self._source is not None
        return self._source.next()

    def close(self) -> None:
        """The end of a block: nobody waits in `next`, and there may be another block."""
        self._idle = True

    def end(self) -> None:
        """Give back what the epoch needed, unless a read is stuck in it."""
        if self._source is not None and self._idle:
            self._source.close()
            self._source = None
