"""The benchmark's Grain engines deliver what they are measured by."""

import pytest
from benchmarks.engine_process import Caps, deliver

from benchmarks import datasets, forms, loaders

ENGINES = [name for name in loaders.ADAPTERS if "tf" not in name and name != "grain2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return datasets.DataSet("B", 60, 16), tmp_path_factory.mktemp("bench")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_delivers_every_sample_once(tiny, engine):
    data, root = tiny
    path = forms.ensure(root, data, loaders.FORMS[engine])
    loader = loaders.create(engine)
    loader.load()
    result = deliver(loader, data, path, 1, Caps(samples=100, seconds=60))
    assert result.wrong is None
    assert (result.samples, result.complete) == (60, True)
    assert result.bytes == data.total_bytes
    loader.close()
