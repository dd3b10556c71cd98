"""The data that all recipes train on: three classes of real images, packed by `prepare.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.cluster.recipes import recipes_folder
from tests_shared import ROOT, write_real_images


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with `train.hr` and `held-out.hr`."""
    folder = tmp_path_factory.mktemp("recipes")
    images = write_real_images(folder / "images", per_class=64)
    command = [sys.executable, "-W", "error", recipes_folder() / "prepare.py", folder / "data"]
    subprocess.run(
        [*command, "--images", images, "--pixels-max", "600"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return folder / "data"


@pytest.fixture(scope="session")
def root():
    """The repository's folder."""
    return ROOT
