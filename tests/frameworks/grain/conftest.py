"""Tests of Grain and JAX: run where they are, which is `.venv-frameworks` (make test-frameworks)."""

from __future__ import annotations

import importlib.util
import os
import shutil

import numpy as np
import pytest

import headrace as hr

from .samples import LENGTH, SAMPLES, content

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("grain") is None else []

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")


@pytest.fixture(scope="session", autouse=True)
def flags_are_parsed():
    """What `absl.app.run` does in a program: Grain's workers read its flags."""
    from absl import flags

    flags.FLAGS(["pytest"])


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grain") / "store.hr"
    hr.pack(((f"{i:05d}", content(i), i % 7) for i in range(SAMPLES)), folder)
    return folder


@pytest.fixture(scope="session")
def equal_path(tmp_path_factory):
    """Sample i is the byte i % 256, `LENGTH` times."""
    folder = tmp_path_factory.mktemp("grain") / "equal.hr"
    hr.pack((bytes([i % 256]) * LENGTH for i in range(SAMPLES)), folder)
    return folder


@pytest.fixture
def damaged(path, tmp_path):
    """A store whose sample 40 has a flipped bit."""
    copy = shutil.copytree(path, tmp_path / "damaged.hr")
    with hr.open(copy) as store:
        at = int(store.segments[0].directory.extents_of(np.array([40]))["offset"][0])
    (volume,) = copy.glob("*.hrv")
    data = bytearray(volume.read_bytes())
    data[at] ^= 1
    volume.write_bytes(data)
    return copy
