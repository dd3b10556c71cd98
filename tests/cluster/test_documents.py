"""Pages for people on a cluster: their commands run as they stand, beside a real Slurm."""

import os

import pytest

from documents.blocks import PAGES, page_remarks
from documents.running import read_page
from tests_shared import ROOT

BESIDE_SLURM = [page for page in PAGES if ("needs", "slurm") in page_remarks(page)]


@pytest.mark.parametrize("page", BESIDE_SLURM, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_its_order(page, slurm, tmp_path):
    assert read_page(page, tmp_path, environment=os.environ) > 0
