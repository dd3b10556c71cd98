"""What the tests of recipes share."""

from __future__ import annotations

import pytest

from tests_shared import ROOT

from .packing import pack_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with `train.hr` and `held-out.hr`. Not to be changed."""
    return pack_data(tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="session")
def root():
    """The repository's folder."""
    return ROOT
