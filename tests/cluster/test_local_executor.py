"""The local executor: what holds of every executor, and that nothing of a job stays, whatever is killed."""

from __future__ import annotations

import pytest

from cluster.executor_tests import ExecutorTests
from headrace.cluster.local.executor import LocalExecutor


class TestLocal(ExecutorTests):
    @pytest.fixture
    def ex(self, tmp_path):
        return LocalExecutor(tmp_path / "jobs")

    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "work").mkdir()
        return tmp_path / "work"
