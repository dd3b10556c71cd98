"""DemoReport: the demo's results as data, and as tables and bars of plain text for a terminal or a log."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.demo.images import PackedImages


@dataclass(frozen=True, slots=True)
class EpochResult:
    """One epoch of training.

    Attributes:
        accuracy: share of held-out images that are right.
        recall: mean over the classes of that share: small classes count as much as large ones.
        stall_s: seconds that training waited for data.
        doubled: samples that were delivered more than once.
        missing: samples that were not delivered, unreadable ones not counted.
    """

    epoch: int
    loss: float
    accuracy: float
    recall: float
    samples: int
    seconds: float
    stall_s: float
    order_hash: str
    doubled: int
    missing: int
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class Interruption:
    """The kill in mid-epoch, and the proof that it changed nothing.

    Attributes:
        killed_at: samples of the epoch that were delivered when the process was killed.
        resumed_at: samples of the epoch that the checkpoint knew of.
        killed_by: the signal that ended the process.
        hash_resumed: order hash of the epoch, across the kill.
        hash_uninterrupted: order hash of a pass over the same epoch without a kill.
        identical: whether the two orders are the same.
    """

    epoch: int
    killed_at: int
    resumed_at: int
    killed_by: int
    hash_resumed: str
    hash_uninterrupted: str
    identical: bool


@dataclass(frozen=True, slots=True)
class LoaderPass:
    """One loader's pass.

    Attributes:
        work: `training`, `decoding` or `delivery`.
        first_s: seconds to the first batch, start of workers included.
        stall_s: seconds that the consumer waited for batches, the first one included.
    """

    work: str
    loader: str
    samples: int
    seconds: float
    first_s: float
    stall_s: float
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo measured; `chance` is what always naming the most common class gets right."""

    packed: PackedImages
    epochs: list[EpochResult]
    interruption: Interruption
    chance: float
    comparison: list[LoaderPass]
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
        """Headrace's samples/s by the best of torch's, for one kind of work."""
        rates = {m.loader: m.samples_per_s for m in self.comparison if m.work == work}
        ours = max(rate for name, rate in rates.items() if name.startswith("headrace"))
        return ours / max(rate for name, rate in rates.items() if name.startswith("torch"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        derived = {name: getattr(self, name) for name in ("accuracy", "exactly_once", "passed")}
        return plain | derived | {f"speedup_{work}": self.speedup(work) for work in _WORKS}


_BAR_CELLS = 20
_WORKS = {
    "training": "Training: one step a batch, same network for all; torch decodes with PIL",
    "decoding": "Decoded images alone",
    "delivery": "Files alone: nothing is decoded",
}


def show(report: DemoReport) -> None:
    """Print the report."""
    lines = [*_story(report), ""]
    lines += _table(
        f"Training, held-out accuracy by chance: {report.chance:.1%}",
        ["epoch", "loss", "held-out accuracy", "mean recall", "samples/s", "stall s", "accuracy"],
        [
            (str(e.epoch), f"{e.loss:.3f}", f"{e.accuracy:.1%}", f"{e.recall:.1%}",
             f"{e.samples_per_s:,.0f}", f"{e.stall_s:.2f} of {e.seconds:.1f}", _bar(e.accuracy))
            for e in report.epochs
        ],
    )  # fmt: skip
    for work, title in _WORKS.items():
        passes = [m for m in report.comparison if m.work == work]
        fastest = max(m.samples_per_s for m in passes)
        lines += _table(
            title,
            ["loader", "samples/s", "seconds", "stall s", "first batch s", "samples/s"],
            [
                (m.loader, f"{m.samples_per_s:,.0f}", f"{m.seconds:.2f}", f"{m.stall_s:.2f}",
                 f"{m.first_s:.3f}", _bar(m.samples_per_s / fastest))
                for m in passes
            ],
        )  # fmt: skip
    sys.stdout.write("\n".join([*lines, _verdict(report), ""]))


def _story(report: DemoReport) -> Iterator[str]:
    packed, stop = report.packed, report.interruption
    verb = "found packed" if packed.reused else "packed"
    total = packed.train_samples + packed.held_out_samples
    yield (
        f"{total:,} images of {len(packed.classes)} classes from {packed.source}, "
        f"{packed.nbytes / 1e6:,.0f} MB, {verb} in {packed.seconds:.1f} s: "
        f"{packed.train_samples:,} to train on, {packed.held_out_samples:,} held out."
    )
    if packed.left_out:
        yield f"Left out: {', '.join(f'{count:,} {why}' for why, count in packed.left_out.items())}."
    yield (
        f"Killed (signal {stop.killed_by}) in epoch {stop.epoch} after {stop.killed_at:,} samples; "
        f"a new process went on from the checkpoint at {stop.resumed_at:,}."
    )
    yield (
        f"Order hash of that epoch: {stop.hash_resumed} across the kill, {stop.hash_uninterrupted} "
        f"without: {'identical' if stop.identical else 'DIFFERENT'}. "
        f"Each sample exactly once: {'yes' if report.exactly_once else 'NO'}."
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines of a table; the last column is a bar, those before are figures but for `loader`."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    yield title
    for row in (columns, *rows):
        *cells, bar = (
            text.ljust(width) if name == "loader" else text.rjust(width)
            for name, text, width in zip(columns, row, widths, strict=True)
        )
        yield f"  {'  '.join(cells)}  {bar.strip()}"
    yield ""


def _bar(share: float) -> str:
    """A bar of up to 20 cells, plain ASCII: it goes through every log and pipe."""
    return "#" * round(_BAR_CELLS * min(1.0, max(0.0, share)))


def _verdict(report: DemoReport) -> str:
    stalls = {m.loader: m.stall_s for m in report.comparison if m.work == "training"}
    waits = ", ".join(f"{stall_s:.2f} s with {name}" for name, stall_s in stalls.items())
    return (
        f"Held-out accuracy {report.accuracy:.1%} against {report.chance:.1%} by chance "
        f"(mean recall {report.epochs[-1].recall:.1%} against "
        f"{1 / len(report.packed.classes):.1%}). Headrace beside torch's better DataLoader: "
        f"{report.speedup('training'):.1f} x in training, {report.speedup('decoding'):.1f} x in decoded "
        f"images, {report.speedup('delivery'):.1f} x in files. Training waited {waits}. "
        f"{report.seconds:.0f} s in all."
    )
