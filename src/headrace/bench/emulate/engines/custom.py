"""custom:MODULE:CLASS: a class of the user's as the engine.

class MyEngine:
    def __init__(self, context): ...                      # an EngineContext
    def open(self, split, epoch, accelerator):            # an iterator of batches
        for step in range(context.plans[split].steps):
            indices = context.plans[split].indices(epoch, accelerator, step)
            yield read(context.paths(split, indices))     # a batch; its `nbytes`, if it has any
    def close(self): ...                                  # may be missing
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.bench.emulate.engines.base import Delivered, Engine
from headrace.errors import BenchError, HeadraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.emulate.engines.base import EngineContext

__all__ = ["CustomEngine"]


class CustomEngine(Engine):
    """Runs a class that the user names.

    Raises:
        BenchError: it cannot be imported or made.
    """

    ahead = False

    def __init__(self, context: EngineContext, named: str) -> None:
        self.name = f"custom:{named}"
        self._context = context
        module, _, name = named.partition(":")
        if not module or not name:
            raise BenchError(f"reader.engine is custom:{named}, expected custom:MODULE:CLASS.")
        try:
            made = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as e:
            raise BenchError(
                f"the engine custom:{named} cannot be imported: {e}.",
                next_step="Its folder must be in PYTHONPATH.",
            ) from e
        self._engine = self.call(made, context)

    def open(self, split: str, epoch: int, accelerator: int) -> _IteratorSource:
        """Ask the class for an epoch's batches."""
        batches = iter(self.call(self._engine.open, split, epoch, accelerator))
        return _IteratorSource(self, batches, self._context.plans[split].batch)

    def close(self) -> None:
        """Close the class's object, if it can be."""
        if hasattr(self._engine, "close"):
            self.call(self._engine.close)

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call the user's code; what it raises becomes a BenchError that names the engine."""
        try:
            return function(*arguments)
        except (HeadraceError, StopIteration):
            raise
        except Exception as e:
            raise BenchError(f"the engine {self.name} failed: {type(e).__name__}: {e}") from e


class _IteratorSource:
    def __init__(self, engine: CustomEngine, batches: Iterator[Any], batch: int) -> None:
        self._engine = engine
        self._batches = batches
        self._batch = batch

    def next(self) -> Delivered:
        try:
            batch = self._engine.call(next, self._batches)
        except StopIteration:
            raise BenchError(
                f"the engine {self._engine.name} ended before the epoch did.",
                next_step="It must give plan.steps batches.",
            ) from None
        return Delivered(self._batch, int(getattr(batch, "nbytes", 0)))

    def close(self) -> None:
        pass
