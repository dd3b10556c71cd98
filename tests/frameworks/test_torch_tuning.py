"""What a loader reads ahead is tuned in the process that reads it, and let go of with it."""

import gc
import time
from pathlib import Path

import pytest

import headrace as hr
from headrace.control.controller import planes
from headrace.frameworks.torch.dropin import watching
from headrace.frameworks.torch.dropin.watching import READS_MAX, READS_MIN, tuned
from headrace.plane.read_ahead import ReadAhead, ReadAheadOptions
from headrace.torch import DataLoader
from plane.ahead_files import Listed, content, drop_pages, make_files
from tests_shared import until

from .decoders import SAMPLES, index_of

COUNT = 40


@pytest.fixture
def dataset(tmp_path):
    paths = make_files(tmp_path / "files", COUNT)
    for path in paths:  # in the page cache they would be left alone
        drop_pages(path)
    return Listed(paths)


def test_reads_in_flight_are_tuned_within_bounds_and_the_buffer_is_the_loaders(dataset):
    with ReadAhead.for_dataset(
        dataset, ReadAheadOptions(buffer_bytes=1 << 20, bypass=False)
    ) as ahead:
        handle = tuned(ahead)
        limits = handle.limits
        assert (limits.reads_in_flight.low, limits.reads_in_flight.high) == (READS_MIN, READS_MAX)
        assert (limits.buffer_bytes.low, limits.buffer_bytes.high) == (1 << 20, 1 << 20)
        ahead.coming(range(COUNT))
        for i in range(COUNT):
            with ahead.sample(i):
                assert dataset[i] == content(i)
        consumer = ahead.consumer()
        figures = ahead.figures
        assert consumer.batches == consumer.samples == figures.served + figures.late > 0
        assert consumer.bytes == ahead.figures.bytes_served
        assert consumer.worked_s > 0
        assert ahead.stats().in_flight_s == ahead.stats().busy_s > 0


def test_a_loaders_plane_is_explained_and_gone_when_it_is(dataset, monkeypatch):
    monkeypatch.setenv("HEADRACE_TUNE", "0")
    loader = DataLoader(dataset, 4, collate_fn=list)
    assert b"".join(s for batch in loader for s in batch) == b"".join(map(content, range(COUNT)))
    name = loader._headrace.watcher._tuning.name
    assert name in str(hr.explain())
    assert not loader._headrace.watcher._tuning.enabled
    loader._headrace.watcher.close()
    assert name not in [plane.name for plane in planes()[0]]


@pytest.mark.parametrize(
    ("how", "turned"),
    [
        ({}, True),
        ({"decode": index_of}, True),
        ({"decode": index_of, "tune": False}, False),
        # Workers read for themselves: what this process could turn would reach none of them.
        ({"decode": index_of, "num_workers": 1}, False),
    ],
)
def test_a_loader_over_a_store_is_watched_from_when_it_is_iterated(path, monkeypatch, how, turned):
    monkeypatch.delenv("HEADRACE_TUNE", raising=False)
    with DataLoader(path, 16, **how) as loader:
        plane = loader._loader.tuning
        assert plane not in planes()[0]
        batches = iter(loader)
        next(batches)
        assert plane in planes()[0]
        assert plane.enabled is turned
        assert 1 + len(list(batches)) == len(loader)
        assert plane.now().consumer.samples == SAMPLES
    del batches, loader
    gc.collect()
    assert until(lambda: plane not in planes()[0])


class Hidden:
    """Paths that no attribute names: which files samples open must be learned."""

    def __init__(self, paths, stop=lambda: None):
        self._of = dict(enumerate(paths)).__getitem__
        self._count = len(paths)
        self._stop = stop

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        self._stop()
        return Path(self._of(index)).read_bytes()


@pytest.fixture
def hot(tmp_path):
    paths = make_files(tmp_path / "files", COUNT)
    for path in paths:
        Path(path).read_bytes()
    return paths


def watched(loader) -> int:
    return loader._headrace.watcher._ahead._files._watched


@pytest.fixture
def windows(monkeypatch):
    """Each batch is a window of its own, judged by the clock alone."""
    monkeypatch.setattr(watching, "CALM_WINDOW_S", 0.0)
    monkeypatch.setattr(watching, "_queued_ns", lambda: 0)


def test_what_waits_for_nothing_is_not_learned(hot, windows, monkeypatch):
    monkeypatch.setattr(watching, "CALM_SHARE", 2.0)  # whatever else runs on this machine
    loader = DataLoader(Hidden(hot), 2, collate_fn=list)
    for _ in range(3):
        assert [s for batch in loader for s in batch] == [content(i) for i in range(COUNT)]
    assert 0 < watched(loader) < COUNT
    assert loader._headrace.watcher._ahead.figures.planned <= watched(loader)


def test_what_was_learned_is_not_read_ahead_while_nothing_waits(hot, windows, monkeypatch):
    monkeypatch.setattr(watching, "CALM_SHARE", 2.0)
    loader = DataLoader(Hidden(hot), 2, collate_fn=list)
    for _ in range(3):
        assert [s for batch in loader for s in batch] == [content(i) for i in range(COUNT)]
    watcher = loader._headrace.watcher
    assert watched(loader)
    assert watcher._ahead.figures.planned == 0
    assert not watcher.wants_more


def test_what_begins_to_wait_is_learned_and_read_ahead(hot, windows, monkeypatch):
    monkeypatch.setattr(watching, "CALM_SHARE", 2.0)  # whatever else runs on this machine
    slow = []
    loader = DataLoader(Hidden(hot, lambda: slow and time.sleep(0.002)), 2, collate_fn=list)
    for _ in range(3):
        assert [s for batch in loader for s in batch] == [content(i) for i in range(COUNT)]
    before = watched(loader)
    monkeypatch.setattr(watching, "CALM_SHARE", 0.5)
    slow.append(True)
    for _ in range(2):
        assert [s for batch in loader for s in batch] == [content(i) for i in range(COUNT)]
    assert watched(loader) >= before + COUNT // 2
    assert not loader._headrace.watcher._calm
