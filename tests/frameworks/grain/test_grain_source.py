"""A store as Grain's random-access source: any sampler, any thread, any worker."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import grain
import pytest

import headrace as hr
from headrace.errors import CorruptSample, SampleNotFound, StoreNotFound
from headrace.grain import Source

from .samples import SAMPLES, content


def test_it_is_a_source(path):
    source = Source(path)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    assert len(source) == SAMPLES
    for i, sample in enumerate(source):
        assert sample["data"].tobytes() == content(i)
        assert sample["label"] == i % 7
    assert i == SAMPLES - 1


def test_a_batch_is_one_read(path, monkeypatch):
    from headrace.plane.pipeline import Pipeline

    reads = []
    fetch = Pipeline.fetch
    monkeypatch.setattr(
        Pipeline,
        "fetch",
        lambda self, wanted: (reads.append(len(wanted)), fetch(self, wanted))[1],
    )
    samples = grain.MapDataset.source(Source(path))._getitems([3, 1, 2])
    assert [s["data"].tobytes() for s in samples] == [content(3), content(1), content(2)]
    assert reads == [3]


def test_grains_pipelines_run_over_it(path):
    shuffled = grain.MapDataset.source(Source(path)).seed(1).shuffle()
    labels = shuffled.map(lambda s: (int.from_bytes(s["data"][:4].tobytes(), "little"), s["label"]))
    found = list(labels.to_iter_dataset())
    assert sorted(int(i) for i, _ in found) == list(range(SAMPLES))
    assert all(label == i % 7 for i, label in found)


def test_grains_data_loader_resumes_over_it(path):
    def loader():
        sampler = grain.samplers.IndexSampler(SAMPLES, shuffle=True, seed=3, num_epochs=1)
        return grain.DataLoader(data_source=Source(path), sampler=sampler, worker_count=0)

    it = iter(loader())
    begun = [next(it)["data"].tobytes() for _ in range(10)]
    state = it.get_state()
    rest = [sample["data"].tobytes() for sample in it]
    resumed = iter(loader())
    resumed.set_state(state)
    assert [sample["data"].tobytes() for sample in resumed] == rest
    assert sorted(begun + rest) == sorted(content(i) for i in range(SAMPLES))


def test_many_threads_read_at_a_time(path):
    source = Source(path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: source[i % SAMPLES]["data"].tobytes(), range(400)))
    assert found == [content(i % SAMPLES) for i in range(400)]


def test_it_is_pickled_as_a_path(path):
    source = Source(path)
    source[0]
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert copy[7]["data"].tobytes() == content(7)
    assert repr(copy) == repr(source)


def test_other_data_has_another_name(path, equal_path):
    assert repr(Source(path)) != repr(Source(equal_path))


def test_several_parts_come_by_name(tmp_path):
    hr.pack(((f"{i}", {"jpg": b"j%d" % i, "txt": b"t%d" % i}) for i in range(3)), tmp_path / "p.hr")
    assert Source(tmp_path / "p.hr")[1]["data"]["txt"].tobytes() == b"t1"
    assert Source(tmp_path / "p.hr", parts=["jpg"])[1]["data"].tobytes() == b"j1"


def test_faults_are_named(path, damaged, tmp_path):
    with pytest.raises(CorruptSample, match="sample 40"):
        Source(damaged)[40]
    with pytest.raises(IndexError, match=f"index is {SAMPLES}"):
        Source(path)[SAMPLES]
    with pytest.raises(SampleNotFound):
        Source(path)._getitems([0, SAMPLES])
    with pytest.raises(StoreNotFound):
        Source(tmp_path / "nothing.hr")
