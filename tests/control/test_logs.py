"""Histories of real runs, replayed: the tuner still concludes what it should from them.

`logs/NAME.json`: the intervals of one plane as they were recorded (`interval_of`), over simulated
storage whose latency grew tenfold at `step_s`. Knobs are those that were in force then.
"""

import json
from pathlib import Path

import pytest

from headrace.control.history import Knobs, PlaneHistory, PlaneInterval
from headrace.control.knob_limits import Limits
from headrace.control.tuner import propose
from headrace.plane.stage import LATENCY_BUCKETS

LOGS = sorted((Path(__file__).parent / "logs").glob("*.json"))


def interval_of(recorded):
    """An interval out of plain values, zeros left out; the histogram is {bucket: count}."""
    counts = [0] * LATENCY_BUCKETS
    for bucket, count in recorded["latency_us"].items():
        counts[int(bucket)] = count
    given = {**recorded, "latency_us": tuple(counts), "knobs": Knobs(**recorded["knobs"])}
    return PlaneInterval(**given)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_recorded_run_is_understood(log):
    recorded = json.loads(log.read_text())
    history, limits = PlaneHistory(), Limits()
    lowered_at, raised_at = [], []
    for record in recorded["intervals"]:
        interval = interval_of(record)
        history = history.after(interval)
        decision = propose(history, interval.knobs, limits)
        history = history.remembering(decision.memory)
        assert limits.clamped(decision.knobs) == decision.knobs
        reads = decision.knobs.reads_in_flight
        if reads < interval.knobs.reads_in_flight:
            lowered_at.append(history.now_s)
        elif reads > interval.knobs.reads_in_flight:
            raised_at.append(history.now_s)
    # More than was needed at first; more is needed as soon as the latency has grown.
    assert lowered_at
    assert lowered_at[0] < 3.0
    after = [at - recorded["step_s"] for at in raised_at if at > recorded["step_s"]]
    assert after
    assert after[0] < 2.0


def test_there_are_logs():
    assert LOGS
