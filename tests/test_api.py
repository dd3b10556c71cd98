"""The promised lines of the Python API, as they stand in the README and the documentation."""

import json

import numpy as np
import pytest

import headrace
from headrace import api
from headrace.errors import OrderError, StateMismatch
from headrace.store import Store


def test_the_promised_lines(tmp_path, monkeypatch):
    photos = tmp_path / "photos"
    files = {}
    for i in range(600):
        name = f"{'cats' if i % 2 else 'dogs'}/{i}.png"
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        files[name] = bytes([i % 251]) * (i % 97 + 1)
        (photos / name).write_bytes(files[name])
    monkeypatch.chdir(tmp_path)

    import headrace as hr

    hr.pack("photos/", "photos.hr")
    hr.index("photos/", "photos.index")  # no copy
    for path in ("photos.hr", "photos.index", "photos/"):
        with hr.open(path) as store:
            assert len(store) == 600
            assert store.names[0] == min(files)
            assert isinstance(store.labels, np.ndarray)
            assert store.classes == ["cats", "dogs"]
            index = store.find("cats/7.png")
            assert store.find_many(["cats/7.png", "no"]).tolist() == [index, -1]
            assert store.find_many(["cats/7.png"]).dtype == np.int64
            assert bytes(store.read(7)) == files[store.names[7]]
            assert bytes(store.read("cats/7.png")) == files["cats/7.png"]
            assert bytes(store.read(7, start=0, size=4096)) == files[store.names[7]][:4096]
            seen = 0
            for batch in hr.loader(store, batch_size=256, seed=7):
                assert batch.data.dtype == np.uint8
                assert batch.data.ndim == 1
                assert len(batch.offsets) == len(batch.indices) == len(batch.labels)
                assert isinstance(batch[0], memoryview)
                assert np.shares_memory(np.frombuffer(batch[0], np.uint8), batch.data)
                for i, sample in enumerate(batch.indices):
                    assert bytes(batch[i]) == files[store.names[int(sample)]]
                    assert store.classes[batch.labels[i]] in store.names[int(sample)]
                seen += len(batch)
            assert seen == 600


def test_a_loader_has_its_state_its_epoch_and_its_length(tmp_path):
    import headrace as hr

    hr.pack(((f"{i}", bytes([i])) for i in range(100)), tmp_path / "s.hr")
    with hr.open(tmp_path / "s.hr") as store:
        loader = hr.loader(store, batch_size=8, seed=1)
        assert len(loader) == 13
        iterator = iter(loader)
        first = [next(iterator).indices.tolist() for _ in range(4)]
        state = loader.state_dict()
        rest = [batch.indices.tolist() for batch in iterator]
        again = hr.loader(store, batch_size=8, seed=1)
        again.load_state_dict(state)
        assert [batch.indices.tolist() for batch in again] == rest
        again.set_epoch(0)
        assert [batch.indices.tolist() for batch in again] == first + rest


@pytest.mark.parametrize("then", [((0, 40), (60, 70)), ()], ids=["something", "nothing"])
@pytest.mark.parametrize("now", [((10, 90),), ()], ids=["other", "none"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_opportunistic_run_goes_on_whatever_the_page_cache_has_now(
    tmp_path, monkeypatch, then, now, epoch
):
    headrace.pack(((f"{i:04d}", b"x" * 10) for i in range(100)), tmp_path / "s.hr")
    monkeypatch.setattr(Store, "resident_ranges", lambda *_: then)
    with headrace.open(tmp_path / "s.hr") as store:
        loader = headrace.loader(store, 8, order="opportunistic", seed=3)
        for _ in range(epoch):
            list(loader)
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.indices.tolist() for batch in batches]
        monkeypatch.setattr(Store, "resident_ranges", lambda *_: now)
        again = headrace.loader(store, 8, order="opportunistic", seed=3)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [batch.indices.tolist() for batch in again] == rest
        assert [b.indices.tolist() for b in again] == [b.indices.tolist() for b in loader]


@pytest.mark.parametrize(
    ("basis", "words"),
    [
        ("2,0,40,60,101", r"in 0 to 100 The state is damaged"),
        ("2,60,70,0,40", r"The state is damaged"),
        ("2,0,40,60,71", r"the same order and the same parameters"),
        ("2,0,40", r"with follow=True"),
        ("1", r"with follow=True"),
    ],
)
def test_an_opportunistic_state_whose_ranges_are_damaged_is_refused(
    tmp_path, monkeypatch, basis, words
):
    headrace.pack(((f"{i:04d}", b"x" * 10) for i in range(100)), tmp_path / "s.hr")
    monkeypatch.setattr(Store, "resident_ranges", lambda *_: ((0, 40), (60, 70)))
    with headrace.open(tmp_path / "s.hr") as store:
        loader = headrace.loader(store, 8, order="opportunistic")
        with pytest.raises(OrderError, match=words):
            loader.load_state_dict({**loader.state_dict(), "basis": basis})


def test_an_opportunistic_state_of_too_many_ranges_says_how_to_go_on(tmp_path, monkeypatch):
    headrace.pack(((f"{i:04d}", b"x" * 10) for i in range(1000)), tmp_path / "s.hr")
    scattered = tuple((i, i + 1) for i in range(0, 1000, 2))
    monkeypatch.setattr(Store, "resident_ranges", lambda *_: scattered)
    with headrace.open(tmp_path / "s.hr") as store:
        loader = headrace.loader(store, 8, order="opportunistic", seed=3)
        next(iter(loader))
        state, order = loader.state_dict(), loader.order
        assert len(json.dumps(state)) < 300
        monkeypatch.setattr(Store, "resident_ranges", lambda *_: ())
        again = headrace.loader(store, 8, order="opportunistic", seed=3)
        with pytest.raises(StateMismatch, match=r"page cache held then(.|\n)*set_epoch\(1\)"):
            again.load_state_dict(state)
        again.set_epoch(1)
        assert len(list(again)) == 125
        headrace.loader(store, 8, order=order).load_state_dict(state)


@pytest.mark.parametrize(
    ("order", "shuffle", "warns"),
    [("blocked", None, True), ("blocked", 3, False), ("shuffled", None, False),
     ("opportunistic", None, True), ("opportunistic", 3, False)],
)  # fmt: skip
def test_an_order_that_keeps_classes_together_says_so_once_and_names_the_way_out(
    tmp_path, caplog, monkeypatch, order, shuffle, warns
):
    monkeypatch.setattr(Store, "resident_ranges", lambda *_: ((0, 640),))
    samples = [(f"{i:04d}", b"x" * 10, i // 128) for i in range(1280)]
    headrace.pack(samples, tmp_path / "s.hr", shuffle=shuffle)
    with headrace.open(tmp_path / "s.hr") as store:
        chosen = api.order_for(store, order, window_bytes=2000, block_bytes=200)
        loader = headrace.loader(store, 16, order=chosen)
        assert sum(len(batch.indices) for batch in loader) == 1280
        loader.close()
    lines = [r.getMessage() for r in caplog.records if "label mix" in r.getMessage()]
    assert len(lines) == warns
    for line in lines:
        assert "pack --shuffle" in line
        assert "order='shuffled'" in line
        assert order in line
