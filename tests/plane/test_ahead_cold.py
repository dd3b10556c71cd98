"""When files are read past the page cache, and when into it."""

import pytest

from headrace.plane.read_ahead import plan as policy
from headrace.plane.read_ahead.plan import ColdChoice


@pytest.fixture
def clock(monkeypatch):
    """Time as the test sets it; all datasets fit into memory below 1 GB."""
    now = [100.0]
    monkeypatch.setattr(policy.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(policy, "fits_in_free_memory", lambda nbytes: nbytes < 1e9)
    return now


def serve(choice, clock, files, *, waits_s, busy=16.0, takes_s=1e-3, mean_bytes=1e5):
    """Serve files, each of which takes so long; returns how often the choice changed."""
    changes = 0
    for i in range(1, files + 1):
        clock[0] += takes_s
        if choice.note_served():
            changes += choice.judge(i * waits_s, i * takes_s * busy, 16, mean_bytes)
    return changes


def test_a_device_that_keeps_up_is_read_past_the_page_cache(clock):
    choice = ColdChoice("auto", 1000)
    assert serve(choice, clock, 5000, waits_s=2e-4) == 0
    assert choice.now == "direct"


def test_a_device_that_holds_the_consumer_up_fills_the_page_cache_if_the_dataset_fits(clock):
    choice = ColdChoice("auto", 1000)
    assert serve(choice, clock, 1000, waits_s=5e-4) == 1
    assert choice.now == "fill"
    large = ColdChoice("auto", 100_000)
    assert serve(large, clock, 1000, waits_s=5e-4) == 0
    assert large.now == "direct"


def test_who_waits_while_reads_are_left_to_be_started_waits_for_the_cpu(clock):
    choice = ColdChoice("auto", 1000)
    assert serve(choice, clock, 5000, waits_s=5e-4, busy=8.0) == 0
    assert choice.now == "direct"


def test_the_first_files_are_waited_for_anyway(clock):
    choice = ColdChoice("auto", 1000)
    waited = 0.0
    for i in range(1, 2000):
        clock[0] += 1e-3
        waited += 5e-3 if i <= policy.FIRST_FILES else 0
        if choice.note_served():
            assert not choice.judge(waited, i * 16e-3, 16, 1e5)
    assert choice.now == "direct"


@pytest.mark.parametrize("wanted", ["direct", "fill"])
def test_a_users_choice_stays(clock, wanted):
    choice = ColdChoice(wanted, 1000)
    assert serve(choice, clock, 1000, waits_s=1e-3) == 0
    assert choice.now == wanted
