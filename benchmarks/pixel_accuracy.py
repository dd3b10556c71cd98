"""Does it cost accuracy that JPEGs are decoded smaller? The same network with and without `exact=True`.

    pip install torch
    python -m benchmarks.pixel_accuracy             # five seeds; some minutes of one core

The demo's clip art (Debian's openclipart-png) as JPEGs of 384 pixels a side, cut at random to 48, so that most
regions are large enough to be decoded at 1/2, 1/4 or 1/8. For each seed a fifth is held out, and the network of
`accuracy` is trained twice, from the same initial weights, in the same order, with the same crops and flips.
Writes raw runs to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime as dt
import io
import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import headrace as hr
from benchmarks import machine
from benchmarks.accuracy import BATCH, RESULTS, SEEDS, labelled_clip_art, network, over_white
from benchmarks.processes import leaving_nothing

if TYPE_CHECKING:
    from collections.abc import Iterator

SIDE, SIZE, EPOCHS = 384, 48, 20


def pictures() -> Iterator[tuple[bytes, int]]:
    """JPEGs and their labels."""
    for picture, label in labelled_clip_art():
        over_white(picture.resize((SIDE, SIDE))).save(out := io.BytesIO(), "JPEG", quality=90)
        yield out.getvalue(), label


def packed(folder: Path, samples: list[tuple[bytes, int]], which: np.ndarray) -> Path:
    """A store of some of them."""
    hr.pack(((f"{i:06d}.jpg", *samples[i]) for i in which.tolist()), folder)
    return folder


def accuracy(train: Path, held_out: Path, seed: int, *, exact: bool) -> float:
    """The share of what was held out that is classified rightly."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "size": SIZE,
        "dtype": "float32",
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
    }
    images = hr.Images(**common, scale=(0.4, 1.0), flip=True, exact=exact)
    with hr.open(train) as store:
        assert store.labels is not None
        classes = int(store.labels.max()) + 1
    model = network((3, SIZE, SIZE), classes, normalised=True)
    steps = torch.optim.Adam(model.parameters(), 3e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(steps, EPOCHS)
    loader = hr.loader(train, BATCH, seed=seed, decode=images, tail="drop")
    model.train()
    for _ in range(EPOCHS):
        for batch in loader:
            steps.zero_grad(set_to_none=True)
            loss = cross_entropy(
                model(torch.from_numpy(batch.pixels)), torch.from_numpy(batch.labels)
            )
            loss.backward()
            steps.step()
        rate.step()
    loader.close()
    model.eval()
    # Judged by the same pixels, whatever it was trained with.
    middle = hr.Images(**common, crop="stretch", exact=True)
    right = total = 0
    for batch in hr.loader(held_out, BATCH, decode=middle, tail="exact"):
        with torch.no_grad():
            guesses = model(torch.from_numpy(batch.pixels)).argmax(1).numpy()
        right, total = right + int((guesses == batch.labels).sum()), total + len(batch)
    return right / total


def runs(seeds: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Both ways with each seed."""
    samples = list(pictures())
    for seed in seeds:
        out, kept = np.split(
            np.random.default_rng(seed).permutation(len(samples)), [len(samples) // 5]
        )
        with tempfile.TemporaryDirectory() as name:
            train, held_out = (
                packed(Path(name) / part, samples, which)
                for part, which in (("a", kept), ("b", out))
            )
            both = {
                way: accuracy(train, held_out, seed, exact=way == "exact")
                for way in ("exact", "smaller")
            }
        print(
            f"seed {seed}: exact {both['exact']:.3f}, decoded smaller {both['smaller']:.3f}",
            flush=True,
        )
        yield {"seed": seed, **both}


@leaving_nothing()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many (1 to 5)")
    given = parser.parse_args()
    results = list(runs(SEEDS[: given.seeds]))
    gaps = [100 * (each["smaller"] - each["exact"]) for each in results]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    print(
        f"decoded smaller: {statistics.mean(gaps):+.2f} points of accuracy, standard error {error:.2f}, "
        f"{len(gaps)} seeds"
    )
    path = RESULTS / f"pixel_accuracy-{dt.datetime.now(dt.UTC):%Y-%m-%d}.json"
    about = {"side": SIDE, "size": SIZE, "epochs": EPOCHS, "machine": machine.describe(RESULTS)}
    path.write_text(json.dumps({**about, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
