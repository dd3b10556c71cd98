"""Reads that fail once, always, or never return, through every tier. The storage is a simulated one."""

from __future__ import annotations

import time

import pytest

import headrace as hr
from headrace.errors import VolumeError, VolumeTimeout
from headrace.testing import Simulation, SlowVolume
from tests_shared import descriptors, threads, until

from .conftest import SAMPLES, content

BROKEN = Simulation(name="broken", error_rate=1)
SILENT = Simulation(name="silent", latency_s=3600.0)

TIERS = {"source": {}, "memory": {"ram_bytes": 8 << 20}, "cache": {"cache_dir": "cache"}}


@pytest.fixture(params=TIERS)
def tiers(request, tmp_path):
    options = dict(TIERS[request.param])
    if "cache_dir" in options:
        options["cache_dir"] = tmp_path / "cache"
    return options


def right(batches) -> list[int]:
    """The indices of what came, each with its own bytes."""
    seen = []
    for batch in batches:
        for i, index in enumerate(batch.indices):
            assert bytes(batch[i]) == content(int(index))
            seen.append(int(index))
    return seen


@pytest.mark.parametrize(("order", "rate"), [("shuffled", 0.05), ("blocked", 0.4)])
def test_a_read_that_fails_once_is_read_again(packed, tiers, order, rate):
    """Neighbours in blocks are few large reads: more of them must fail for one to."""
    slow = SlowVolume(Simulation(name="failing", error_rate=rate, seed=11))
    with hr.open(packed) as store:
        loader = hr.loader(store, 16, order=order, simulate=slow, on_error="skip", **tiers)
        seen = right(loader)
        skipped = [s.index for s in loader.skipped]
        assert sorted(seen + skipped) == list(range(SAMPLES))
        loader.close()
    errors = slow.stats()["errors"]
    assert errors > 0
    assert len(skipped) < errors / 2 or order == "blocked"  # mostly mended by the second try


def test_a_read_that_always_fails_is_an_error_that_names_sample_and_cause(packed, tiers):
    slow = SlowVolume(BROKEN)
    with hr.open(packed) as store:
        loader = hr.loader(store, 16, simulate=slow, **tiers)
        for _ in range(2):  # and again, when it is asked again
            with pytest.raises(VolumeError, match=r"sample \d+ .*Input/output error"):
                next(iter(loader))
        loader.close()
        skipping = hr.loader(store, 16, simulate=slow, on_error="skip", **tiers)
        assert all(content(i) == b"" for i in right(skipping))
        assert {s.index for s in skipping.skipped} >= {i for i in range(SAMPLES) if content(i)}
        skipping.close()
    assert slow.stats()["errors"] > 16


def test_a_read_that_never_returns_is_a_timeout_and_closing_does_not_hang(packed, tiers):
    before = descriptors(packed), threads()
    slow = SlowVolume(SILENT)
    with hr.open(packed) as store:
        loader = hr.loader(store, 16, simulate=slow, deadline_s=0.2, **tiers)
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(VolumeTimeout, match=r"16 samples .*0.2 s: it waits for \w"):
                next(iter(loader))
        loader.close()
        assert slow.stats()["requests"] > 0
        assert time.monotonic() - begun < 60, "an hour is what the storage takes"
        del loader
    assert until(lambda: descriptors(packed) <= before[0] and threads() <= before[1])


def test_a_dropped_loader_does_not_wait_for_a_read_that_never_returns(packed, tiers):
    slow = SlowVolume(SILENT)
    before = threads()
    loader = hr.loader(packed, 16, simulate=slow, deadline_s=0.2, **tiers)
    with pytest.raises(VolumeTimeout):
        next(iter(loader))
    begun = time.monotonic()
    del loader
    assert time.monotonic() - begun < 60, "an hour is what the storage takes"
    assert slow.stats()["requests"] > 0
    assert until(lambda: threads() <= before)


def test_what_is_cached_is_delivered_while_the_source_is_silent(packed, tmp_path):
    with hr.open(packed) as store:
        filled = hr.loader(store, 16, cache_dir=tmp_path)
        assert len(right(filled)) == SAMPLES
        filled.close()
        slow = SlowVolume(SILENT)
        loader = hr.loader(store, 16, cache_dir=tmp_path, simulate=slow, deadline_s=20.0)
        assert sorted(right(loader)) == list(range(SAMPLES))
        assert slow.stats()["requests"] == 0
        loader.close()
