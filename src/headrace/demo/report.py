"""DemoReport: the demo's results as data, and as tables and bars for a terminal or a log."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from headrace.demo.comparison import LoaderPass
    from headrace.demo.images import PackedImages


@dataclass(frozen=True, slots=True)
class EpochResult:
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
    samples_per_s: float


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
    identical: bool
    """Whether the two orders are the same."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo found."""

    packed: PackedImages
    epochs: list[EpochResult]
    interruption: Interruption
    chance: float
    """Share of the most common class: what always naming it gets right."""
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
        return plain | {
            "accuracy": self.accuracy,
            "exactly_once": self.exactly_once,
            "passed": self.passed,
            "speedup_training": self.speedup("training"),
            "speedup_decoding": self.speedup("decoding"),
            "speedup_delivery": self.speedup("delivery"),
        }


_BAR_CELLS = 20

_LOG_COLUMNS = 110

_WORKS = {
    "training": "Training: one step a batch, same network for all; torch decodes with PIL",
    "decoding": "Decoded images alone",
    "delivery": "Files alone: nothing is decoded",
}


def show(report: DemoReport) -> None:
    """Print the report: tables and bars, with colour where the terminal has it."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _LOG_COLUMNS)
    for line in _story(report):
        console.print(line, markup=False, soft_wrap=not console.is_terminal)
    console.print()
    console.print(
        _table(
            f"Training, held-out accuracy by chance: {report.chance:.1%}",
            ["epoch", "loss", "held-out accuracy", "mean recall", "samples/s", "stall s", "accuracy"],
            [
                (str(e.epoch), f"{e.loss:.3f}", f"{e.accuracy:.1%}", f"{e.recall:.1%}",
                 f"{e.samples_per_s:,.0f}", f"{e.stall_s:.2f} of {e.seconds:.1f}", _bar(e.accuracy))
                for e in report.epochs
            ],
            left=0,
        )
    )  # fmt: skip
    for work, title in _WORKS.items():
        passes = [m for m in report.comparison if m.work == work]
        fastest = max(m.samples_per_s for m in passes)
        console.print(
            _table(
                title,
                ["loader", "samples/s", "seconds", "stall s", "first batch s", "samples/s"],
                [
                    (m.loader, f"{m.samples_per_s:,.0f}", f"{m.seconds:.2f}", f"{m.stall_s:.2f}",
                     f"{m.first_s:.3f}", _bar(m.samples_per_s / fastest))
                    for m in passes
                ],
                left=1,
            )
        )  # fmt: skip
    console.print(_verdict(report), markup=False, soft_wrap=not console.is_terminal)


def _story(report: DemoReport) -> list[str]:
    packed, stop = report.packed, report.interruption
    verb = "found packed" if packed.reused else "packed"
    total = packed.train_samples + packed.held_out_samples
    contents = (
        f"{total:,} images of {len(packed.classes)} classes from {packed.source}, "
        f"{packed.nbytes / 1e6:,.0f} MB, {verb} in {packed.seconds:.1f} s: "
        f"{packed.train_samples:,} to train on, {packed.held_out_samples:,} held out."
    )
    reasons = ", ".join(f"{count:,} {why}" for why, count in packed.left_out.items())
    killed = (
        f"Killed (signal {stop.killed_by}) in epoch {stop.epoch} after {stop.killed_at:,} samples; "
        f"a new process went on from the checkpoint at {stop.resumed_at:,}."
    )
    same = "identical" if stop.identical else "DIFFERENT"
    once = "yes" if report.exactly_once else "NO"
    proof = (
        f"Order hash of that epoch: {stop.hash_resumed} across the kill, "
        f"{stop.hash_uninterrupted} without: {same}. Each sample exactly once: {once}."
    )
    return [contents, *([f"Left out: {reasons}."] if reasons else []), killed, proof]


def _table(
    title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]], *, left: int
) -> Table:
    """A table; all columns but the first `left` ones are figures, and the last is a bar."""
    from rich import box
    from rich.table import Table

    # Lines of ASCII go through every log and pipe.
    style = box.ROUNDED if sys.stdout.isatty() else box.ASCII
    table = Table(title=title, title_justify="left", box=style)
    for number, name in enumerate(columns[:-1]):
        table.add_column(name, justify="left" if number < left else "right")
    table.add_column(columns[-1], no_wrap=True, min_width=_BAR_CELLS)
    for row in rows:
        table.add_row(*row)
    return table


def _bar(share: float) -> str:
    """A bar of up to 20 cells, plain ASCII."""
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
