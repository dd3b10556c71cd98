"""DemoReport: what the demo found, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.demo.comparison import Measured
    from headrace.demo.stores import PackedImages

__all__ = ["DemoReport", "Epoch", "Interruption"]


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of training."""

    epoch: int
    loss: float
    accuracy: float
    """Share of held-out images that are right."""
    recall: float
    """Mean over the classes of that share: small classes count as much as large ones."""
    samples: int
    seconds: float
    stall_s: float
    """Seconds that training waited for data."""
    order_hash: str
    doubled: int
    """Samples that were delivered more than once."""
    missing: int
    """Samples that were not delivered, unreadable ones not counted."""

    @property
    def samples_per_s(self) -> float:
        """Samples by seconds of training."""
        return self.samples / self.seconds


@dataclass(frozen=True, slots=True)
class Interruption:
    """The kill in mid-epoch, and the proof that it changed nothing."""

    epoch: int
    killed_at: int
    """Samples of the epoch that were delivered when the process was killed."""
    resumed_at: int
    """Samples of the epoch that the checkpoint knew of."""
    killed_by: int
    """The signal that ended the process."""
    hash_resumed: str
    """Order hash of the epoch, across the kill."""
    hash_uninterrupted: str
    """Order hash of a pass over the same epoch without a kill."""

    @property
    def identical(self) -> bool:
        """Whether the two orders are the same."""
        return self.hash_resumed == self.hash_uninterrupted


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo found."""

    packed: PackedImages
    epochs: list[Epoch]
    interruption: Interruption
    chance: float
    """Share of the most common class: what always naming it gets right."""
    comparison: list[Measured]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of held-out images that are right after the last epoch."""
        return self.epochs[-1].accuracy

    @property
    def exactly_once(self) -> bool:
        """Whether each sample was delivered exactly once in every epoch."""
        return not any(epoch.doubled or epoch.missing for epoch in self.epochs)

    @property
    def passed(self) -> bool:
        """Whether the model beats chance and the resumed order is the same."""
        return self.accuracy > self.chance and self.exactly_once and self.interruption.identical

    def speedup(self, work: str) -> float:
        """Headrace's samples/s by the best of torch's, for `training` or `delivery`."""
        rates = {m.loader: m.samples_per_s for m in self.comparison if m.work == work}
        ours = max(rate for name, rate in rates.items() if name.startswith("headrace"))
        return ours / max(rate for name, rate in rates.items() if name.startswith("torch"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        for name in ("train", "held_out", "source"):
            plain["packed"][name] = str(plain["packed"][name])
        for epoch, values in zip(self.epochs, plain["epochs"], strict=True):
            values["samples_per_s"] = epoch.samples_per_s
        for measured, values in zip(self.comparison, plain["comparison"], strict=True):
            values["samples_per_s"] = measured.samples_per_s
        plain["interruption"]["identical"] = self.interruption.identical
        return plain | {
            "accuracy": self.accuracy,
            "exactly_once": self.exactly_once,
            "passed": self.passed,
            "speedup_training": self.speedup("training"),
            "speedup_delivery": self.speedup("delivery"),
        }
