"""The Slurm executor on a real Slurm: what holds of every executor."""

from __future__ import annotations

import pytest

from cluster.executor_tests import ExecutorTests
from headrace.cluster.slurm.executor import SlurmExecutor


@pytest.mark.usefixtures("slurm")
class TestSlurm(ExecutorTests):
    @pytest.fixture
    def ex(self):
        return SlurmExecutor()

    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path
