"""Ranks: two loaders in step with each other, one of which has a slow storage."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import headrace as hr
from benchmarks.verdict_parts.injections import BATCH
from headrace.control.stalls import Verdict, verdict_of
from headrace.io.simulation import Simulation

if TYPE_CHECKING:
    from benchmarks.verdict_parts.injections import Place

__all__ = ["slow_rank"]


def slow_rank(place: Place, strength: float, seed: int, steps: int, step_s: float) -> Verdict:
    """The verdict of a rank that has its data, beside one that has not; they meet after each step."""
    slow = Simulation(name="slow reads", latency_s=0.04 * strength, seed=seed)
    barrier = threading.Barrier(2)
    loaders: list[Any] = [
        hr.loader(place.store, BATCH, seed=seed, rank=rank, world_size=2, tune=False,
                  **({"simulate": slow} if rank else {}))
        for rank in range(2)
    ]  # fmt: skip

    def train(loader: Any) -> None:
        for at, _ in enumerate(loader):
            time.sleep(step_s)
            barrier.wait(60)
            if at + 1 == steps:
                return

    threads = [threading.Thread(target=train, args=(loader,)) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own, other = (loader.stats.steps.since(0)[0] for loader in loaders)
    for loader in loaders:
        loader.close()
    return verdict_of(own, None, [other])
