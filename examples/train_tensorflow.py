"""Train a small image classifier with TensorFlow, straight from a folder of images.

    python examples/train_tensorflow.py photos/ --epochs 3

The folder has one subfolder per class. Stop it at any time (Ctrl-C) and start it again: it goes on
with the very next batch, because the data's state is in the checkpoint beside the model's. Needs
`pip install 'headrace[tensorflow]'`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tensorflow as tf

import headrace as hr
from headrace.tensorflow import Loader

SIDE = 32


def decode(data: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """One image file to one small, randomly flipped image; the same for a seed, on any run."""
    image = tf.io.decode_image(data, channels=4, expand_animations=False)
    image = tf.image.resize(image, (SIDE, SIDE)) / 255.0
    color, alpha = image[..., :3], image[..., 3:]
    image = color * alpha + 1 - alpha  # what is transparent shows white
    return tf.image.stateless_random_flip_left_right(image, seed)


def new_model(classes: int) -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((SIDE, SIDE, 3)),
            tf.keras.layers.Conv2D(16, 3, 2, activation="relu"),
            tf.keras.layers.Conv2D(32, 3, 2, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(classes),
        ]
    )


def train(
    folder: Path, checkpoint: Path, epochs: int, batch_size: int, stop_after: int | None
) -> list[float]:
    """Train until `epochs` are over or `stop_after` batches were seen; return their losses."""
    tf.keras.utils.set_random_seed(1)
    store = hr.open(folder)
    loader = Loader(store, batch_size, seed=1, decode=decode, tail="drop")
    model = new_model(len(store.classes or ()))
    optimizer = tf.keras.optimizers.Adam(2e-3)
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    state = tf.train.Checkpoint(model=model, optimizer=optimizer, data=loader)
    checkpoints = tf.train.CheckpointManager(state, str(checkpoint), max_to_keep=1)
    if checkpoints.restore_or_initialize():
        print(f"resumed in epoch {loader.epoch}, {loader.position} samples in")

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = loss_of(labels, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        hits = tf.reduce_mean(tf.cast(tf.argmax(logits, 1) == labels, tf.float32))
        return loss, hits

    losses: list[float] = []
    try:
        for epoch in range(loader.epoch, epochs):
            accuracy = tf.keras.metrics.Mean()
            begun = len(losses)
            for images, labels in loader:
                loss, hits = step(images, labels)
                losses.append(float(loss))
                accuracy.update_state(hits)
                if len(losses) == stop_after:
                    return losses
            mean = sum(losses[begun:]) / max(1, len(losses) - begun)
            print(f"epoch {epoch}: loss {mean:.4f}, accuracy {float(accuracy.result()):.3f}")
    finally:
        checkpoints.save()  # after Ctrl-C too
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder with a subfolder of images per class")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint-tensorflow"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--stop-after", type=int, help="stop after so many batches")
    chosen = parser.parse_args(arguments)
    return train(
        chosen.folder, chosen.checkpoint, chosen.epochs, chosen.batch_size, chosen.stop_after
    )


if __name__ == "__main__":
    main()
