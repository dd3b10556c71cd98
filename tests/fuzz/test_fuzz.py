"""Each fuzz target for a moment, from a fixed seed: `make fuzz` runs them for long."""

import importlib
import random

import pytest

from fuzz import TARGETS
from fuzz.__main__ import at_random


@pytest.mark.parametrize("name", TARGETS)
def test_a_fuzz_target_finds_nothing_in_a_moment(name):
    """R8: both good and bad inputs were tried."""
    target = importlib.import_module(f"fuzz.{name}")
    assert "accepted" in {target.one_input(seed) for seed in target.seeds()}
    counts = at_random(target, random.Random(1), 20.0, inputs_max=400)
    assert counts["refused"] > 20
    assert counts["accepted"] > 5
