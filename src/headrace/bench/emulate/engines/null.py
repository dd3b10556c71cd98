"""The null engine: batches are there at once. What is lost with it, the harness loses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.bench.emulate.engines.base import Delivered, Engine

if TYPE_CHECKING:
    from headrace.bench.emulate.engines.base import EngineContext

__all__ = ["NullEngine"]


class _Nothing:
    def __init__(self, batch: int) -> None:
        self._delivered = Delivered(batch, 0)

    def next(self) -> Delivered:
        return self._delivered

    def poll(self) -> Delivered:
        return self._delivered

    def close(self) -> None:
        pass


class NullEngine(Engine):
    """Reads nothing, in the same way as the others."""

    name = "null"
    ahead = True

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def open(self, split: str, epoch: int, accelerator: int) -> _Nothing:  # noqa: ARG002
        """Begin an epoch of nothing."""
        return _Nothing(self._context.plans[split].batch)
