"""What the tests of launchers share: the data, and one real Slurm for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.conftest import real_slurm, slurm
from launchers.matrix import make_data

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["real_slurm", "slurm"]


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 samples, each with its own number in its bytes. Not to be changed."""
    return make_data(tmp_path_factory.mktemp("numbered"))
