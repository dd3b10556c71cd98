"""What a scene showed, in figures: caps, shares, hand-over, and life without a controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.policy_parts.scene import Scene

STEP_S = 0.05
WINDOW_S = 0.5


def judge(scene: Scene) -> dict[str, Any]:
    """The figures that the goals are about."""
    plot, at = scene.plot, scene.events
    rest = plot.capacity - plot.cap
    ended, killed = at["c ends"], at["controller killed"]
    capped = scene.windows("a", 0.0, killed + plot.lease_s - 1.0)
    b, c = scene.windows("b", 0.0, ended), scene.windows("c", 0.0, ended)
    lapsed = killed + plot.lease_s + 0.5
    after = at["controller serves"] + 2.5
    return {
        "storage": f"simulated {plot.simulate}",
        "cap_max_over_5s": float(capped.max() / plot.cap),
        "cap_min_over_5s": float(capped.min() / plot.cap),
        "share_b_over_5s": [float(b.min() / (rest * 2 / 3)), float(b.max() / (rest * 2 / 3))],
        "share_c_over_5s": [float(c.min() / (rest / 3)), float(c.max() / (rest / 3))],
        "unused_share_reused_s": _reached(scene, "b", ended, 0.95 * rest),
        "without_controller_b": scene.rate("b", killed, killed + plot.lease_s - 1.0) / rest,
        "after_lease_a": scene.rate("a", lapsed, at["controller starts"]) / plot.floor,
        "after_lease_b": scene.rate("b", lapsed, at["controller starts"]) / plot.floor,
        "after_return_a": scene.rate("a", after, at["end"]) / plot.cap,
        "after_return_b": scene.rate("b", after, at["end"]) / rest,
        "policy_holds_again_s": _reached(scene, "b", at["controller serves"], 0.95 * rest),
    }


def _reached(scene: Scene, job: str, begin: float, rate: float) -> float | None:
    """Seconds from `begin` to the middle of the first window in which a job has this rate."""
    when = begin
    while when < scene.events["end"]:
        if scene.rate(job, when - WINDOW_S / 2, when + WINDOW_S / 2) >= rate:
            return round(max(0.0, when - begin), 3)
        when += STEP_S
    return None


def draw(scene: Scene, stem: Path) -> list[Path]:
    """Write `stem`.svg and `stem`.png; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "headrace"
    from matplotlib import pyplot as plt

    end = scene.events["end"]
    figure, axes = plt.subplots(figsize=(11, 4.2), layout="constrained")
    colours = {"a": "#c0392b", "b": "#0b6e99", "c": "#e0a030"}
    names = {"a": "a: capped at", "b": "b: weight 2", "c": "c: weight 1"}
    names["a"] += f" {scene.plot.cap / 1e6:.0f} MB/s"
    for job, colour in colours.items():
        times = [WINDOW_S / 2 + k * STEP_S for k in range(int((end - WINDOW_S) / STEP_S))]
        rates = [scene.rate(job, t - WINDOW_S / 2, t + WINDOW_S / 2) / 1e6 for t in times]
        axes.plot(times, rates, color=colour, label=names[job], linewidth=1.5)
    marks = {
        "c ends": "c ends", "controller killed": "controller killed (-9)",
        "controller serves": "controller back",
    }  # fmt: skip
    for event, text in marks.items():
        _mark(axes, scene.events[event], text)
    lapse_s = scene.events["controller killed"] + scene.plot.lease_s
    _mark(axes, lapse_s, "lease ends: floor", down=24)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MB/s delivered, over 0.5 s")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", ncols=3, bbox_to_anchor=(0, 1.16))
    figure.suptitle(
        f"Three jobs, one controller, {scene.plot.capacity / 1e6:.0f} MB/s to share "
        f"(storage: simulated {scene.plot.simulate})",
        fontsize=10, x=0.99, ha="right",
    )  # fmt: skip
    written = [stem.with_suffix(f".{kind}") for kind in ("svg", "png")]
    for path in written:
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return written


def _mark(axes: Any, when: float, text: str, down: int = 10) -> None:
    axes.axvline(when, color="#777777", linestyle="--", linewidth=1)
    axes.annotate(
        text, (when, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -down),
        textcoords="offset points", fontsize=8, color="#444444",
    )  # fmt: skip
