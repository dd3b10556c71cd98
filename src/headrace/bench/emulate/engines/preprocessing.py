"""`reader.preprocess_time` for engines that deliver bytes: time that passes between reading and training.

As a framework's loader does it: each of `read_threads` workers takes a batch when it is free, works on its
samples one after the other, and batches are handed on in order. The work is waiting, as in DLIO.
"""

from __future__ import annotations

import heapq
import threading
import time
from dataclasses import replace
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.emulate.engines.base import Engine

if TYPE_CHECKING:
    from headrace.bench.config.times import TimeDistribution
    from headrace.bench.emulate.engines.base import Delivered, EngineContext, Source

__all__ = ["PreprocessingEngine"]

_LOOKS_S = 0.2
"""How often a waiting thread looks whether it is to end."""


class PreprocessingEngine(Engine):
    """Another engine, whose samples are preprocessed.

    Args:
        engine: what reads.
        context: what for.
    """

    ahead = True

    def __init__(self, engine: Engine, context: EngineContext) -> None:
        self.name = engine.name
        self._engine, self._context = engine, context

    def open(self, split: str, epoch: int, accelerator: int) -> _Preprocessed:
        """Begin to read and to preprocess an epoch."""
        reader = self._context.workload.reader
        plan = self._context.plans[split]
        source = self._engine.open(split, epoch, accelerator)
        random = np.random.default_rng((plan.seed, epoch, accelerator, 1))
        workers = max(1, reader.read_threads)
        return _Preprocessed(source, plan.steps, workers, reader.preprocess_time, random)

    def figures(self) -> dict[str, Any]:
        """The engine's own."""
        return self._engine.figures()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class _Preprocessed:
    """One accelerator's batches of one epoch, taken from the source by a thread of their own."""

    def __init__(
        self,
        source: Source,
        steps: int,
        workers: int,
        times: TimeDistribution,
        random: np.random.Generator,
    ) -> None:
        self._source, self._steps, self._workers = source, steps, workers
        self._times, self._random = times, random
        self._done: Queue[tuple[float, Delivered | BaseException]] = Queue(workers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="headrace-preprocess", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        free = [0.0] * self._workers
        """When each worker is free: a heap."""
        try:
            for _ in range(self._steps):
                if self._stop.wait(max(0.0, free[0] - time.perf_counter())):
                    return
                batch = self._source.next()
                ready_s = time.perf_counter() + float(
                    self._times.draw(self._random, batch.samples).sum()
                )
                heapq.heapreplace(free, ready_s)
                if not self._put(ready_s, batch):
                    return
        except BaseException as e:  # noqa: BLE001 - raised where the batch is waited for
            self._put(0.0, e)

    def _put(self, ready_s: float, batch: Delivered | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._done.put((ready_s, batch), timeout=_LOOKS_S)
            except Full:
                continue
            return True
        return False

    def next(self) -> Delivered:
        while True:
            try:
                ready_s, batch = self._done.get(timeout=_LOOKS_S)
                break
            except Empty:
                continue
        if isinstance(batch, BaseException):
            raise batch
        time.sleep(max(0.0, ready_s - time.perf_counter()))
        return replace(batch, at_s=None)  # it is there now, not when it was read

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._source.close()
