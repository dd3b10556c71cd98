"""TensorFlow's tests: run where TensorFlow is, which is `.venv-frameworks` (make test-frameworks)."""

from __future__ import annotations

import importlib.util
import os

import pytest

import headrace as hr

from .samples import LENGTH, SAMPLES, content

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("tensorflow") is None else []

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its log of CPU features, on every start
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def pytest_configure(config):
    for known in (
        # Keras tells users of any tf.data.Dataset that it does not shuffle.
        "ignore:`shuffle=True` was passed:UserWarning:keras",
    ):
        config.addinivalue_line("filterwarnings", known)


@pytest.fixture(scope="session", autouse=True)
def two_devices():
    """Two logical CPUs, for tests of `tf.distribute`."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensorflow") / "store.hr"
    hr.pack(((f"{i:05d}", content(i), i % 7) for i in range(SAMPLES)), folder)
    return folder


@pytest.fixture(scope="session")
def equal_path(tmp_path_factory):
    """Sample i is the byte i % 256, `LENGTH` times."""
    folder = tmp_path_factory.mktemp("tensorflow") / "equal.hr"
    hr.pack((bytes([i % 256]) * LENGTH for i in range(SAMPLES)), folder)
    return folder
