"""Run: pack, train, kill, resume, prove, compare; with progress on stderr and the result on stdout.

headrace is compared with torch's own DataLoader over the same images, twice: training, where each loader
feeds the same steps of the same network, and decoded images alone. Everything is in the page cache, for
every loader: the demo has just written or read it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import data as torch_data

from headrace import api
from headrace.base.text import aligned
from headrace.demo.images import SEED, pack_images
from headrace.demo.training import (
    IMAGE_PIXELS,
    IMAGES,
    TrainingJob,
    decode,
    make_model,
    take_step,
    training_threads,
)
from headrace.errors import HeadraceError
from headrace.torch import StoreLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace.demo.images import DemoOptions, PackedImages


# -- the report: the results as data, and as tables and bars of plain text -----------------------------


@dataclass(frozen=True, slots=True)
class EpochResult:
    """One epoch of training."""

    epoch: int
    loss: float
    accuracy: float  # share of held-out images that are right
    samples: int
    seconds: float
    stall_s: float  # seconds that training waited for data
    order_hash: str
    doubled: int  # samples that were delivered more than once
    missing: int  # samples that were not delivered, unreadable ones not counted
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class Interruption:
    """The kill in mid-epoch, and the proof that it changed nothing."""

    epoch: int
    killed_at: int  # samples of the epoch that were delivered when the process was killed
    resumed_at: int  # samples of the epoch that the checkpoint knew of
    killed_by: int  # the signal that ended the process
    hash_resumed: str  # order hash of the epoch, across the kill
    hash_uninterrupted: str  # order hash of a pass over the same epoch without a kill
    identical: bool  # whether the two orders are the same


@dataclass(frozen=True, slots=True)
class LoaderPass:
    """One loader's pass."""

    work: str  # `training` or `decoding`
    loader: str
    samples: int
    seconds: float
    first_s: float  # seconds to the first batch, start of workers included
    stall_s: float  # seconds that the consumer waited for batches, the first one included
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
}


def show(report: DemoReport) -> None:
    """Print the report."""
    heads = ("epoch", "loss", "held-out accuracy", "samples/s", "stall s", "accuracy")
    rows = [
        (str(e.epoch), f"{e.loss:.3f}", f"{e.accuracy:.1%}",
         f"{e.samples_per_s:,.0f}", f"{e.stall_s:.2f} of {e.seconds:.1f}", _bar(e.accuracy))
        for e in report.epochs
    ]  # fmt: skip
    lines = [*_story(report), "", f"Training, held-out accuracy by chance: {report.chance:.1%}"]
    lines += [*aligned([heads, *rows], ">>>>><"), ""]
    for work, title in _WORKS.items():
        passes = [m for m in report.comparison if m.work == work]
        fastest = max(m.samples_per_s for m in passes)
        columns = ("loader", "samples/s", "seconds", "stall s", "first batch s", "samples/s")
        loaders = [
            (m.loader, f"{m.samples_per_s:,.0f}", f"{m.seconds:.2f}", f"{m.stall_s:.2f}",
             f"{m.first_s:.3f}", _bar(m.samples_per_s / fastest))
            for m in passes
        ]  # fmt: skip
        lines += [title, *aligned([columns, *loaders], "<>>>><"), ""]
    sys.stdout.write("\n".join([*lines, _verdict(report), ""]))


