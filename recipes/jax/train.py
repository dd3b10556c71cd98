"""Trains an image classifier with JAX on any number of processes, and goes on where it stopped.

    headrace launch --framework jax --ranks-per-node 4 train.py
    sbatch job.sh                                # on a cluster

Each process gets its part of one global order, the same for any number of processes, and the batches of
all are one array over one mesh. Asked to stop, all processes leave after the same step and weights and
data are saved; the next start goes on with the very next batch, on another number of processes too.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import time
from functools import partial
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image

import headrace as hr
from headrace.cluster import should_stop
from headrace.grain import dataset

SIDE = 48


def decode(data: memoryview) -> np.ndarray:
    """One image file to uint8, shape (SIDE, SIDE, 3); what is transparent is white."""
    with Image.open(io.BytesIO(data)) as image:
        small = image.convert("RGBA").resize((SIDE, SIDE), reducing_gap=2.0)
    white = Image.new("RGBA", small.size, "white")
    return np.asarray(Image.alpha_composite(white, small).convert("RGB"))


def new_weights(classes: int, seed: int) -> dict[str, Any]:
    """Of three convolutions and a linear layer."""
    keys = jax.random.split(jax.random.key(seed), 4)
    channels = (3, 16, 32, 64)
    kernels = [
        jax.random.normal(key, (3, 3, before, after)) * math.sqrt(2 / (9 * before))
        for key, before, after in zip(keys[:3], channels[:-1], channels[1:], strict=True)
    ]
    last = jax.random.normal(keys[3], (channels[-1], classes)) / math.sqrt(channels[-1])
    return {"kernels": kernels, "last": last, "bias": jnp.zeros(classes)}


@jax.jit
def scores_of(weights: dict[str, Any], images: jax.Array) -> jax.Array:
    """What the network says: float32, shape (images, classes)."""
    x = images.astype(jnp.float32) / 255 - 0.5
    for kernel in weights["kernels"]:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout)
        x -= x.mean((1, 2, 3), keepdims=True)  # layer normalization
        x = jax.nn.relu(x * jax.lax.rsqrt(jnp.square(x).mean((1, 2, 3), keepdims=True) + 1e-5))
    return x.mean((1, 2)) @ weights["last"] + weights["bias"]


def loss_of(weights: dict[str, Any], images: jax.Array, labels: jax.Array) -> Any:
    """The mean loss; also the sum of losses and how many guesses are right."""
    scores = scores_of(weights, images)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1)
    return losses.mean(), jnp.stack([losses.sum(), (scores.argmax(1) == labels).sum()])


@partial(jax.jit, donate_argnums=0)
def train(state: Any, images: jax.Array, labels: jax.Array, rate: float) -> Any:
    """One step of Adam; also the batch's loss, hits and samples."""
    weights, means, squares, step = state
    slopes, tally = jax.grad(loss_of, has_aux=True)(weights, images, labels)
    step += 1
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, slopes)
    squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, squares, slopes)
    rate *= jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    weights = jax.tree.map(
        lambda w, m, s: w - rate * m / (jnp.sqrt(s) + 1e-8), weights, means, squares
    )
    tally = jnp.append(tally, len(labels))
    return (weights, means, squares, step), tally


