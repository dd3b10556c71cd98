"""Accuracy by order: what small networks learn from sets sorted by class, beside our numbers of an order.

    pip install torch scikit-learn matplotlib
    python -m benchmarks.accuracy             # about fifteen minutes of one core
    python -m benchmarks.accuracy --quick     # two seeds
    python -m benchmarks.accuracy --draw benchmarks/results/accuracy-DATE.json

Three sets, each sorted by class, as a folder of class folders is: scikit-learn's digits, the demo's clip art
(Debian's openclipart-png, 20 x 20 pixels), and a synthetic one (four Gaussian clouds a class). For each seed
a fifth is held out, the rest is packed as it lies and once more with `shuffle=SEED`, and a network is trained
from either in every order: SGD with momentum and batch normalisation, or Adam without. Accuracy is that after
the last step, on what was held out; the label mix is the mean over the epochs trained. Where a set's package
is missing, the set is left out, and that is said.

Writes raw runs to benchmarks/results/ and a figure to docs/images/accuracy.svg.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import tempfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import headrace as hr
from benchmarks.processes import leaving_nothing
from headrace.order import Blocked, LabelMix, Opportunistic, Order, Sequential, Shuffled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from PIL import Image

    Images = tuple[NDArray[np.float32], NDArray[np.int64]]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
FIGURE = ROOT / "docs/images/accuracy.svg"
BATCH = 32
SEEDS = (101, 102, 103, 104, 105)
"""Others than those that the label mix was tried on before it was settled."""

PAIR = ("shuffled", "blocked 32 x 4, shuffled pack")
PAIR_SEEDS = tuple(range(106, 126))
"""These two should be equal: that takes more seeds to see than how the orders rank."""

CLIP_ART_OF_A_CLASS = 160
CLIP_ART_PIXELS = 20
OPTIMISERS = ("SGD + BatchNorm", "Adam")


# -- the sets -----------------------------------------------------------------------------------------


def digits() -> Images:
    """1,797 handwritten digits of 8 x 8 pixels, which come with scikit-learn."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images[:, None].astype(np.float32) / 16 - 0.3, bunch.target.astype(np.int64)


def synthetic() -> Images:
    """4,000 points in 24 dimensions, of ten classes of four clouds each."""
    random = np.random.default_rng(3)
    classes, clouds, count, dimensions = 10, 4, 4000, 24
    centres = random.normal(size=(classes, clouds, dimensions)) * 0.9
    labels = random.integers(0, classes, count)
    points = centres[labels, random.integers(0, clouds, count)] + random.normal(
        size=(count, dimensions)
    )
    return points.astype(np.float32), labels.astype(np.int64)


def labelled_clip_art() -> Iterator[tuple[Image.Image, int]]:
    """The demo's images, at most 160 of a class: in RGBA, with the numbers of their classes."""
    from PIL import Image

    from headrace.demo.images import DemoOptions, choose, list_images

    options = DemoOptions()
    choice = choose(list_images(options.source), options)
    taken: Counter[str] = Counter()
    for file in choice.images:
        if taken[file.class_name] == CLIP_ART_OF_A_CLASS:
            continue
        taken[file.class_name] += 1
        with Image.open(file.path) as opened:
            yield opened.convert("RGBA"), choice.classes.index(file.class_name)


def over_white(picture: Image.Image) -> Image.Image:
    """A picture in RGB, with white behind what is transparent."""
    from PIL import Image

    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    return white.convert("RGB")


def clip_art() -> Images:
    """The demo's images of 20 x 20 pixels."""
    pictures, labels = [], []
    for picture, label in labelled_clip_art():
        small = over_white(picture).resize((CLIP_ART_PIXELS, CLIP_ART_PIXELS))
        pictures.append(np.asarray(small, np.float32).transpose(2, 0, 1) / 255 - 0.5)
        labels.append(label)
    return np.array(pictures), np.array(labels, np.int64)


SETS: dict[str, tuple[Callable[[], Images], int]] = {
    "digits": (digits, 4),
    "clip art": (clip_art, 8),
    "synthetic": (synthetic, 8),
}
"""How each is made, and for how many epochs it is trained on."""


