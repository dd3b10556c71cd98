"""Trains a small vision transformer with PyTorch FSDP on any number of ranks, and goes on where it stopped.

    headrace launch train.py                     # all GPUs that there are, here or in an allocation
    sbatch job.sh                                # on a cluster

Weights and optimizer are cut among the ranks; each saves its own part, so no rank ever holds the whole
model. Asked to stop, all ranks leave after the same step and each saves its part; the next start goes
on with the very next batch, on as many ranks.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import headrace as hr
from headrace.cluster import should_stop
from headrace.torch import DataLoader

SIDE, PATCH = 48, 8


def decode(data: memoryview) -> Tensor:
    """One image file to uint8, shape (3, SIDE, SIDE); what is transparent is white."""
    with Image.open(io.BytesIO(data)) as image:
        small = image.convert("RGBA").resize((SIDE, SIDE), reducing_gap=2.0)
    white = Image.new("RGBA", small.size, "white")
    pixels = np.asarray(Image.alpha_composite(white, small).convert("RGB"))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


class Network(nn.Module):
    """A vision transformer: images in, scores of classes out."""

    def __init__(self, classes: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, width) / 50)
        layers = {"dropout": 0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, **layers) for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Score each image."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(1))


def own_parts(tree: Any) -> Any:
    """The tree, with this rank's part of each tensor that is cut among the ranks."""
    if isinstance(tree, dict):
        return {key: own_parts(value) for key, value in tree.items()}
    return tree.to_local() if isinstance(tree, DTensor) else tree


def joined(tree: Any, parts: Any) -> Any:
    """What `own_parts` gave, as tensors that are cut as those of `tree` are."""
    if isinstance(tree, dict):
        return {key: joined(value, parts[key]) for key, value in tree.items()}
    if not isinstance(tree, DTensor):
        return parts
    part, cut = parts.to(tree.device), (tree.device_mesh, tree.placements)
    return DTensor.from_local(part, *cut, shape=tree.shape, stride=tree.stride())


class Training:
    """A model and its data, and how far they are."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        reading = {"decode": decode, "on_error": options.on_error}
        self.loader = DataLoader(
            options.data, options.batch_size, shuffle=True, seed=options.seed, **reading
        )
        self.held_out = DataLoader(
            options.held_out, 256, order="sequential", tail="exact", **reading
        )
        classes = int(self.loader.dataset.store.labels.max()) + 1
        torch.manual_seed(options.seed)  # all ranks begin with the same weights
        self.model = Network(classes).to(device)
        half = torch.bfloat16 if device.type == "cuda" else None
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(half))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.steps = 0
        # Of the epoch, all ranks together: loss, hits, samples.
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.saved_s = 0.0

    def save(self) -> None:
        """Each rank saves its own part of model and optimizer; the checkpoint is whole when all have."""
        tree = {
            "states": own_parts(self.states()),
            "loader": self.loader.state_dict(),
            "sums": self.sums,
        }
        report = hr.checkpoint.save(tree, self.options.checkpoints, self.steps)
        self.saved_s += report.blocking_s

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        if hr.checkpoint.latest(self.options.checkpoints) is None:
            return
        saved = hr.checkpoint.load(self.options.checkpoints)
        states = joined(self.states(), saved.tree["states"])
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=states["model"], optim_state_dict=states["optimizer"],
        )  # fmt: skip
        self.loader.load_state_dict(saved.tree["loader"])
        self.sums.copy_(saved.tree["sums"])
        self.steps = saved.step

    def states(self) -> dict[str, Any]:
        """Of model and optimizer; tensors that are cut among the ranks stay so."""
        return dict(
            zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True)
        )

    def set_learning_rate(self) -> None:
        """By the share of all work that is done, so that it is the same for any number of ranks."""
        options = self.options
        done = self.loader.epoch + self.loader.position / self.loader.order.length
        done /= options.epochs
        rate = options.learning_rate * (options.batch_size * dist.get_world_size() / 64) ** 0.5
        rate *= min(1, 10 * done) * (1 + math.cos(math.pi * done)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def on_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch as the model wants it."""
        images = images.to(self.device, non_blocking=True).float().div_(255).sub_(0.5)
        return images, labels.to(self.device, non_blocking=True)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Learn from one batch."""
        images, labels = self.on_device(images, labels)
        scores = self.model(images).float()
        loss = cross_entropy(scores, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        tally = torch.tensor([0, 0, len(labels)]).to(self.sums)
        tally[0] = loss.detach() * len(labels)
        tally[1] = (scores.argmax(1) == labels).sum()
        dist.all_reduce(tally)
        self.sums += tally

    def run_epoch(self) -> bool:
        """Train the rest of the epoch under way; False: it was asked to stop, and saved."""
        epoch, began, before = self.loader.epoch, time.perf_counter(), self.used()
        seen, self.saved_s = self.sums[2].item(), 0.0
        for images, labels in self.loader:
            self.set_learning_rate()
            self.step(images, labels)
            if self.loader.position < self.loader.order.length:  # else the epoch's end saves
                stopping = should_stop()  # on all ranks after the same step
                if stopping or self.steps % self.options.save_every == 0:
                    self.save()
                if stopping:
                    return False
        samples = self.sums[2].item() - seen  # waits for the device, so that the time is true
        trained = time.perf_counter()
        accuracy = self.accuracy()
        used = self.used() - before
        dist.all_reduce(used)
        waited_s, reads, nbytes = used.tolist()
        if dist.get_rank() == 0:
            line = {
                "epoch": epoch,
                "loss": (self.sums[0] / self.sums[2]).item(),
                "accuracy": accuracy,
                "samples": int(samples),
                "seconds": trained - began,
                "waited_s": waited_s / dist.get_world_size(),
                "saved_s": self.saved_s,
                "evaluated_s": time.perf_counter() - trained,
                "at_s": time.time(),
                "reads": int(reads),
                "bytes": int(nbytes),
            }
            print(json.dumps(line), flush=True)
        self.sums.zero_()
        self.save()
        return not should_stop()

    @torch.no_grad()
    def accuracy(self) -> float:
        """The share of held-out images that are right; each is looked at by one rank."""
        hits = torch.zeros(2, device=self.device)
        for batch in self.held_out:
            images, labels = self.on_device(*batch)
            hits[0] += (self.model(images).argmax(1) == labels).sum()
            hits[1] += len(labels)
        dist.all_reduce(hits)
        return (hits[0] / hits[1]).item()

    def used(self) -> Tensor:
        """This rank's seconds of waiting for data, reads and bytes so far."""
        stats = self.loader.stats
        reads = stats.cached_reads + stats.direct_reads + stats.buffered_reads
        used = [stats.stall_s, reads, stats.bytes]
        return torch.tensor(used, dtype=torch.float64, device=self.device)


def main() -> None:
    """Train to the end, or until it is asked to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/train.hr", help="a store, or headrace://job")
    parser.add_argument("--held-out", default="data/held-out.hr")
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="for 64 images a step")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise",
        help="skip: leave out images that cannot be decoded, with a warning",
    )  # fmt: skip
    options = parser.parse_args()

    if "RANK" not in os.environ:  # no launcher: one rank, on this machine
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    training = Training(options, device)
    training.resume()
    while training.loader.epoch < options.epochs and training.run_epoch():
        pass
    hr.checkpoint.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
