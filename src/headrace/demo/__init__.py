"""The demo: real images go in, a model trains on them through headrace, is killed and goes on.

It packs `images`, trains, kills, resumes, proves, compares; with progress on stderr and the result on stdout.

headrace is compared with torch's own DataLoader over the same images, twice: training, where each loader
feeds the same steps of the same network, and decoded images alone. Everything is in the page cache, for
every loader: the demo has just written or read it.

The process that trains is started, killed and started again. It trains from the checkpoint if there is one,
else from the beginning. Model, optimizer and loader go into one checkpoint, written every few steps and
replaced atomically. What happens is reported on stdout, one JSON document a line.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import data as torch_data

from headrace import api
from headrace.base.text import aligned
from headrace.demo.images import SEED, DemoOptions, pack_images
from headrace.errors import HeadraceError
from headrace.plane.images import ImageBatch, Images
from headrace.torch import StoreLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from headrace.demo.images import PackedImages
    from headrace.plane.batch import Batch

    Progress = Callable[[int, int | None, int, int | None], None]
    # Shows progress while a block runs: of what, in which unit.
    Phase = Callable[[str, str], AbstractContextManager[Progress | None]]

__all__ = ["DemoOptions", "DemoReport", "main", "run"]

IMAGE_PIXELS = 48  # width and height of the network's input
CHECKPOINT_EVERY = 10  # steps between checkpoints, at most: there is one before an epoch's middle

STEPS_MIN = 10  # of an epoch: a network on fewer learns little; small sets come in smaller batches

LEARNING_RATE = 0.01

IMAGES = Images(size=IMAGE_PIXELS, crop="stretch", background=(255, 255, 255))
"""What native threads make of an image."""


def decode(data: memoryview | bytes) -> Tensor:
    """Decode an image onto white with PIL, as people do: uint8, shape (3, 48, 48)."""
    size = (IMAGE_PIXELS, IMAGE_PIXELS)
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (2 * IMAGE_PIXELS, 2 * IMAGE_PIXELS))  # JPEG decodes smaller, faster
        # Alpha first, small first: both save most of the time and hardly change the picture.
        small = image.convert("RGBA").resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    white = Image.new("RGBA", size, "white")
    white.alpha_composite(small)
    pixels = np.asarray(white)[:, :, :3]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def make_model(classes: int, seed: int) -> nn.Module:
    """Return the network: 26,000 weights, about 3.5 million multiplications per image."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 2), (16, 32, 2), (32, 64, 1)):
        layers += [
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    # torch's own stubs do not know this overload.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def scores(model: nn.Module, images: Tensor) -> Tensor:
    """What the network says of uint8 images, shape (images, classes)."""
    pixels = images.float().div_(255).sub_(0.5).contiguous(memory_format=torch.channels_last)
    return model(pixels)  # type: ignore[no-any-return]


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> float:
    """Train on a batch; returns its loss."""
    loss = functional.cross_entropy(scores(model, images), labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


class TrainingJob(NamedTuple):
    """What to train on."""

    train: str
    held_out: str
    classes: int
    epochs: int
    batch_size: int
    seed: int
    checkpoint: str
    is_killed: bool = False  # in the middle of `KILLED_EPOCH`


def training_threads() -> int:
    """One half of the cores computes, the other half decodes."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def report(event: str, **fields: Any) -> None:
    """Report to the demo what happens."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _tensors(batches: Iterable[Batch]) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Images, labels, and which samples they are: the demo proves what was delivered."""
    for batch in batches:
        assert isinstance(batch, ImageBatch)
        assert batch.labels is not None
        # Labels and indices are the batch's own and cannot be written to.
        labels, indices = (torch.tensor(numbers) for numbers in (batch.labels, batch.indices))
        yield torch.from_numpy(batch.pixels), labels, indices


class Training:
    """A model, a loader, and where both stand."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.loader = api.loader(
            job.train, job.batch_size, seed=job.seed, decode=IMAGES, on_error="skip"
        )
        held_out = api.loader(job.held_out, 256, order="sequential", decode=IMAGES, on_error="skip")
        self.held_out = list(_tensors(held_out))
        self.model = make_model(job.classes, job.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, LEARNING_RATE, total_steps=job.epochs * len(self.loader)
        )
        self.parts: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "schedule": self.schedule,
            "loader": self.loader,
        }  # fmt: skip
        self.delivered: list[Tensor] = []
        self.loss_sum = self.seconds = self.stall_s = 0.0

    def save(self) -> None:
        """Write the checkpoint: at any time there is the old one or the new one."""
        path = Path(self.job.checkpoint)
        beside = path.with_suffix(".new")
        state = {name: part.state_dict() for name, part in self.parts.items()}
        sums = [self.loss_sum, self.seconds, self.stall_s]
        torch.save({**state, "delivered": torch.cat(self.delivered), "sums": sums}, beside)
        beside.replace(path)

    def resume(self) -> None:
        """Go on from the checkpoint."""
        saved = torch.load(self.job.checkpoint, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self.delivered = [saved["delivered"]]
        self.loss_sum, self.seconds, self.stall_s = saved["sums"]
        report("resumed", epoch=self.loader.epoch, position=self.loader.position)

    def run_epoch(self) -> None:
        """Train the rest of the epoch under way, then look at the held-out images."""
        epoch, length = self.loader.epoch, self.loader.order.length
        checkpoint_every = min(CHECKPOINT_EVERY, (len(self.loader) - 1) // 2)
        asked_at = time.perf_counter()
        for images, labels, indices in _tensors(self.loader):
            got_at = time.perf_counter()
            self.model.train()
            loss = take_step(self.model, self.optimizer, images, labels)
            self.schedule.step()
            self.loss_sum += loss * len(labels)
            self.delivered.append(indices)
            self.stall_s += got_at - asked_at
            self.seconds += time.perf_counter() - asked_at
            if self.job.is_killed and epoch == KILLED_EPOCH and self.loader.position * 2 > length:
                report("killed", position=self.loader.position)
                os.kill(os.getpid(), signal.SIGKILL)  # before it saves: as a crash would
            if len(self.delivered) % checkpoint_every == 0 and self.loader.position < length:
                self.save()
            report("step", samples=epoch * length + self.loader.position)
            asked_at = time.perf_counter()
        delivered = torch.cat(self.delivered)
        once = set(delivered.tolist())
        report(
            "epoch", epoch=epoch, loss=self.loss_sum / len(delivered), accuracy=self._accuracy(),
            seconds=self.seconds, stall_s=self.stall_s, samples=len(delivered),
            samples_per_s=len(delivered) / self.seconds, doubled=len(delivered) - len(once),
            missing=self.loader.order.samples - len(once | {s.index for s in self.loader.skipped}),
            order_hash=self.loader.last_order_hash,
        )  # fmt: skip
        self.delivered = []
        self.loss_sum = self.seconds = self.stall_s = 0.0

    def _accuracy(self) -> float:
        self.model.eval()
        with torch.no_grad():
            right = [
                scores(self.model, images).argmax(1) == labels
                for images, labels, _ in self.held_out
            ]
        return torch.cat(right).float().mean().item()


def run_training(job_text: str) -> None:
    """Train to the end, from the checkpoint if there is one; the job comes as JSON."""
    job = TrainingJob(*json.loads(job_text))
    torch.set_num_threads(training_threads())
    training = Training(job)
    if Path(job.checkpoint).exists():
        training.resume()
    while training.loader.epoch < job.epochs:
        training.run_epoch()
    report("done")


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

_TRAIN = "import sys; from headrace.demo import run_training; run_training(sys.argv[1])"


def _tell(what: str) -> None:
    sys.stderr.write(f"{what} ...\n")
    sys.stderr.flush()


def main(options: DemoOptions, phase: Phase | None = None, *, as_json: bool = False) -> int:
    """Run the demo and print its report; 0: the model beats chance, and the resumed order is the same."""
    _tell(f"a minute or two, on a busy machine more; all that is made lies in {options.out} then")
    report = run(options, phase)
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        show(report)
    return 0 if report.passed else 1


def run(options: DemoOptions, phase: Phase | None = None) -> DemoReport:
    """Run the whole demo; what it is at is told on stderr, and how far by `phase`.

    Raises SourceError if the images cannot be used, and HeadraceError if the training process failed.
    """
    started, phase = time.perf_counter(), phase or (lambda *_: nullcontext())
    _tell("packing")
    packed = pack_images(options)
    batch_size = max(1, min(options.batch_size, packed.train_samples // STEPS_MIN))
    options = replace(options, batch_size=batch_size)
    _tell(f"training in batches of {batch_size}")
    epochs, interruption = _train(packed, options, phase)
    with api.open(packed.held_out) as store:
        assert store.labels is not None
        chance = float(np.bincount(store.labels).max() / len(store))
    measured = _compare(packed, options)
    seconds = time.perf_counter() - started
    report = DemoReport(packed, epochs, interruption, chance, measured, seconds)
    (options.out / "report.json").write_text(json.dumps(report.to_dict(), indent=2))
    return report


def _train(
    packed: PackedImages, options: DemoOptions, phase: Phase
) -> tuple[list[EpochResult], Interruption]:
    """Train in a process that is killed in the second epoch, and to the end in another."""
    checkpoint = options.out / "checkpoint.pt"
    checkpoint.unlink(missing_ok=True)
    job = TrainingJob(
        str(packed.train), str(packed.held_out), len(packed.classes), options.epochs,
        options.batch_size, SEED, str(checkpoint),
    )  # fmt: skip
    epochs: list[EpochResult] = []
    killed_at = resumed_at = 0

    def train(job: TrainingJob, tell: Progress | None) -> int:
        """Follow a process; by which signal it was killed."""
        nonlocal killed_at, resumed_at
        with subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-c", _TRAIN, json.dumps(job)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for event in map(json.loads, process.stdout):
                    kind = event.pop("event")
                    if kind == "epoch":
                        epochs.append(EpochResult(**event))
                        _tell(f"training: epoch {event['epoch']} is done")
                    elif kind == "step" and tell is not None:
                        tell(event["samples"], options.epochs * packed.train_samples, 0, None)
                    elif kind == "resumed":
                        resumed_at = event["position"]
                    elif kind == "killed":
                        killed_at = event["position"]
                code = process.wait()
                if code and not (job.is_killed and killed_at):
                    raise HeadraceError(
                        f"the training process ended with status {code}.",
                        next_step="Its own error stands above.",
                    )
            finally:
                process.kill()
        return -code

    with phase("training", "images") as tell:
        killed_by = train(job._replace(is_killed=True), tell)
        train(job, tell)
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
            turns = [*loaders.items()] * PASSES  # without a bar, whose thread would run beside them
            _tell(f"comparing, {work}: {len(turns)} passes")
            for name, make in turns:
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
