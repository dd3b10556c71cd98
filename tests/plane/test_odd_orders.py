"""Orders of the user's that skip, repeat, stop early, run dry or raise: each sample its own bytes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import headrace as hr
from headrace.errors import OrderError, SampleNotFound
from headrace.order import Order, Shuffled
from tests_shared import until

from .conftest import SAMPLES, content


class Listed(Order):
    """Just these indices."""

    seed = 0
    samples = SAMPLES

    def __init__(self, indices, says=None, fails_at=None):
        self.listed = np.asarray(indices, np.int64)
        self.says = len(self.listed) if says is None else says
        self.fails_at = fails_at

    @property
    def length(self):
        return self.says

    def describe(self):
        return {"mode": "listed", "indices": self.listed.tolist()}

    def randomness(self):
        return Shuffled(self.samples).randomness()

    def _indices(self, epoch, start, stop):  # noqa: ARG002 - the same in each epoch
        if self.fails_at is not None and stop > self.fails_at:
            raise ArithmeticError("in the middle")
        return self.listed[start:stop]


TIERS = {"source": {}, "memory": {"ram_bytes": 1 << 20}, "cache": {"cache_dir": "cache"}}


@pytest.fixture(params=TIERS)
def tiers(request, tmp_path):
    options = dict(TIERS[request.param])
    return {**options, **({"cache_dir": tmp_path / "cache"} if "cache_dir" in options else {})}


def delivered(loader):
    found = []
    for batch in loader:
        for i, index in enumerate(batch.indices):
            assert bytes(batch[i]) == content(int(index))
            found.append(int(index))
    return found


@pytest.mark.parametrize(
    "indices",
    [[3, 3, 3, 9, 3, 3] * 20, list(range(0, SAMPLES, 7)), list(range(100))[::-1], [5]],
    ids=["repeats", "skips", "backwards", "stops early"],
)
def test_whatever_is_asked_for_comes(store, tiers, indices):
    loader = hr.loader(store, 8, order=Listed(indices), **tiers)
    for _ in range(2):
        assert delivered(loader) == indices
    loader.close()


def test_an_order_that_runs_dry_is_an_error_and_the_samples_before_it_come(store, tiers):
    """It says 100 positions and has 60: reading runs ahead, so the error may come before its turn."""
    loader = hr.loader(store, 8, order=Listed(range(60), says=100), **tiers)
    with pytest.raises(OrderError, match="gave 4 indices for the positions 56 to 63"):
        delivered(loader)
    loader.close()
    assert until(lambda: not [t for t in threading.enumerate() if t.name.startswith("headrace-t")])


def test_an_order_that_raises_or_leads_outside_is_an_error_and_no_hang(store, tiers):
    loader = hr.loader(store, 8, order=Listed(range(100), fails_at=50), **tiers)
    with pytest.raises(ArithmeticError, match="in the middle"):
        delivered(loader)
    loader.close()
    loader = hr.loader(store, 8, order=Listed([1, 2, SAMPLES, 3]), **tiers)
    with pytest.raises(SampleNotFound, match=str(SAMPLES)):
        delivered(loader)
    loader.close()
    assert until(lambda: not [t for t in threading.enumerate() if t.name.startswith("headrace-t")])
