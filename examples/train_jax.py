"""Train a small image classifier with JAX, straight from a folder of images.

    python examples/train_jax.py photos/ --epochs 3

The folder has one subfolder per class. Stop it at any time (Ctrl-C) and start it again: it goes on
with the very next batch, because the data's state is in the checkpoint beside the model's. Needs
`pip install 'headrace[jax]'`.
"""

from __future__ import annotations

import argparse
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import headrace as hr
from headrace.grain import dataset

SIDE = 32
RATE = 0.02


def decode(data: memoryview) -> np.ndarray:
    """One image file to one small image, float32, shape (SIDE, SIDE, 3)."""
    image = Image.open(io.BytesIO(data)).convert("RGBA").resize((SIDE, SIDE))
    white = Image.new("RGBA", image.size, "white")  # what is transparent shows it
    return np.asarray(Image.alpha_composite(white, image).convert("RGB"), np.float32) / 255


def new_model(classes: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(1))
    inputs, hidden = SIDE * SIDE * 3, 64
    return {
        "w1": jax.random.normal(first, (inputs, hidden)) / jnp.sqrt(inputs),
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, classes)) / jnp.sqrt(hidden),
        "b2": jnp.zeros(classes),
    }


def augment(images: jax.Array, indices: jax.Array, epoch: jax.Array) -> jax.Array:
    """Flip half of the images; which ones depends on sample and epoch only, not on the run."""
    key = jax.random.fold_in(jax.random.key(7), epoch)
    flip = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(key, i)))(indices)
    return jnp.where(flip[:, None, None, None], images[:, :, ::-1], images)


def loss_of(
    model: dict[str, jax.Array], images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    flat = images.reshape(len(images), -1) - 0.5
    hidden = jax.nn.relu(flat @ model["w1"] + model["b1"])
    logits = hidden @ model["w2"] + model["b2"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -chosen.mean(), (logits.argmax(1) == labels).mean()


@partial(jax.jit, donate_argnums=(0, 1))
def step(
    model: dict[str, jax.Array], speed: dict[str, jax.Array], batch: dict[str, Any], epoch: int
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array, jax.Array]:
    """Stochastic gradient descent with momentum."""
    images = augment(batch["data"], batch["indices"], epoch)
    (loss, hits), slope = jax.value_and_grad(loss_of, has_aux=True)(model, images, batch["labels"])
    speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, slope)
    model = jax.tree.map(lambda w, v: w - RATE * v, model, speed)
    return model, speed, loss, hits


def save(path: Path, model: dict[str, jax.Array], speed: dict[str, jax.Array], data: Any) -> None:
    arrays = {f"model.{k}": v for k, v in model.items()} | {
        f"speed.{k}": v for k, v in speed.items()
    }
    np.savez(path, data=json.dumps(data), **{k: np.asarray(v) for k, v in arrays.items()})


def restore(path: Path) -> tuple[dict[str, jax.Array], dict[str, jax.Array], Any]:
    with np.load(path) as saved:
        model = {k[6:]: jnp.asarray(saved[k]) for k in saved.files if k.startswith("model.")}
        speed = {k[6:]: jnp.asarray(saved[k]) for k in saved.files if k.startswith("speed.")}
        return model, speed, json.loads(str(saved["data"]))


def train(
    folder: Path, checkpoint: Path, epochs: int, batch_size: int, stop_after: int | None
) -> list[float]:
    """Train until `epochs` are over or `stop_after` batches were seen; return their losses."""
    store = hr.open(folder)
    batches = iter(dataset(store, batch_size, seed=1, decode=decode, tail="drop", epochs=epochs))
    model = new_model(len(store.classes or ()))
    speed = jax.tree.map(jnp.zeros_like, model)
    if checkpoint.exists():
        model, speed, state = restore(checkpoint)
        batches.set_state(state)
        print(f"resumed in epoch {state['epoch']}, {state['position']} samples in")

    losses: list[float] = []
    of_epoch: list[tuple[float, float]] = []
    try:
        epoch = batches.get_state()["epoch"]
        for batch in batches:
            model, speed, loss, hits = step(model, speed, batch, epoch)
            losses.append(float(loss))
            of_epoch.append((float(loss), float(hits)))
            if len(losses) == stop_after:
                break
            if batches.get_state()["epoch"] != epoch:
                mean, accuracy = np.mean(of_epoch, axis=0)
                print(f"epoch {epoch}: loss {mean:.4f}, accuracy {accuracy:.3f}")
                epoch, of_epoch = epoch + 1, []
    finally:
        save(checkpoint, model, speed, batches.get_state())  # after Ctrl-C too
        batches.close()
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder with a subfolder of images per class")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint-jax.npz"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--stop-after", type=int, help="stop after so many batches")
    chosen = parser.parse_args(arguments)
    return train(
        chosen.folder, chosen.checkpoint, chosen.epochs, chosen.batch_size, chosen.stop_after
    )


if __name__ == "__main__":
    main()
