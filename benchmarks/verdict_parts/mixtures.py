"""Mixtures: one bottleneck in one part of a run, another in the rest. What each cost is measured.

The truth is what the consumer waited in each part. A batch that was made under one regime and taken under the
next belongs to neither alone; the parts are long enough for that to matter little. Nothing is tuned: a tuner
would have as many reads under way as it takes to hide the injected latency, up to what the small buffer
holds, and the verdict then says so (`limit`).
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.verdict_parts.injections import BATCH, Burn
from headrace.base.causes import Cause
from headrace.frameworks.torch import deliveries
from headrace.io.simulation import Simulation
from headrace.testing import SlowVolume
from headrace.torch import StoreLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.verdict_parts.injections import Place

__all__ = ["MIXTURES", "Mixed", "Switches", "run_mixture"]


@dataclass
class Switches:
    """Bottlenecks that can be switched on and off while a loader works.

    Args:
        strength: 1 as usual.
        seed: of the simulated storage.
    """

    strength: float
    seed: int
    decode: bool = False
    collate: bool = False
    transfer: bool = False
    hog: bool = False
    ending: bool = False
    volume: SlowVolume = field(init=False)
    loader: Any = None

    def __post_init__(self) -> None:
        self.burn = Burn(0.002 * self.strength)
        self.volume = SlowVolume(
            Simulation(name="slow reads", latency_s=0.12 * self.strength, seed=self.seed)
        )

    def turn(self, cause: Cause, *, on: bool) -> None:
        """Switch one on or off."""
        if cause is Cause.LATENCY:
            self.volume.scale_latency(1.0 if on else 0.002)
        elif cause is Cause.POLICY:
            stages = self.loader.stats.stages_now()
            throttle = next(stage for stage in stages if stage.name == "throttle")
            throttle.turn({"bytes_per_s": int(6e6 / self.strength if on else 4e9)})
        elif cause is Cause.PYTHON:
            self.hog = on
        else:
            setattr(self, cause.value, on)

    def decoded(self, data: Any) -> int:
        """The decode function."""
        if self.decode:
            return int(self.burn(data))
        if self.hog:  # who holds the lock needs somebody who lets go of it, and wants it back
            time.sleep(0.0002)
        return len(data)

    def collated(self, samples: list[Any]) -> int:
        """The collate function."""
        if self.collate:
            time.sleep(0.1 * self.strength)
        return len(samples)

    def copied(self, value: Any) -> Any:
        """Copying to a device that this machine has not."""
        if self.transfer:
            time.sleep(0.1 * self.strength)
        return value

    def spin(self) -> None:
        """Compute in Python while that is switched on."""
        total = 0
        while not self.ending:
            if not self.hog:
                time.sleep(0.002)
                continue
            for at in range(1000):
                total += at

    @contextmanager
    def loading(self, place: Place) -> Iterator[Any]:
        """The loader, with everything switched off."""
        before = deliveries.pinned
        deliveries.pinned = self.copied  # type: ignore[assignment]
        hog = threading.Thread(target=self.spin, daemon=True)
        hog.start()
        try:
            with StoreLoader(
                place.store, BATCH, shuffle=True, seed=self.seed, decode=self.decoded, threads=2,
                collate_fn=self.collated, pin_memory=True, simulate=self.volume,
                bytes_per_s=4e9, budget_bytes=6 << 20, tune=False,
            ) as loader:  # fmt: skip
                self.loader = loader
                yield loader
        finally:
            self.ending = True
            hog.join()
            deliveries.pinned = before


@dataclass(frozen=True)
class Mixed:
    """Two causes, and the share of the steps that the first has."""

    first: Cause
    second: Cause
    share: float

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.first} {self.share:.0%}, {self.second}"


_PAIRS = [
    (Cause.LATENCY, Cause.DECODE),
    (Cause.LATENCY, Cause.COLLATE),
    (Cause.DECODE, Cause.COLLATE),
    (Cause.POLICY, Cause.TRANSFER),
    (Cause.POLICY, Cause.LATENCY),
    (Cause.PYTHON, Cause.COLLATE),
    (Cause.TRANSFER, Cause.DECODE),
]
MIXTURES = [Mixed(a, b, share) for a, b in _PAIRS for share in (0.3, 0.5, 0.7)]


def run_mixture(
    mixed: Mixed, place: Place, seed: int, steps: int, explain: Callable[[Any], Any]
) -> tuple[dict[str, float], Any]:
    """What each cause cost, and the verdict."""
    switches = Switches(1.0, seed)
    truth: dict[str, float] = {}
    with switches.loading(place) as loader:
        switches.turn(Cause.LATENCY, on=False)
        iterator = iter(loader)
        next(iterator)  # makes the stages
        for cause, share in ((mixed.first, mixed.share), (mixed.second, 1.0 - mixed.share)):
            switches.turn(cause, on=True)
            before = loader.stats.stall_s
            for _ in range(round(share * steps)):
                next(iterator)
                time.sleep(0.002)
            truth[cause.value] = loader.stats.stall_s - before
            switches.turn(cause, on=False)
        found = explain(loader)
        iterator.close()
    return truth, found
