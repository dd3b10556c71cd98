"""The page for people with a Ray cluster: its commands and programs run as they stand."""

from __future__ import annotations

import os

from documents.running import read_page
from tests_shared import ROOT


def test_the_blocks_of_the_page_run_in_its_order(ray_cluster, tmp_path):
    own = {"RAY_API_SERVER_ADDRESS": ray_cluster.address, "RAY_ADDRESS": ray_cluster.gcs}
    environment = {**os.environ, **own}
    assert read_page(ROOT / "docs/howto/ray.md", tmp_path, environment=environment) >= 2
