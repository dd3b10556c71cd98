"""Similarity: how far a recorded job and its emulation, recorded likewise, read the same.

Every figure has one formula: what both have, divided by what either has. Of two amounts that is the smaller one
over the larger. Of two curves it is the area below both over the area below the higher one. The curve of sizes,
of concurrency and of step times says for each value which share of requests or steps is larger: the area below
it is the mean, the area between two is the distance of the distributions (Wasserstein's). The curve of rates
says for each moment, since the first request, which share of the bytes is not yet read: its slope is the rate.

So each figure is 1 for the same and 0 for nothing in common, and counts in seconds and bytes: an emulation of
the right shape that takes twice as long has 0.5. What is shorter than a step, rates do not show; steps do.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.text import aligned, bytes_text, seconds_text
from headrace.pages import charts
from headrace.pages.html import card_list, document, safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from headrace.trace.recorded import Recorded

    Floats = NDArray[np.float64]

FIGURES: Final = {
    "volume": "bytes read", "sizes": "sizes of requests", "rates": "rates over time",
    "concurrency": "requests at a time", "steps": "step times",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobBehaviour:
    """What of a record is compared; what it does not have is empty."""

    nbytes: int  # that were read, of training and evaluation
    sizes: Floats
    """float64 (reads,): bytes of each request: a sample, read in one go or in the parts of a file."""
    begin_s: Floats
    """float64 (reads,): when each began, since the first one did; of training, as the next three."""
    in_flight: Floats  # float64 (reads,): requests in calls when each began, itself included
    step_s: Floats
    """float64 (steps,): waiting and computing, without the steps in which an epoch begins."""
    wait_share: float  # of these

    @property
    def lacks(self) -> frozenset[str]:
        """The figures that it cannot have."""
        timed = () if len(self.begin_s) else ("rates", "concurrency")
        return frozenset((*timed, *(() if len(self.step_s) else ("steps",))))

    def facts(self) -> dict[str, Any]:
        """For JSON; None is not known."""
        timed, steps = len(self.begin_s) > 0, len(self.step_s) > 0
        return {
            "bytes": self.nbytes, "requests": len(self.sizes),
            "seconds": float(self.begin_s.max()) if timed else None,
            "request_bytes_mean": float(self.sizes.mean()),
            "in_flight_mean": float(self.in_flight.mean()) if timed else None,
            "steps": len(self.step_s),
            "step_s_mean": float(self.step_s.mean()) if steps else None,
            "step_s_p50": float(np.median(self.step_s)) if steps else None,
            "wait_share": self.wait_share if steps else None,
        }  # fmt: skip


def behaviour_of(recorded: Recorded) -> JobBehaviour:
    """What a record says."""
    begin_s = recorded.begin_s
    in_flight = np.zeros(0)
    if len(begin_s):
        ends = np.sort(begin_s + recorded.call_s)
        begun = np.searchsorted(np.sort(begin_s), begin_s, "right")
        in_flight = np.maximum(begun - np.searchsorted(ends, begin_s, "right"), 1).astype(float)
    sizes = recorded.sample_bytes[np.concatenate([recorded.order, recorded.valid_order])]
    step_s = (recorded.compute_s + recorded.wait_s).astype(float)
    return JobBehaviour(
        nbytes=int(sizes.sum()), sizes=sizes.astype(float), begin_s=begin_s, in_flight=in_flight,
        step_s=step_s, wait_share=float(recorded.wait_s.sum() / max(step_s.sum(), 1e-9)),
    )  # fmt: skip


def of_amounts(a: float, b: float) -> float:
    """The smaller over the larger of two amounts that are not negative."""
    return min(a, b) / max(a, b) if max(a, b) > 0 else 1.0


def larger(values: Floats, at: Floats, weights: Floats | None = None) -> Floats:
    """Which share of the values, by weight, is larger than each of `at`."""
    order = np.argsort(values)
    weight = np.ones(len(values)) if weights is None else weights[order]
    below = np.concatenate([[0.0], np.cumsum(weight)])
    share: Floats = 1 - below[np.searchsorted(values[order], at, "right")] / max(below[-1], 1e-300)
    return share


def of_distributions(a: Floats, b: Floats, weights: tuple[Floats, Floats] | None = None) -> float:
    """Of the curves that say which share of values is larger; values are not negative, at least one each."""
    at = np.unique(np.concatenate([[0.0], a, b]))
    of_a, of_b = weights or (None, None)
    curves = np.stack([larger(a, at[:-1], of_a), larger(b, at[:-1], of_b)])
    both, either = (float((curve * np.diff(at)).sum()) for curve in (curves.min(0), curves.max(0)))
    return both / either if either > 0 else 1.0


@dataclass(frozen=True)
class Similarity:
    """A job and its emulation beside each other: figures of 0 to 1, by `FIGURES`; those that both can have."""

    job: JobBehaviour
    emulation: JobBehaviour
    figures: dict[str, float]

    @property
    def whole(self) -> float:
        """Their mean."""
        return float(np.mean(list(self.figures.values())))

    @property
    def values(self) -> dict[str, float]:
        """The figures, and, where there are all, their mean as `similarity`."""
        whole = {"similarity": self.whole} if len(self.figures) == len(FIGURES) else {}
        return self.figures | whole

    def document(self) -> dict[str, Any]:
        """For JSON."""
        facts = {"job": self.job.facts(), "emulation": self.emulation.facts()}
        figures = {name: self.figures.get(name) for name in FIGURES}
        return {"similarity": self.whole, "figures": figures, **facts}


def similarity_of(job: JobBehaviour, emulation: JobBehaviour) -> Similarity:
    """Compare the two; neither is the measure of the other."""
    a, b = job, emulation
    weights = a.sizes[: len(a.begin_s)], b.sizes[: len(b.begin_s)]
    compared: dict[str, Callable[[], float]] = {
        "volume": lambda: of_amounts(a.nbytes, b.nbytes),
        "sizes": lambda: of_distributions(a.sizes, b.sizes),
        "rates": lambda: of_distributions(a.begin_s, b.begin_s, weights),
        "concurrency": lambda: of_distributions(a.in_flight, b.in_flight),
        "steps": lambda: of_distributions(a.step_s, b.step_s),
    }
    unknown = a.lacks | b.lacks
    return Similarity(a, b, {name: of() for name, of in compared.items() if name not in unknown})


# -- what is shown -----------------------------------------------------------------------------------

_POINTS: Final = 240  # of a curve, at most


def lines_of(similarity: Similarity) -> Iterator[str]:
    """A line for each figure, then what is beside them."""
    cells: list[tuple[str, ...]] = [("", "similarity", "job", "emulation")]
    values = [_values(side) for side in (similarity.job, similarity.emulation)]
    for name, title in FIGURES.items():
        figure = similarity.figures.get(name)
        shown = "not known" if figure is None else f"{figure:.3f}"
        cells.append((title, shown, *(side[name] for side in values)))
    all_of_them = "all (mean)" if len(similarity.figures) == len(FIGURES) else "these (mean)"
    cells.append((all_of_them, f"{similarity.whole:.3f}", "", ""))
    cells.append(("waiting for data, not compared", "", *(side["waiting"] for side in values)))
    yield from aligned(cells, "<>>>")


def _values(job: JobBehaviour) -> dict[str, str]:
    values = {
        "volume": bytes_text(job.nbytes),
        "sizes": f"{bytes_text(float(job.sizes.mean()))} in the mean",
    }
    if len(job.begin_s):
        values["rates"] = f"{seconds_text(float(job.begin_s.max()))} in all"
        values["concurrency"] = f"{job.in_flight.mean():.2f} in the mean"
    if len(job.step_s):
        values["steps"] = f"{seconds_text(float(job.step_s.mean()))} in the mean"
        values["waiting"] = f"{job.wait_share:.1%}"
    return dict.fromkeys((*FIGURES, "waiting"), "not known") | values


def similarity_pictures(similarity: Similarity) -> list[tuple[str, str]]:
    """(title, SVG) of the curves that are compared, the job's and the emulation's in each."""
    sides = similarity.job, similarity.emulation
    most_bytes = max(float(side.sizes.max()) for side in sides)
    unit, scale = next(
        each
        for each in (("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
        if most_bytes >= each[1] or each[1] == 1
    )
    weights = [side.sizes[: len(side.begin_s)] for side in sides]
    in_unit = functools.partial(charts.count_axis, name=unit)
    in_calls = functools.partial(charts.count_axis, name="requests in calls")
    in_ms = functools.partial(charts.count_axis, name="ms")
    since = functools.partial(charts.time_axis, name="since the first request")
    none = (None, None)
    curves: tuple[tuple[str, str, list[Floats], Any, Callable[[float], charts.Axis]], ...] = (
        ("sizes", "Requests up to a size", [s.sizes / scale for s in sides], none, in_unit),
        ("rates", "Bytes that were read", [s.begin_s for s in sides], weights, since),
        ("concurrency", "Requests by those in calls", [s.in_flight for s in sides], none, in_calls),
        ("steps", "Steps up to a time", [s.step_s * 1e3 for s in sides], none, in_ms),
    )
    drawn = []
    for name, title, values, weight, axis in curves:
        if name not in similarity.figures:
            continue
        most = max(float(value.max()) for value in values) or 1.0
        at = np.linspace(0.0, most, _POINTS)
        pair = [
            charts.StepLine(side, _points(1 - larger(value, at, of), at / most), colour)
            for side, colour, value, of in zip(
                ("job", "emulation"), ("l1", "l2"), values, weight, strict=True
            )
        ]
        picture = charts.lines(title, pair, (), axis(most), charts.share_axis(""))
        drawn.append((f"{title}: {similarity.figures[name]:.3f}", picture))
    return drawn


def _points(shares: Floats, at: Floats) -> list[tuple[float, float]]:
    """Where the curve goes up, and its begin."""
    kept = np.concatenate([[True], np.diff(shares) != 0])
    return list(zip(at[kept].tolist(), shares[kept].tolist(), strict=True))


_FORMULA: Final = (
    "Each figure is what both have, divided by what either has: of amounts the smaller over the larger, of "
    "curves the area below both over the area below the higher one."
)


def similarity_page(similarity: Similarity, names: tuple[str, str]) -> str:
    """One HTML file: the figures, and the curves that they compare."""
    title = f"{names[0]} and its emulation {names[1]}"
    return document(title, [
        f"<h1>{safe(title)}</h1>",
        card_list([(f"{similarity.whole:.3f}", "similarity: 1 is the same, 0 nothing in common")]),
        f"<pre>{safe(chr(10).join(lines_of(similarity)))}</pre>",
        f"<p>{_FORMULA}</p>",
        *(f"<figure><figcaption>{safe(name)}</figcaption>{svg}</figure>"
          for name, svg in similarity_pictures(similarity)),
    ])  # fmt: skip


def similarity_image(similarity: Similarity, title: str) -> str:
    """One SVG file with the curves."""
    return charts.image(
        f"{title}: similarity {similarity.whole:.3f}", similarity_pictures(similarity),
        [("l1", "job"), ("l2", "emulation")],
    )  # fmt: skip
