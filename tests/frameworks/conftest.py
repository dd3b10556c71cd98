"""A store whose samples say who they are, and one of samples of equal length."""

from __future__ import annotations

import builtins
import functools
import gc

import pytest

import headrace as hr

from .decoders import FIXED_BYTES, SAMPLES, content


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch") / "store.hr"
    hr.pack(((f"{i:05d}", content(i), i % 7) for i in range(SAMPLES)), folder)
    return folder


@pytest.fixture(scope="session")
def equal_path(tmp_path_factory):
    """Sample i is the byte i % 256, `FIXED_BYTES` times."""
    folder = tmp_path_factory.mktemp("torch") / "equal.hr"
    hr.pack((bytes([i % 256]) * FIXED_BYTES for i in range(SAMPLES)), folder)
    return folder


@pytest.fixture
def store(path):
    with hr.open(path) as opened:
        yield opened


@pytest.fixture
def always_ahead(monkeypatch):
    """Tests' files lie in the page cache: there the drop-in would leave them to the dataset."""
    # Here, since the tests of other frameworks have no torch.
    from headrace.frameworks.torch import dataloader
    from headrace.io.replaced import real_open
    from headrace.plane.read_ahead import ReadAheadOptions

    monkeypatch.setattr(
        dataloader, "ReadAheadOptions", functools.partial(ReadAheadOptions, bypass=False)
    )
    yield
    gc.collect()
    assert builtins.open is real_open
