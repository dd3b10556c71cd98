"""Packing when nothing goes wrong: content, layout, overwriting, appending, iterables."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle

import numpy as np
import pytest

from headrace.errors import HeadraceError, SourceChanged, SourceError, StoreError, StoreExists
from headrace.store import open_store
from headrace.store.manifest import load_manifest
from headrace.store.pack import append, index, pack
from headrace.store.packing import PackOptions
from headrace.store.sources import extents
from headrace.store.verify import verify

from .conftest import contents, make_folder
from .reference import open_either

SMALL = PackOptions(volume_bytes=20_000, batch_bytes=5000, journal_bytes=9000)


def files_of(store) -> dict[str, bytes]:
    """The store's files, without what is random by design."""
    return {p.name: p.read_bytes() for p in store.iterdir() if p.name != "store.json"}


def names_in(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("options", [None, SMALL], ids=["default", "small"])
def test_a_packed_folder_holds_every_byte(folder, tmp_path, reference, options):
    root, want = folder
    seen = []
    report = pack(root, tmp_path / "out.hr", options=options, progress=lambda *a: seen.append(a))
    assert (report.samples, report.bytes) == (60, sum(map(len, want.values())))
    assert seen[-1] == (60, 60, report.bytes, report.bytes)
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        assert contents(store) == want
        assert store.classes == ["class0", "class1", "class2"]
        assert store.nbytes == report.bytes
    volumes = sorted((tmp_path / "out.hr").glob("*.hrv"))
    assert all(v.stat().st_size % 4096 == 0 for v in volumes)
    assert (len(volumes) > 3) == (options is SMALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.hr", "photos"]


def test_equal_samples_make_equal_stores(folder, tmp_path):
    root, _ = folder
    for name, workers in (("a.hr", 1), ("b.hr", 7)):
        pack(root, tmp_path / name, workers=workers, options=SMALL)
    assert files_of(tmp_path / "a.hr") == files_of(tmp_path / "b.hr")
    a, b = load_manifest(tmp_path / "a.hr"), load_manifest(tmp_path / "b.hr")
    assert a.fingerprint == b.fingerprint
    assert a.uuid != b.uuid


def test_a_large_sample_is_copied_in_pieces(tmp_path, monkeypatch, reference):
    monkeypatch.setattr(extents, "LARGE_BYTES", 50_000)
    monkeypatch.setattr(extents.ScanReader.pieces, "__defaults__", (7000,))
    root = tmp_path / "root"
    root.mkdir()
    big = os.urandom(123_457)
    for name, data in (("a", b"x"), ("b", big), ("c", b"y" * 30_000)):
        (root / name).write_bytes(data)
    pack(root, tmp_path / "p.hr", options=SMALL)
    index(root, tmp_path / "i.hr")
    for path in ("p.hr", "i.hr"):
        with open_either(tmp_path / path, reference=reference) as store:
            assert bytes(store.read("b")) == big
            assert bytes(store.read("b", start=100_000, size=99)) == big[100_000:100_099]
            assert bytes(store.read("c")) == b"y" * 30_000
        assert verify(tmp_path / path).ok


def test_a_large_sample_that_vanishes_can_be_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(extents, "LARGE_BYTES", 50_000)
    root = tmp_path / "root"
    root.mkdir()
    for name in "abc":
        (root / name).write_bytes(name.encode() * 60_000)
    original = extents.ScanReader.pieces
    hit = []

    def pieces(self, extent):
        if extent == 1:
            hit.append((root / "b").unlink())
        yield from original(self, extent)

    monkeypatch.setattr(extents.ScanReader, "pieces", pieces)
    report = pack(root, tmp_path / "p.hr", on_error="skip", options=SMALL)
    assert hit
    assert len(report.skipped) == 1
    with open_store(tmp_path / "p.hr") as store:
        assert contents(store) == {"a": b"a" * 60_000, "c": b"c" * 60_000}
    assert verify(tmp_path / "p.hr").ok


def test_an_existing_target_is_left_alone(folder, tmp_path):
    root, want = folder
    target = tmp_path / "out.hr"
    pack(root, target)
    before = files_of(target)
    for make in (pack, index):
        with pytest.raises(StoreExists, match="overwrite=True"):
            make(root, target)
    assert files_of(target) == before
    (root / "class0" / "new.bin").write_bytes(b"new")
    with open_store(target) as old:
        pack(root, target, overwrite=True)
        assert len(old) == 60  # an open reader keeps its snapshot
        assert bytes(old.read("class0/3.bin")) == want["class0/3.bin"]
    with open_store(target) as store:
        assert len(store) == 61
    index(root, target, overwrite=True)
    with open_store(target) as store:
        assert contents(store) == want | {"class0/new.bin": b"new"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.hr", "photos"]


def test_overwrite_never_removes_what_is_no_store(folder, tmp_path):
    root, want = folder
    for target in (root, root / "class0" / "1.bin"):
        with pytest.raises(StoreExists, match="no headrace store"):
            pack([b"x"], target, overwrite=True)
    assert len(list(root.rglob("*.bin"))) == len(want)
    with pytest.raises(HeadraceError, match="no such folder"):
        pack(root, tmp_path / "missing" / "out.hr")


def test_items_of_every_shape(tmp_path, reference):
    items = [
        b"plain",
        ("named", b"1"),
        ("labelled", b"2", 5),
        {"name": b"\xff", "data": memoryview(b"3"), "label": np.int64(7)},
        {"data": bytearray(b"4")},
    ]
    pack(iter(items), tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        names = ["000000000000", "named", "labelled", "\udcff", "000000000004"]
        assert list(store.names) == names
        assert list(contents(store).values()) == [b"plain", b"1", b"2", b"3", b"4"]
        assert store.labels.tolist() == [-1, -1, 5, 7, -1]
        assert store.find("\udcff") == 3


def test_items_with_parts_and_columns(tmp_path, reference):
    items = [
        {
            "name": f"s{i}",
            "data": {"txt": b"t%d" % i, "img": b"i" * i},
            "columns": {"w": i, "f": i / 2},
        }
        for i in range(20)
    ]
    pack(lambda: items, tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        assert store.parts == ["img", "txt"]
        assert store.columns["w"].tolist() == list(range(20))
        assert store.columns["f"].dtype == np.float64
        assert bytes(store.read("s7", part="txt")) == b"t7"
        assert store.parts_of("s7") == {"img": 7, "txt": 2}


@pytest.mark.parametrize(
    ("items", "match"),
    [
        ([1], "Sample 0 is int"),
        ([("a", "text")], "expected bytes"),
        ([("a", b"", "cat")], "'cat'"),
        ([("", b"")], "non-empty"),
        ([{"name": "a"}], "expected bytes, "),
        ([{"data": b"", "nmae": "x"}], "nmae"),
        ([("same", b"1"), ("same", b"2")], "same"),
        ([{"data": b"", "columns": {"a": 1}}, {"data": b""}], "first one had"),
        ([], "no samples"),
        (7, "expected a path or an iterable"),
    ],
)
def test_bad_items_are_named_and_nothing_is_left(tmp_path, items, match):
    with pytest.raises(SourceError, match=match):
        pack(items, tmp_path / "out.hr")
    assert list(tmp_path.iterdir()) == []


def test_bad_options_are_refused_at_once(folder, tmp_path):
    root, _ = folder
    for arguments in (
        {"volume_bytes": 10}, {"workers": 0}, {"on_error": "ignore"}, {"extensions": ".png"},
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            pack(root, tmp_path / "out.hr", **arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos"]


def test_append_makes_a_new_segment(folder, tmp_path, reference):
    root, want = folder
    target = tmp_path / "out.hr"
    pack(root, target, options=SMALL)
    before = files_of(target)
    with open_either(target, reference=reference) as old:
        fingerprint = old.fingerprint
        frozen = pickle.dumps(old)
        more = tmp_path / "more"
        (more / "zebra").mkdir(parents=True)
        (more / "class1").mkdir()
        (more / "zebra" / "1.bin").write_bytes(b"striped")
        (more / "class1" / "new.bin").write_bytes(b"new")
        append(more, target)
        assert (len(old), old.fingerprint) == (60, fingerprint)
    after = files_of(target)
    assert before.items() <= after.items()
    added = {"class1/new.bin": b"new", "zebra/1.bin": b"striped"}
    with open_either(target, reference=reference) as store:
        assert contents(store) == want | added
        assert store.fingerprint != fingerprint
        # Known classes keep their numbers, new ones come after.
        assert store.classes == ["class0", "class1", "class2", "zebra"]
        assert store.labels[-2:].tolist() == [1, 3]
        assert store.find_many(["zebra/1.bin", "nope", "class0/0.bin"]).tolist() == [61, -1, 0]
    # A pickled snapshot comes back as it was, without the new samples.
    with pickle.loads(frozen) as thawed:
        assert (len(thawed), thawed.fingerprint) == (60, fingerprint)
    assert verify(target).ok


def test_append_refuses_taken_names_and_other_columns(folder, tmp_path):
    root, _ = folder
    target = tmp_path / "out.hr"
    pack(root, target)
    before = names_in(target)
    with pytest.raises(SourceError, match=r"'class1/3\.bin' is sample"):
        append([("fresh", b""), ("class1/3.bin", b"")], target)
    with pytest.raises(SourceError, match="columns"):
        append([{"data": b"", "columns": {"w": 1}}], target)
    assert names_in(target) == before
    append([("fresh", b"")], target)
    assert names_in(target) == sorted([*before, "segment-0001.hrd", "segment-0001-0000.hrv"])


def test_append_to_an_index_mixes_volumes(folder, tmp_path, reference):
    root, want = folder
    index(root, tmp_path / "out.hr")
    append([("x", b"packed", 2)], tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        assert contents(store) == want | {"x": b"packed"}
    assert verify(tmp_path / "out.hr").ok


def _child(store, queue):
    queue.put((bytes(store.read(3)), store.names[3], store.find(store.names[5])))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("how", ["packed", "folder"])
def test_a_store_crosses_processes(folder, tmp_path, method, how):
    root, want = folder
    pack(root, tmp_path / "out.hr")
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    with open_store(tmp_path / "out.hr" if how == "packed" else root) as store:
        store.read(1)
        child = context.Process(target=_child, args=(store, queue))
        child.start()
        data, name, found = queue.get()
        child.join(20)
        assert (data, found) == (want[name], 5)


def test_a_pickled_store_refuses_other_data(folder, tmp_path):
    root, _ = folder
    with open_store(root) as store:
        frozen = pickle.dumps(store)
    (root / "class0" / "zz.bin").write_bytes(b"later")
    with pytest.raises(SourceChanged, match="fingerprint"):
        pickle.loads(frozen)


def test_a_closed_store_says_so(folder):
    root, _ = folder
    store = open_store(root)
    labels = store.labels
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.read(0)
    with pytest.raises(ValueError, match="closed"):
        store.names[0]
    assert labels.tolist()[0] == 0
    assert "closed" in repr(store)


def test_names_are_a_sequence(folder, reference):
    root, want = folder
    with open_either(root, reference=reference) as store:
        expected = sorted(want)
        assert list(store.names) == expected
        assert store.names[-1] == expected[-1]
        assert store.names[5:50:7] == expected[5:50:7]
        assert expected[9] in store.names
        assert "nope" not in store.names
        assert 7 not in store.names
        assert store.names.index(expected[9]) == 9
        with pytest.raises(ValueError):
            store.names.index("nope")
        with pytest.raises(IndexError):
            store.names[60]
        for bad in ("nope", b"\xff", 60, -61):
            with pytest.raises(StoreError):
                store.read(bad)
        with pytest.raises(TypeError):
            store.find_many("class0/0.bin")
        with pytest.raises(ValueError):
            store.read(0, start=-1)
        assert bytes(store.read(-1)) == want[expected[-1]]


def test_ranges(tmp_path, reference, monkeypatch):
    monkeypatch.setattr("headrace.store.store.CHECKED_RANGE_BYTES", 1000)
    small, large = os.urandom(900), os.urandom(5000)
    pack([("small", small), ("large", large)], tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        for name, data in (("small", small), ("large", large)):
            for start, size in ((0, 0), (0, 10), (890, None), (5, 10_000), (9999, 5), (None, 77)):
                first = start or 0
                end = None if size is None else first + size
                assert bytes(store.read(name, start=start, size=size)) == data[first:end]


def test_the_manifest_is_readable_by_others(folder, tmp_path):
    root, _ = folder
    pack(root, tmp_path / "out.hr")
    document = json.loads((tmp_path / "out.hr" / "store.json").read_text())
    assert document["segments"][0]["source"] == {"kind": "folder", "path": str(root)}
    assert (tmp_path / "out.hr").stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_two_stores_do_not_share_state(tmp_path):
    make_folder(tmp_path / "a", seed=1)
    make_folder(tmp_path / "b", seed=2)
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        assert a.fingerprint != b.fingerprint
        assert bytes(a.read(3)) == (tmp_path / "a" / a.names[3]).read_bytes()
        assert bytes(b.read(3)) == (tmp_path / "b" / b.names[3]).read_bytes()
