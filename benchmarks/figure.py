"""Draws the one figure: samples/s of every engine, hot and cold, both data sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import limits
from benchmarks.results import Key

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.results import Results

OURS, PEER = "#0b6e99", "#b9c2c9"
_LIMIT = "#c0392b"
_TITLES = {"A": "A: samples around 110 kB", "B": "B: samples of 0.5 to 4 kB"}


def _panel(axes: Any, results: Results, dataset: str, temperature: str) -> None:
    def speed(engine: str) -> float:
        return results.median(Key(dataset, temperature, engine), "samples_per_s") or 0.0

    engines = results.engines(dataset, temperature)
    shown = sorted((name for name in engines if not name.startswith(limits.PREFIX)), key=speed)
    colours = [OURS if name.startswith("headrace") else PEER for name in shown]
    bars = axes.barh(shown, [speed(name) for name in shown], color=colours, height=0.7)
    axes.bar_label(bars, labels=[f"{speed(name):,.0f}" for name in shown], padding=3, fontsize=8)
    # The 4 kB probe counts reads of pages, not samples: it is no limit on samples/s here.
    probes = [
        name
        for name in engines
        if name.startswith(limits.PREFIX) and limits.mode_of(name)[0] != limits.URING_4K
    ]
    if probes:
        best = max(probes, key=speed)
        axes.axvline(speed(best), color=_LIMIT, linestyle="--", linewidth=1.2)
        axes.set_xlabel(f"samples/s; dashed: {best}, {speed(best):,.0f}", fontsize=8)
    else:
        axes.set_xlabel("samples/s", fontsize=8)
    axes.set_title(f"{_TITLES[dataset]}, {temperature}", fontsize=10, loc="left")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.get_major_locator().set_params(nbins=5)
    axes.margins(x=0.18)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw(results: Results, datasets: list[str], stem: Path) -> list[Path]:
    """Writes `stem`.svg and `stem`.png; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "headrace"  # the same data give the same file
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(datasets), 2, figsize=(11, 3.6 * len(datasets)), squeeze=False, layout="constrained"
    )
    for row, dataset in zip(panels, datasets, strict=True):
        for axes, temperature in zip(row, ("hot", "cold"), strict=True):
            _panel(axes, results, dataset, temperature)
    figure.suptitle("Random order, samples per second, medians", fontsize=11)
    written = [stem.with_suffix(f".{kind}") for kind in ("svg", "png")]
    for path in written:
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return written
