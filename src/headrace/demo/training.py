"""Training: the network, and the process that the demo starts, kills and starts again.

It trains from the checkpoint if there is one, else from the beginning. Model, optimizer and loader
go into one checkpoint, written every few steps and replaced atomically. What happens is reported on
stdout, one JSON document a line.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from headrace import api
from headrace.plane.images import ImageBatch, Images

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.plane.batch import Batch

IMAGE_PIXELS = 48  # width and height of the network's input
CHECKPOINT_EVERY = 10  # steps between checkpoints: few, so that the demo's kill falls between two

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
        epoch = self.loader.epoch
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
            at_end = self.loader.position == self.loader.order.length
            saved = len(self.delivered) % CHECKPOINT_EVERY == 0 and not at_end
            if saved:
                self.save()
            report("step", epoch=epoch, position=self.loader.position, saved=saved)
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
