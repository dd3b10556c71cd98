"""When files are read past the page cache, and when into it."""

import pytest

from headrace.plane.ahead import cold
from headrace.plane.ahead.cold import ColdChoice


@pytest.fixture
def clock(monkeypatch):
    """Time as the test sets it; all datasets fit into memory below 1 GB."""
    now = [100.0]
    monkeypatch.setattr(cold.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cold, "fits_in_free_memory", lambda nbytes: nbytes < 1e9)
    return now


def serve(choice, clock, files, *, waits_s, takes_s=1e-3, mean_bytes=1e5):
    """Serve files, each of which takes so long; returns how often the choice changed."""
    changes = 0
    for i in range(files):
        clock[0] += takes_s
        changes += choice.note((i + 1) * waits_s, mean_bytes)
    return changes


def test_a_device_that_keeps_up_is_read_past_the_page_cache(clock):
    choice = ColdChoice("auto", 1000)
    assert serve(choice, clock, 5000, waits_s=2e-4) == 0
    assert choice.now == "direct"


def test_a_device_that_holds_the_consumer_up_fills_the_page_cache_if_the_dataset_fits(clock):
    choice = ColdChoice("auto", 1000)
    assert serve(choice, clock, cold.FIRST_FILES + cold.WINDOW_FILES - 1, waits_s=5e-4) == 0
    choice = ColdChoice("auto", 1000)
    assert serve(choice, clock, 1000, waits_s=5e-4) == 1
    assert choice.now == "fill"
    large = ColdChoice("auto", 100_000)
    assert serve(large, clock, 1000, waits_s=5e-4) == 0
    assert large.now == "direct"


def test_the_first_files_are_waited_for_anyway(clock):
    choice = ColdChoice("auto", 1000)
    waited = 0.0
    for i in range(2000):
        clock[0] += 1e-3
        waited += 5e-3 if i < cold.FIRST_FILES else 0
        assert not choice.note(waited, 1e5)
    assert choice.now == "direct"


@pytest.mark.parametrize("wanted", ["direct", "fill"])
def test_a_users_choice_stays(clock, wanted):
    choice = ColdChoice(wanted, 1000)
    assert serve(choice, clock, 1000, waits_s=1e-3) == 0
    assert choice.now == wanted
