"""Trains an image classifier with TensorFlow's MultiWorkerMirroredStrategy, and goes on where it stopped.

    headrace launch --framework tensorflow --ranks-per-node 4 train.py
    sbatch job.sh                                # on a cluster

A worker for each GPU; TF_CONFIG, which the launcher writes, names them. Each worker gets its part of
one global order, the same for any number of workers. Asked to stop, all workers leave after the same
step and model and loader are saved; the next start goes on with the very next batch, on another number
of workers too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import headrace as hr
from headrace.cluster import should_stop
from headrace.tensorflow import Loader

SIDE = 48


def decode(data: tf.Tensor) -> tf.Tensor:
    """One image file to float32, shape (SIDE, SIDE, 3); what is transparent is white."""
    image = tf.io.decode_image(data, channels=4, expand_animations=False)
    image = tf.image.resize(image, (SIDE, SIDE)) / 255.0
    color, alpha = image[..., :3], image[..., 3:]
    return color * alpha + (1 - alpha) - 0.5


def network(classes: int) -> tf.keras.Model:
    """Three convolutions and a linear layer."""
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((SIDE, SIDE, 3))])
    for channels in (16, 32, 64):
        model.add(layers.Conv2D(channels, 3, strides=2, padding="same", use_bias=False))
        model.add(layers.GroupNormalization(8))
        model.add(layers.ReLU())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(classes))
    return model


class Training:
    """A model and its data, and how far they are."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self.workers = self.strategy.num_replicas_in_sync
        self.rank = self.strategy.cluster_resolver.task_id or 0
        store = hr.open(options.data)
        self.loader = Loader(
            store, options.batch_size, seed=options.seed, decode=decode, tail="pad"
        )
        self.held_out = Loader(
            options.held_out, 64, order="sequential", decode=decode, tail="exact"
        )
        tf.keras.utils.set_random_seed(options.seed)  # all workers begin with the same weights
        with self.strategy.scope():
            self.model = network(int(store.labels.max()) + 1)
            self.optimizer = tf.keras.optimizers.AdamW()
            self.optimizer.build(self.model.trainable_variables)
        self.steps = 0
        # Of the epoch, all workers together: loss, hits, samples.
        self.sums = np.zeros(3)
        self.saved_s = 0.0

    def save(self) -> None:
        """All of it is the same on all workers: one saves, any number of them go on from it."""
        tree = {
            "model": [variable.numpy() for variable in self.model.variables],
            "optimizer": [variable.numpy() for variable in self.optimizer.variables],
            "loader": self.loader.state_dict(),
            "sums": self.sums,
        }
        if self.rank == 0:
            folder = self.options.checkpoints
            report = hr.checkpoint.save(tree, folder, self.steps, rank=0, world_size=1)
            self.saved_s += report.blocking_s

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        if hr.checkpoint.latest(self.options.checkpoints) is None:
            return
        saved = hr.checkpoint.load(self.options.checkpoints, rank=0, world_size=1)
        for name in ("model", "optimizer"):
            variables = getattr(self, name).variables
            for variable, value in zip(variables, saved.tree[name], strict=True):
                variable.assign(value)
        self.loader.load_state_dict(saved.tree["loader"])
        self.sums, self.steps = saved.tree["sums"], saved.step

    def set_learning_rate(self) -> None:
        """By the share of all work that is done, so that it is the same for any number of workers."""
        options = self.options
        done = self.loader.epoch + self.loader.position / self.loader.order.length
        done /= options.epochs
        rate = options.learning_rate * (options.batch_size * self.workers / 64) ** 0.5
        self.optimizer.learning_rate = rate * min(1, 10 * done) * (1 + math.cos(math.pi * done)) / 2

    @tf.function
    def step(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Learn from a batch of each worker; loss, hits and samples of all of them."""

        def on_worker(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                scores = self.model(images, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
                loss = tf.reduce_mean(losses) / self.workers  # their gradients are added
            slopes = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(slopes, self.model.trainable_variables, strict=True))
            hits = tf.reduce_sum(tf.cast(tf.argmax(scores, 1) == labels, tf.float32))
            return tf.stack([tf.reduce_sum(losses), hits, float(len(labels))])

        tally = self.strategy.run(on_worker, (images, labels))
        return self.strategy.reduce("SUM", tally, axis=None)

    @tf.function
    def over_all(self, tally: tf.Tensor) -> tf.Tensor:
        """The sum over all workers."""
        return self.strategy.reduce("SUM", self.strategy.run(tf.identity, (tally,)), axis=None)

    @tf.function(reduce_retracing=True)
    def hits_of(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """How many of this worker's images are right."""
        return tf.math.count_nonzero(tf.argmax(self.model(images), 1) == labels)

    def run_epoch(self) -> bool:
        """Train the rest of the epoch under way; False: it was asked to stop, and saved."""
        epoch, began, before = self.loader.epoch, time.perf_counter(), self.used()
        samples, self.saved_s, waited_s, asked_at = self.sums[2], 0.0, 0.0, began
        for images, labels in self.loader:
            waited_s += time.perf_counter() - asked_at
            self.set_learning_rate()
            self.sums += self.step(images, labels).numpy()
            self.steps += 1
            if self.loader.epoch == epoch:  # else the epoch's end saves
                stopping = should_stop()  # on all ranks after the same step
                if stopping or self.steps % self.options.save_every == 0:
                    self.save()
                if stopping:
                    return False
            asked_at = time.perf_counter()
        trained = time.perf_counter()
        tally = [*self.hits(), waited_s, *(self.used() - before)]
        tally = self.over_all(tf.constant(tally, tf.float64))
        hits, seen, waited_s, reads, nbytes = tally.numpy().tolist()
        if self.rank == 0:
            line = {
                "epoch": epoch,
                "loss": self.sums[0] / self.sums[2],
                "accuracy": hits / seen,
                "samples": int(self.sums[2] - samples),
                "seconds": trained - began,
                "waited_s": waited_s / self.workers,
                "saved_s": self.saved_s,
                "evaluated_s": time.perf_counter() - trained,
                "at_s": time.time(),
                "reads": int(reads),
                "bytes": int(nbytes),
            }
            print(json.dumps(line), flush=True)
        self.sums[:] = 0
        self.save()
        return not should_stop()

    def hits(self) -> tuple[int, int]:
        """How many held-out images are right, of how many; each is looked at by one worker."""
        hits = seen = 0
        for images, labels in self.held_out:
            if len(labels):  # of the last ones there may be fewer than workers
                hits += int(self.hits_of(images, labels))
                seen += len(labels)
        return hits, seen

    def used(self) -> np.ndarray:
        """This worker's reads and bytes so far."""
        stats = self.loader.stats
        reads = stats.cached_reads + stats.direct_reads + stats.buffered_reads
        return np.array([reads, stats.bytes], np.float64)


def main() -> None:
    """Train to the end, or until it is asked to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/train.hr", help="a store, or headrace://job")
    parser.add_argument("--held-out", default="data/held-out.hr")
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="for 64 images a step")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:  # one for each worker of this node
        mine = gpus[int(os.environ.get("LOCAL_RANK", "0")) % len(gpus)]
        tf.config.set_visible_devices(mine, "GPU")
    training = Training(options)
    training.resume()
    while training.loader.epoch < options.epochs and training.run_epoch():
        pass
    hr.checkpoint.wait()


if __name__ == "__main__":
    main()
