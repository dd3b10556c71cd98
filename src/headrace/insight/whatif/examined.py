"""Examined: the storage that `headrace doctor DATA --json` measured, as figures that the simulation draws from.

The doctor reads whole samples at random with 1, 4, 16 and 64 asked for at a time, opens files, and reads
pieces of 4 KiB beside whole samples of files that are open. One sample at a time says how long it takes;
opening and the pieces say which part of that is the open's, the answer's and the bytes'; the largest rate says
how many are served at a time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

from headrace.io.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Mapping

_P99: Final = 2.326
"""Standard deviations above the median of a normal distribution."""

_TAIL_MAX: Final = 100.0
_OPEN_MIN_S: Final = 5e-6
_PARALLELISM_MAX: Final = 4096


def examined_storage(
    name: str, document: Mapping[str, Any]
) -> tuple[Simulation, Literal["all", "servers", "none"]]:
    """The figures of a doctor's document, and what nodes share: `all`, `servers` or `none`.

    Args:
        name: of the storage, for people.
        document: what `headrace doctor DATA --json` printed.

    Raises:
        ValueError, KeyError, TypeError, ZeroDivisionError: it is none, or no storage was measured.
    """
    found = document["findings"]
    storage = found["storage"]
    if not isinstance(storage, dict) or not storage["points"]:
        raise ValueError("the doctor measured no storage: give it more --seconds")
    if storage["cold"] is not True:
        raise ValueError("the doctor read from memory only: what the storage takes is not known")
    points = sorted(storage["points"], key=lambda point: _real(point["depth"]))
    first = points[0]
    mean_bytes = _real(first["bytes_per_s"]) / _real(first["per_s"])
    whole_s = _real(first["depth"]) / _real(first["per_s"])
    opens, opened, small = found["opens"], storage["opened"], storage["small"]
    open_s = min(1.0 / _real(opens["one_per_s"]), 0.95 * whole_s) if opens else 0.0
    bytes_share = 0.0
    if opened and small:
        bytes_share = min(0.95, max(0.0, 1.0 - _real(opened["per_s"]) / _real(small["per_s"])))
    bytes_s = (whole_s - open_s) * bytes_share
    # The mean is what was measured; draws are around the median, which a long tail leaves below it.
    tail = min(_TAIL_MAX, max(1.0, _real(first["p99_s"]) / _real(first["p50_s"])))
    sigma = math.log(tail) / _P99
    latency_s = (whole_s - open_s - bytes_s) / math.exp(sigma * sigma / 2)
    most = max(_real(point["per_s"]) for point in points)
    link = max(_real(point["bytes_per_s"]) for point in [*points, *([opened] if opened else [])])
    figures = Simulation(
        name=name, latency_s=latency_s, latency_p99_s=latency_s * tail,
        open_s=max(_OPEN_MIN_S, open_s), bandwidth_bytes_per_s=link,
        stream_bytes_per_s=mean_bytes / bytes_s if bytes_s > 0 else 0.0,
        parallelism=min(_PARALLELISM_MAX, max(1, round(most * whole_s))),
    )  # fmt: skip
    if found["data"]["kind"] == "object":
        return figures, "servers"
    return figures, "all" if found["place"]["network"] is True else "none"


def _real(value: Any) -> float:
    """A positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value!r} is not above 0")
    return float(value)
