"""What the tests of recipes share."""

from __future__ import annotations

import pytest

from cluster.conftest import real_slurm, slurm
from tests_shared import ROOT

from .packing import pack_data

__all__ = ["data", "here", "real_slurm", "root", "slurm"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with `train.hr` and `held-out.hr`. Not to be changed."""
    return pack_data(tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="session")
def root():
    """The repository's folder."""
    return ROOT


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The local executor, with a folder of jobs of its own."""
    from headrace.cluster.executor import executor

    monkeypatch.setenv("HEADRACE_JOBS_DIR", str(tmp_path / "jobs"))
    return executor("local")