class Training:
    """Weights and data, and how far they are."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        mesh = jax.make_mesh((jax.device_count(),), ("batch",))
        self.cut = NamedSharding(mesh, PartitionSpec("batch"))
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.store = hr.open(options.data)
        batches = dataset(
            self.store, options.batch_size, seed=options.seed, decode=decode, tail="pad",
            epochs=options.epochs, device=self.cut,
        )  # fmt: skip
        ahead = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=4)
        self.batches = iter(ahead)  # its state counts what was delivered, not what was read ahead
        self.held_out = dataset(
            options.held_out, 64, order="sequential", decode=decode, tail="exact"
        )
        weights = new_weights(int(self.store.labels.max()) + 1, options.seed)
        zeros = jax.tree.map(np.zeros_like, weights)
        self.state = jax.device_put((weights, zeros, zeros, np.int32(0)), self.whole)
        self.steps = 0
        # Of the epoch, all processes together: loss, hits, samples.
        self.sums = np.zeros(3)
        self.saved_s = 0.0

    @property
    def epoch(self) -> int:
        """The one that is under way or, between epochs, that comes next."""
        return self.batches.get_state()["epoch"]

    def save(self) -> None:
        """All of it is the same on all processes: one saves, any number of them go on from it."""
        tree = {
            "state": [np.asarray(array) for array in jax.tree.leaves(self.state)],
            "data": self.batches.get_state(),
            "sums": self.sums,
        }
        if jax.process_index() == 0:
            folder = self.options.checkpoints
            report = hr.checkpoint.save(tree, folder, self.steps, rank=0, world_size=1)
            self.saved_s += report.blocking_s

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        if hr.checkpoint.latest(self.options.checkpoints) is None:
            return
        saved = hr.checkpoint.load(self.options.checkpoints, rank=0, world_size=1)
        state = jax.tree.unflatten(jax.tree.structure(self.state), saved.tree["state"])
        self.state = jax.device_put(state, self.whole)
        self.batches.set_state(saved.tree["data"])
        self.sums, self.steps = saved.tree["sums"], saved.step

    def learning_rate(self) -> float:
        """By the share of all work that is done, so that it is the same for any number of processes."""
        options, at = self.options, self.batches.get_state()
        done = (at["epoch"] + at["position"] / len(self.store)) / options.epochs
        rate = options.learning_rate * (options.batch_size * jax.process_count() / 64) ** 0.5
        return rate * min(1, 10 * done) * (1 + math.cos(math.pi * done)) / 2

    def run_epoch(self) -> bool:
        """Train the rest of the epoch under way; False: it was asked to stop, and saved."""
        epoch, began, waited_s = self.epoch, time.perf_counter(), 0.0
        samples, self.saved_s = self.sums[2], 0.0
        while self.epoch == epoch:
            asked_at = time.perf_counter()
            batch = next(self.batches)
            waited_s += time.perf_counter() - asked_at
            self.state, tally = train(
                self.state, batch["data"], batch["labels"], self.learning_rate()
            )
            self.sums += np.asarray(tally)
            self.steps += 1
            if self.epoch == epoch:  # else the epoch's end saves
                stopping = should_stop()  # on all ranks after the same step
                if stopping or self.steps % self.options.save_every == 0:
                    self.save()
                if stopping:
                    return False
        trained = time.perf_counter()
        tally = np.array([*self.hits(), waited_s])
        hits, seen, waited_s = process_allgather(tally).reshape(-1, len(tally)).sum(0).tolist()
        if jax.process_index() == 0:
            line = {
                "epoch": epoch,
                "loss": self.sums[0] / self.sums[2],
                "accuracy": hits / seen,
                "samples": int(self.sums[2] - samples),
                "seconds": trained - began,
                "waited_s": waited_s / jax.process_count(),
                "saved_s": self.saved_s,
                "evaluated_s": time.perf_counter() - trained,
                "at_s": time.time(),
                "reads": int(self.sums[2] - samples),
            }
            print(json.dumps(line), flush=True)
        self.sums[:] = 0
        self.save()
        return not should_stop()

    def hits(self) -> tuple[int, int]:
        """How many held-out images are right, of how many; each is looked at by one process."""
        weights = jax.device_get(self.state[0])
        hits = seen = 0
        for batch in self.held_out:
            guesses = scores_of(weights, batch["data"]).argmax(1)
            hits += int((guesses == batch["labels"]).sum())
            seen += len(guesses)
        return hits, seen


def main() -> None:
    """Train to the end, or until it is asked to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/train.hr", help="a store, or headrace://job")
    parser.add_argument("--held-out", default="data/held-out.hr")
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="for 64 images a step")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # the launcher says who meets where
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=int(os.environ["JAX_PROCESS_ID"]),
        )
    training = Training(options)
    training.resume()
    while training.epoch < options.epochs and training.run_epoch():
        pass
    training.batches.close()
    hr.checkpoint.wait()


if __name__ == "__main__":
    main()