# -- the orders ---------------------------------------------------------------------------------------


class SamePart(Order):
    """Opportunistic as it was: the same half of the data first in every epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence."""
        return {"mode": "same part", "samples": self.samples, "seed": self.seed}

    def _of(self, epoch: int) -> Opportunistic:
        half = ((0, self.samples // 2),)
        return Opportunistic(self.samples, half, seed=1000 * self.seed + epoch)

    def randomness(self) -> Any:
        """Return that of each epoch."""
        return self._of(0).randomness()

    def _indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        return self._of(epoch).indices(0, start, stop)


def orders(n: int, seed: int) -> dict[str, tuple[str, Order]]:
    """By name: from which pack, and in which order."""
    half, quarter = ((0, n // 2),), ((0, n // 4),)
    plain = {
        "shuffled": Shuffled(n, seed),
        "blocked 4 x 64": Blocked(n, 4, 64, seed),
        "blocked 16 x 16": Blocked(n, 16, 16, seed),
        "blocked 8 x 4": Blocked(n, 8, 4, seed),
        "blocked 32 x 4": Blocked(n, 32, 4, seed),
        "blocked 32 x 1": Blocked(n, 32, 1, seed),
        "opportunistic, first epoch": Opportunistic(n, half, seed),
        "opportunistic, 4 epochs in turn": Opportunistic(n, quarter, seed, epochs=4),
        "opportunistic, same part always": SamePart(n, seed),
        "sequential": Sequential(n),
    }
    packs: dict[str, tuple[str, Order]] = {name: ("sorted", each) for name, each in plain.items()}
    packs["blocked 32 x 4, shuffled pack"] = "shuffled", Blocked(n, 32, 4, seed)
    return packs


class Pack(NamedTuple):
    """A packed store, read: samples in the store's order."""

    samples: NDArray[np.float32]
    labels: NDArray[np.int64]


def packed(folder: Path, images: Images, seed: int) -> dict[str, Pack]:
    """The training part, sorted by class, as it lies and shuffled."""
    pictures, labels = images

    def samples() -> Iterator[tuple[str, bytes, int]]:
        for i in np.argsort(labels, kind="stable").tolist():
            yield f"{i:06d}", pictures[i].tobytes(), int(labels[i])

    packs = {}
    for name, shuffle in (("sorted", None), ("shuffled", seed)):
        hr.pack(samples, folder / name, shuffle=shuffle)
        with hr.open(folder / name) as store:
            data = b"".join(bytes(store.read(i)) for i in range(len(store)))
            assert store.labels is not None
            shape = (len(store), *pictures.shape[1:])
            rows = np.frombuffer(data, np.float32).reshape(shape)
            packs[name] = Pack(rows.copy(), store.labels.astype(np.int64))
    return packs


# -- training -----------------------------------------------------------------------------------------


def network(shape: tuple[int, ...], classes: int, *, normalised: bool) -> Any:
    """A perceptron of two hidden layers, or three convolutions where samples are coloured pictures."""
    from torch import nn

    def norm(width: int, kind: Any) -> list[Any]:
        return [kind(width)] if normalised else []

    if len(shape) < 3 or shape[0] == 1:
        layers: list[Any] = [nn.Flatten()]
        for before, after in ((int(np.prod(shape)), 64), (64, 64)):
            layers += [nn.Linear(before, after), *norm(after, nn.BatchNorm1d), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(64, classes))
    layers = []
    for before, after, stride in ((3, 16, 2), (16, 32, 2), (32, 32, 1)):
        layers += [
            nn.Conv2d(before, after, 3, stride, 1),
            *norm(after, nn.BatchNorm2d),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, classes))


def accuracy(
    pack: Pack, held_out: Images, order: Order, optimiser: str, seed: int, epochs: int
) -> float:
    """Train, and return the share of what was held out that is classified rightly."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(seed)
    classes = int(max(pack.labels.max(), held_out[1].max())) + 1
    model = network(pack.samples.shape[1:], classes, normalised=optimiser != "Adam")
    steps: Any = (
        torch.optim.Adam(model.parameters(), 2e-3)
        if optimiser == "Adam"
        else torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    )
    samples, labels = torch.from_numpy(pack.samples), torch.from_numpy(pack.labels)
    model.train()
    for epoch in range(epochs):
        indices = torch.from_numpy(order.indices(epoch, 0, order.length))
        for batch in indices.split(BATCH)[: len(indices) // BATCH]:
            steps.zero_grad(set_to_none=True)
            cross_entropy(model(samples[batch]), labels[batch]).backward()
            steps.step()
    model.eval()
    with torch.no_grad():
        guesses = model(torch.from_numpy(held_out[0])).argmax(1).numpy()
    return float((guesses == held_out[1]).mean())


def runs_of(
    name: str, seeds: tuple[int, ...], only: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Train on one set in every order, or in some."""
    make, epochs = SETS[name]
    images, labels = make()
    for seed in seeds:
        shuffled = np.random.default_rng(seed).permutation(len(labels))
        out, kept = np.split(shuffled, [len(labels) // 5])
        held_out = images[out], labels[out]
        with tempfile.TemporaryDirectory() as folder:
            packs = packed(Path(folder), (images[kept], labels[kept]), seed)
        for title, (pack, order) in orders(len(kept), seed).items():
            if only and title not in only:
                continue
            mixes = [
                LabelMix.of(order, packs[pack].labels, BATCH, epoch=epoch).distance
                for epoch in range(epochs)
            ]
            randomness = order.randomness()
            for optimiser in OPTIMISERS:
                started = time.perf_counter()
                right = accuracy(packs[pack], held_out, order, optimiser, seed, epochs)
                yield {
                    "set": name, "optimiser": optimiser, "order": title, "seed": seed, "accuracy": right,
                    "label_mix": statistics.mean(mixes), "entropy_share": randomness.entropy_share,
                    "level": randomness.level, "seconds": time.perf_counter() - started,
                }  # fmt: skip


# -- what it says -------------------------------------------------------------------------------------


def ranks(values: list[float]) -> NDArray[np.float64]:
    """Ranks of numbers, equal ones sharing theirs."""
    array = np.array(values)
    return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])


def spearman(one: list[float], other: list[float]) -> float:
    """Spearman's rank correlation."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def mean_of(runs: list[dict[str, Any]], field: str, **where: str) -> float:
    """The mean of a field over the runs of a cell."""
    return statistics.mean(r[field] for r in runs if all(r[k] == v for k, v in where.items()))


def summary(runs: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Spearman's correlations, and what blocks of a shuffled pack gain or lose against a full shuffle."""
    cells = list(dict.fromkeys((r["set"], r["optimiser"]) for r in runs))
    titles = list(dict.fromkeys(r["order"] for r in runs))
    correlations: dict[str, dict[str, float]] = {}
    relative: dict[str, list[float]] = {title: [] for title in titles}
    for name, optimiser in cells:
        here = {"set": name, "optimiser": optimiser}
        accuracies = [mean_of(runs, "accuracy", order=t, **here) for t in titles]
        for title, each in zip(titles, accuracies, strict=True):
            relative[title].append(each / accuracies[titles.index("shuffled")])
        correlations[f"{name}, {optimiser}"] = {
            field: abs(
                spearman([mean_of(runs, field, order=t, **here) for t in titles], accuracies)
            )
            for field in ("label_mix", "entropy_share", "level")
        }
    whole = [statistics.mean(relative[title]) for title in titles]
    correlations["all, relative to shuffled"] = {
        field: abs(spearman([mean_of(runs, field, order=t) for t in titles], whole))
        for field in ("label_mix", "entropy_share", "level")
    }
    gained = {}
    for name, optimiser in cells:
        own = [r for r in runs + pairs if (r["set"], r["optimiser"]) == (name, optimiser)]
        full, packed_so = ({r["seed"]: r["accuracy"] for r in own if r["order"] == t} for t in PAIR)
        points = [100 * (packed_so[seed] - full[seed]) for seed in full]
        gained[f"{name}, {optimiser}"] = {
            "points": statistics.mean(points),
            "standard_error": statistics.stdev(points) / len(points) ** 0.5,
            "seeds": len(points),
        }
    return {
        "spearman": correlations,
        "relative": dict(zip(titles, whole, strict=True)),
        "shuffled_pack": gained,
    }


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Orders by label mix: accuracy of each set and optimiser."""
    cells = list(dict.fromkeys((r["set"], r["optimiser"]) for r in runs))
    titles = sorted(
        dict.fromkeys(r["order"] for r in runs), key=lambda t: mean_of(runs, "label_mix", order=t)
    )
    lines = [f"{'order':34} {'mix':>5}  " + "  ".join(f"{s}, {o.split()[0]}" for s, o in cells)]
    for title in titles:
        columns = [
            f"{mean_of(runs, 'accuracy', order=title, set=s, optimiser=o):.3f}".rjust(
                len(f"{s}, {o.split()[0]}")
            )
            for s, o in cells
        ]
        mix = mean_of(runs, "label_mix", order=title)
        lines.append(f"{title:34} {mix:5.2f}  " + "  ".join(columns))
    return lines


def draw(document: dict[str, Any], path: Path) -> None:
    """The figure: accuracy by order, orders by their label mix; needs matplotlib."""
    import matplotlib as mpl

    from benchmarks.figure import OURS, PEER

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "headrace"  # the same data give the same file
    from matplotlib import pyplot as plt

    runs = document["runs"]
    names = list(dict.fromkeys(r["set"] for r in runs))
    titles = sorted(
        dict.fromkeys(r["order"] for r in runs),
        key=lambda t: mean_of(runs, "label_mix", order=t),
        reverse=True,
    )
    shown = [f"{title}  ({mean_of(runs, 'label_mix', order=title):.2f})" for title in titles]
    figure, panels = plt.subplots(
        1, len(names), figsize=(11, 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, name in zip(panels[0], names, strict=True):
        for shift, colour, optimiser in zip((0.2, -0.2), (OURS, PEER), OPTIMISERS, strict=True):
            values = [
                [r["accuracy"] for r in runs
                 if (r["set"], r["order"], r["optimiser"]) == (name, title, optimiser)]
                for title in titles
            ]  # fmt: skip
            means = [statistics.mean(v) for v in values]
            spread = [statistics.pstdev(v) for v in values]
            places = np.arange(len(titles)) + shift
            axes.barh(places, means, 0.38, color=colour, xerr=spread, label=optimiser,
                      error_kw={"linewidth": 0.8})  # fmt: skip
        axes.set_yticks(np.arange(len(titles)), shown)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("accuracy on what was held out", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][len(names) // 2].legend(fontsize=8, loc="lower right", framealpha=0.9)
    figure.suptitle(
        "Sets sorted by class: accuracy by order, orders by their label mix "
        f"(means of {len(document['seeds'])} seeds)", fontsize=11,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


@leaving_nothing()
def main() -> None:
    """Train, print what was seen, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--draw", metavar="JSON", help="only draw the figure of an earlier run")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(Path(options.draw).read_text()), FIGURE)
        return
    import torch

    from benchmarks import machine

    torch.set_num_threads(1)
    seeds = SEEDS[:2] if options.quick else SEEDS
    runs: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    cannot: dict[str, str] = {}
    for name in SETS:
        try:
            for run in runs_of(name, seeds):
                runs.append(run)
                print(".", end="", flush=True)
            pairs += [] if options.quick else runs_of(name, PAIR_SEEDS, PAIR)
        except (ImportError, hr.errors.SourceError) as e:
            cannot[name] = str(e)
            print(f"\n{name} is left out: {e}")
    results = summary(runs, pairs)
    print("", *table(runs), json.dumps(results, indent=1), sep="\n")
    packages = {p: metadata.version(p) for p in ("torch", "numpy")}
    document = {
        "machine": machine.describe(RESULTS), "packages": packages, "batch": BATCH,
        "seeds": seeds, "pair_seeds": PAIR_SEEDS,
        "epochs": {name: epochs for name, (_, epochs) in SETS.items()}, "left_out": cannot,
        "summary": results, "runs": runs, "pairs": pairs,
    }  # fmt: skip
    path = RESULTS / f"accuracy-{dt.datetime.now(dt.UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")
    if not options.quick:
        draw(document, FIGURE)
        print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