def _story(report: DemoReport) -> Iterator[str]:
    packed, stop = report.packed, report.interruption
    total = packed.train_samples + packed.held_out_samples
    yield (
        f"{total:,} images of {len(packed.classes)} classes from {packed.source}, "
        f"{packed.nbytes / 1e6:,.0f} MB, packed in {packed.seconds:.1f} s: "
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


def _bar(share: float) -> str:
    """A bar of up to 20 cells, plain ASCII: it goes through every log and pipe."""
    return "#" * round(_BAR_CELLS * min(1.0, max(0.0, share)))


def _verdict(report: DemoReport) -> str:
    stalls = {m.loader: m.stall_s for m in report.comparison if m.work == "training"}
    waits = ", ".join(f"{stall_s:.2f} s with {name}" for name, stall_s in stalls.items())
    return (
        f"Held-out accuracy {report.accuracy:.1%} against {report.chance:.1%} by chance. Headrace beside "
        f"torch's better DataLoader: "
        f"{report.speedup('training'):.1f} x in training, {report.speedup('decoding'):.1f} x in decoded "
        f"images. Training waited {waits}. {report.seconds:.0f} s in all."
    )


# -- the demo ------------------------------------------------------------------------------------------

PASSES = 3  # passes of each loader in the comparison; odd, so that the median is one of them
KILLED_EPOCH = 1  # the second epoch: the first has shown that training works, and others follow

_TRAIN = "import sys; from headrace.demo.training import run_training; run_training(sys.argv[1])"


def _tell(what: str) -> None:
    sys.stderr.write(f"{what} ...\n")
    sys.stderr.flush()


def main(options: DemoOptions, *, as_json: bool = False) -> int:
    """Run the demo and print its report; 0: the model beats chance, and the resumed order is the same."""
    report = run(options)
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        show(report)
    return 0 if report.passed else 1


def run(options: DemoOptions) -> DemoReport:
    """Run the whole demo; what it is at is told on stderr.

    Raises SourceError if the images cannot be used, and HeadraceError if the training process failed.
    """
    started = time.perf_counter()
    _tell("packing")
    packed = pack_images(options)
    epochs, interruption = _train(packed, options)
    with api.open(packed.held_out) as store:
        assert store.labels is not None
        chance = float(np.bincount(store.labels).max() / len(store))
    measured = _compare(packed, options)
    seconds = time.perf_counter() - started
    report = DemoReport(packed, epochs, interruption, chance, measured, seconds)
    (options.out / "report.json").write_text(json.dumps(report.to_dict(), indent=2))
    return report


def _train(packed: PackedImages, options: DemoOptions) -> tuple[list[EpochResult], Interruption]:
    """Train in a process that is killed in the second epoch, and to the end in another."""
    checkpoint = options.out / "checkpoint.pt"
    checkpoint.unlink(missing_ok=True)
    job = TrainingJob(
        str(packed.train), str(packed.held_out), len(packed.classes), options.epochs,
        options.batch_size, SEED, str(checkpoint),
    )  # fmt: skip
    samples = packed.train_samples
    epochs: list[EpochResult] = []
    resumed_at = 0

    def train(*, kill: bool) -> tuple[int, int]:
        """Follow a process; where and by which signal it was killed."""
        nonlocal resumed_at
        with subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-c", _TRAIN, json.dumps(job)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for event in map(json.loads, process.stdout):
                    kind, position = event.pop("event"), event.get("position", 0)
                    if kind == "epoch":
                        epochs.append(EpochResult(**event))
                        _tell(f"training: epoch {event['epoch']} is done")
                    elif kind == "resumed":
                        resumed_at = position
                    elif kind == "step":
                        # In the middle of the epoch, after a step that no checkpoint knows of.
                        middle = event["epoch"] == KILLED_EPOCH and position * 2 > samples
                        if kill and middle and not event["saved"]:
                            process.send_signal(signal.SIGKILL)  # as a crash of the machine would
                            return position, -process.wait()
                if code := process.wait():
                    raise HeadraceError(
                        f"the training process ended with status {code}.",
                        next_step="Its own error stands above.",
                    )
            finally:
                process.kill()
        return 0, 0

    killed_at, killed_by = train(kill=True)
    train(kill=False)
    with api.open(packed.train) as store:  # the same epoch in one go
        loader = api.loader(store, options.batch_size, seed=SEED, rank=0, world_size=1)
        loader.set_epoch(KILLED_EPOCH)
        for _ in loader:
            pass
        loader.close()
        uninterrupted = str(loader.last_order_hash)
    resumed = epochs[KILLED_EPOCH].order_hash
    return epochs, Interruption(
        KILLED_EPOCH, killed_at, resumed_at, killed_by, resumed, uninterrupted,
        identical=resumed == uninterrupted,
    )  # fmt: skip


# -- beside torch's own loader -------------------------------------------------------------------------


class _Files(torch_data.Dataset[Any]):
    """What a PyTorch user writes today: a list of files, opened and decoded one by one."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._samples[index]
        return decode(Path(path).read_bytes()), label


def _compare(packed: PackedImages, options: DemoOptions) -> list[LoaderPass]:
    """Measure the loaders in turn, three times each; a loader's median pass counts."""
    batch_size = options.batch_size
    with api.open(packed.train) as store:
        paths = [str(packed.source / name) for name in store.names]
        assert store.labels is not None
        files = _Files(list(zip(paths, map(int, store.labels), strict=True)))

    def headrace(function: Any) -> Iterable[Any]:
        return StoreLoader(packed.train, batch_size, shuffle=True, seed=SEED, decode=function)

    def torch_loader(workers: int) -> Iterable[Any]:
        return torch_data.DataLoader(files, batch_size, shuffle=True, num_workers=workers)

    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        "headrace, Images": lambda: headrace(IMAGES),
        "headrace, PIL in threads": lambda: headrace(decode),
        "torch, 0 workers": lambda: torch_loader(0),
        "torch, 2 workers": lambda: torch_loader(2),
    }
    steps = -(-options.compare_samples // batch_size)
    passes = []
    threads = torch.get_num_threads()
    torch.set_num_threads(training_threads())
    try:
        for work in _WORKS:
            measured: dict[str, list[LoaderPass]] = {name: [] for name in loaders}
            _tell(work)
            for name, make in [*loaders.items()] * PASSES:
                step = _train_step(len(packed.classes), batch_size) if work == "training" else None
                measured[name].append(_measure(work, name, islice(make(), steps), step))
            passes += [
                sorted(some, key=lambda one: one.samples_per_s)[PASSES // 2]
                for some in measured.values()
            ]
    finally:
        torch.set_num_threads(threads)
    return passes


def _train_step(classes: int, batch_size: int) -> Callable[[Any], object]:
    model = make_model(classes, SEED)
    optimizer = torch.optim.AdamW(model.parameters())
    # The first step of a process makes kernels and buffers: no loader should pay for that.
    size = (batch_size, 3, IMAGE_PIXELS, IMAGE_PIXELS)
    nothing = torch.zeros(size, dtype=torch.uint8), torch.zeros(batch_size, dtype=torch.int64)
    take_step(model, optimizer, *nothing)
    return lambda batch: take_step(model, optimizer, *batch)


def _measure(
    work: str, name: str, batches: Iterable[Any], train: Callable[[Any], object] | None
) -> LoaderPass:
    samples, stall_s, first_s = 0, 0.0, 0.0
    started = asked_at = time.perf_counter()
    for batch in batches:
        got_at = time.perf_counter()
        stall_s += got_at - asked_at
        first_s = first_s or got_at - started
        if train is not None:
            train(batch)
        samples += len(batch[1])
        asked_at = time.perf_counter()
    seconds = asked_at - started
    return LoaderPass(work, name, samples, seconds, first_s, stall_s, samples / seconds)
