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

from headrace.torch import StoreLoader

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.torch import Sample

IMAGE_PIXELS = 48
"""Width and height of the network's input."""


def decode(data: memoryview | bytes) -> Tensor:
    """Decode an image onto white.

    Returns:
        uint8, shape (3, 48, 48).
    """
    size = (IMAGE_PIXELS, IMAGE_PIXELS)
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (2 * IMAGE_PIXELS, 2 * IMAGE_PIXELS))  # JPEG decodes smaller, faster
        # Alpha first, small first: both save most of the time and hardly change the picture.
        small = image.convert("RGBA").resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    white = Image.new("RGBA", size, "white")
    white.alpha_composite(small)
    pixels = np.asarray(white)[:, :, :3]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def decode_indexed(data: memoryview, sample: Sample) -> tuple[Tensor, int]:
    """Decode an image, and say which sample it is: the demo proves what was delivered."""
    return decode(data), sample.index


def normalized(images: Tensor) -> Tensor:
    """Return uint8 images as float32 in [-0.5, 0.5], same shape."""
    return images.float().div_(255).sub_(0.5).contiguous(memory_format=torch.channels_last)


def make_model(classes: int, seed: int) -> nn.Module:
    """Return the network: 26,000 weights, about 5 million multiplications per image."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *_block(3, 16, stride=2),
        *_block(16, 32, stride=1),
        nn.MaxPool2d(2),
        *_block(32, 64, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )
    # torch's own stubs do not know this overload.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _block(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


CHECKPOINT_EVERY = 10
"""Steps between checkpoints: few, so that the demo's kill falls between two."""

LEARNING_RATE = 0.01


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


class Training:
    """A model, a loader, and where both stand."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.loader = StoreLoader(
            job.train, job.batch_size, seed=job.seed, decode=decode_indexed, on_error="skip"
        )
        self.model = make_model(job.classes, job.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        steps = job.epochs * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, LEARNING_RATE, total_steps=steps
        )
        self.delivered: list[Tensor] = []
        self.loss_sum = 0.0
        self.seconds = 0.0
        self.stall_s = 0.0
        self._held_out: tuple[Tensor, Tensor] | None = None

    def save(self) -> None:
        """Write the checkpoint: at any time there is the old one or the new one."""
        path = Path(self.job.checkpoint)
        beside = path.with_suffix(".new")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "loader": self.loader.state_dict(),
                "delivered": torch.cat(self.delivered),
                "sums": [self.loss_sum, self.seconds, self.stall_s],
            },
            beside,
        )
        beside.replace(path)

    def resume(self) -> None:
        """Go on from the checkpoint."""
        saved = torch.load(self.job.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.loader.load_state_dict(saved["loader"])
        self.delivered = [saved["delivered"]]
        self.loss_sum, self.seconds, self.stall_s = saved["sums"]
        report("resumed", epoch=self.loader.epoch, position=self.loader.position)

    def run_epoch(self) -> None:
        """Train the rest of the epoch under way, then look at the held-out images."""
        epoch = self.loader.epoch
        asked_at = time.perf_counter()
        for (images, indices), labels in self.loader:
            got_at = time.perf_counter()
            self.stall_s += got_at - asked_at
            self._step(images, labels)
            self.delivered.append(indices)
            now = time.perf_counter()
            self.seconds += now - asked_at
            self._report_and_save(epoch)
            asked_at = time.perf_counter()
        self._end_epoch(epoch)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        self.model.train()
        loss = functional.cross_entropy(self.model(normalized(images)), labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        self.loss_sum += loss.item() * len(labels)

    def _report_and_save(self, epoch: int) -> None:
        at_end = self.loader.position == self.loader.order.length
        saved = len(self.delivered) % CHECKPOINT_EVERY == 0 and not at_end
        if saved:
            self.save()
        report("step", epoch=epoch, position=self.loader.position, saved=saved)

    def _end_epoch(self, epoch: int) -> None:
        delivered = torch.cat(self.delivered)
        once = set(delivered.tolist())
        accuracy, recall = self._evaluate()
        report(
            "epoch",
            epoch=epoch,
            loss=self.loss_sum / len(delivered),
            accuracy=accuracy,
            recall=recall,
            seconds=self.seconds,
            stall_s=self.stall_s,
            samples=len(delivered),
            doubled=len(delivered) - len(once),
            missing=len(self.loader.dataset) - len(once | {s.index for s in self.loader.skipped}),
            order_hash=self.loader.last_order_hash,
        )
        self.delivered = []
        self.loss_sum = self.seconds = self.stall_s = 0.0

    def _evaluate(self) -> tuple[float, float]:
        """Return the share of held-out images that are right, and the mean over classes of it."""
        images, labels = self._held_out_images()
        self.model.eval()
        with torch.no_grad():
            guesses = [self.model(normalized(part)).argmax(1) for part in torch.split(images, 256)]
        right = torch.cat(guesses) == labels
        recalls = [right[labels == label].float().mean() for label in set(labels.tolist())]
        return right.float().mean().item(), torch.stack(recalls).mean().item()

    def _held_out_images(self) -> tuple[Tensor, Tensor]:
        if self._held_out is None:
            loader = StoreLoader(
                self.job.held_out, 256, order="sequential", decode=decode_indexed, on_error="skip"
            )
            batches = [(images, labels) for (images, _), labels in loader]
            self._held_out = (
                torch.cat([images for images, _ in batches]),
                torch.cat([labels for _, labels in batches]),
            )
        return self._held_out


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
