"""Layers over Python's own functions come and go in any order, and leave nothing behind."""

# ruff: noqa: PTH123 - it is `open` that is tested
from __future__ import annotations

import builtins
import gc
import io
import itertools
import os
import pickle

import pytest

from headrace.io.replaced import MEMORY, STORAGE, os_open, os_read, python_open, real_open
from headrace.io.simulation import simulated_paths
from headrace.plane.read_ahead import opens
from headrace.plane.read_ahead.opens import serve, stop_serving
from headrace.testing import Simulation, SlowVolume, simulated_files

QUICK = Simulation(name="quick", latency_s=1e-6, open_s=1e-6)


@pytest.fixture(autouse=True)
def _python_has_its_functions_back():
    yield
    assert builtins.open is io.open is real_open
    assert type(os.open) is type(os.read) is type(len)
    assert simulated_paths() is None


def layer(name, calls):
    def call(beneath, *args, **kwargs):
        calls.append(name)
        return beneath(*args, **kwargs)

    return call


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_layers_are_taken_away_in_any_order(order, tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    calls = []
    layers = [layer(name, calls) for name in range(3)]
    for call, rank in zip(layers, (MEMORY, STORAGE, STORAGE), strict=True):
        assert python_open.add(call, rank)
    left = [0, 2, 1]  # memory first, then the latest storage
    for name in order:
        calls.clear()
        with open(tmp_path / "file", "rb") as file:
            assert file.read() == b"content"
        assert calls == left
        assert builtins.open is io.open is python_open
        assert pickle.loads(pickle.dumps(open)) is open
        python_open.remove(layers[name])
        left.remove(name)


def test_somebody_elses_replacement_stays_and_calls_through(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"content")
    calls = []
    first = layer("first", calls)
    assert python_open.add(first, MEMORY)
    below = builtins.open
    monkeypatch.setattr(builtins, "open", layer("theirs", []).__get__(below))
    second = layer("second", calls)
    assert not python_open.add(second, MEMORY)
    python_open.remove(first)
    python_open.remove(second)
    with open(tmp_path / "file", "rb") as file:
        assert file.read() == b"content"
    assert not calls
    monkeypatch.undo()
    assert python_open.add(first, MEMORY)  # what was put back is ours
    python_open.remove(first)


class Planned:
    """What a reader ahead serves, with nothing planned."""

    planned = ()

    def take(self, _path):
        return None


def test_a_reader_within_a_simulation_within_a_reader_leaves_open_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    outer, inner = Planned(), Planned()
    serve(outer)
    with simulated_files(SlowVolume(QUICK), tmp_path):
        serve(inner)
        assert builtins.open is not real_open
    for reader in (outer, inner):
        with open(path, "rb") as file:
            assert file.read() == b"content"
        stop_serving(reader)


def test_simulations_end_in_any_order(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    first, second = SlowVolume(QUICK), SlowVolume(QUICK)
    one, other = simulated_files(first, tmp_path), simulated_files(second, tmp_path)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    requests = first.stats()["requests"]
    with open(tmp_path / "file", "rb") as file:
        file.read()
    assert first.stats()["requests"] == requests
    assert second.stats()["requests"] > 0
    assert os.open is os_open
    assert os.read is os_read
    other.__exit__(None, None, None)


def test_files_cannot_be_slowed_where_somebody_else_opens_them(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "open", layer("theirs", []).__get__(real_open))
    with pytest.raises(RuntimeError, match="replaced by somebody else"):
        simulated_files(SlowVolume(QUICK), tmp_path).__enter__()
    monkeypatch.undo()


class Owner:
    """Serves, and is kept by itself alone, as a loader in a cycle is."""

    def __init__(self):
        self.files, self.own = Planned(), self
        self.layer = layer("own", [])
        serve(self.files)
        python_open.add(self.layer, STORAGE)

    def __del__(self):
        python_open.remove(self.layer)
        stop_serving(self.files)


def test_owners_that_are_collected_while_others_come_and_go_leave_nothing():
    """The collector runs where anything is made: also in the middle of `serve`, `add` and the like."""
    limits = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        other, call = Planned(), layer("other", [])
        for _ in range(300):
            for change in (serve, stop_serving):
                Owner()
                change(other)
            Owner()
            python_open.add(call, STORAGE)
            Owner()
            python_open.remove(call)
    finally:
        gc.set_threshold(*limits)
    gc.collect()
    assert not opens._served
    assert not python_open._layers
