"""The split of the time to solution."""

import pytest

from headrace.bench.run import PHASES, PhaseTimes
from headrace.bench.summary import time_to_solution


def test_every_second_belongs_to_one_phase():
    at = [100.0]
    times = PhaseTimes(lambda: at[0])
    at[0] += 1  # an engine starts
    with times.of("training"):
        at[0] += 10
        with times.of("checkpointing"):  # in the middle of an epoch
            at[0] += 3
        at[0] += 7
    with times.of("evaluation"):
        at[0] += 5
    at[0] += 0.5
    seconds = times.seconds()
    assert seconds == {
        "staging": 0, "training": 17, "evaluation": 5, "checkpointing": 3, "other": 1.5,
    }  # fmt: skip
    assert tuple(seconds) == PHASES
    seconds["staging"] += 4
    split = time_to_solution(seconds)
    assert split["total_s"] == pytest.approx(30.5)
    assert split["staging_s"] == 4
    assert time_to_solution({}) == {}
