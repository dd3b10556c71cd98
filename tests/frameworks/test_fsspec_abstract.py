"""fsspec's own tests for file systems. What they write is packed before it is read."""

from __future__ import annotations

import pytest

pytest.importorskip("fsspec")
from fsspec.tests import abstract

from .repacking import RepackingFileSystem


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, tmp_path):
        fs = RepackingFileSystem(tmp_path / "store.hr")
        yield fs
        assert fs.packs > 0, "nothing was read from a store"
        fs.invalidate_cache()

    @pytest.fixture
    def fs_path(self, fs):
        return fs.root

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self):
        return False


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass
