"""Packing in a random order: the seed's permutation of the source, whatever it is and whatever fails."""

from __future__ import annotations

import contextlib
import errno
import io
import signal
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError, OrderError, SourceChanged, SourceError, VolumeError
from headrace.order import Permutation
from headrace.order.hash import Purpose, derive_key
from headrace.store import open_store
from headrace.store.manifest import load_manifest
from headrace.store.pack import append, pack
from headrace.store.packing import PackOptions
from headrace.store.repair import repair
from headrace.store.sources import extents
from headrace.store.verify import verify

from .conftest import flip, make_folder
from .nth_call import Refusing
from .packer import items
from .test_pack import SMALL, files_of
from .test_pack_faults import packer  # noqa: F401 - a fixture

KILLED = -signal.SIGKILL


def shuffled_order(count, seed):
    """Which of the source's samples stands at each place of the store."""
    return Permutation(count, derive_key(seed, Purpose.PACKED)).range(0, count).tolist()


def rows(store):
    """All that a store says of each sample."""
    n = len(store)
    labels = [None] * n if store.labels is None else store.labels.tolist()
    classes = store.classes
    columns = {name: np.asarray(values).tolist() for name, values in store.columns.items()}
    parts = store.parts
    return [
        (
            name,
            classes[label] if classes and label is not None and label >= 0 else label,
            [bytes(store.read(i, part=p)) if p else bytes(store.read(i)) for p in parts],
            repr([(k, values[i]) for k, values in columns.items()]),  # NaN is equal to itself
        )
        for i, (name, label) in enumerate(zip(store.names, labels, strict=True))
    ]


def rows_of(path):
    with open_store(path) as store:
        return rows(store)


def sample(i, size):
    return {
        "name": f"s{i:04d}",
        "data": {"a": bytes([i % 251]) * size, "b": b"%d" % i},
        "label": i // 10,
        "columns": {"weight": i / 4, "number": i},
    }


def tar_of(path, samples, mode):
    with tarfile.open(path, mode) as tar:
        for each in samples:
            for part, data in each["data"].items():
                info = tarfile.TarInfo(f"{each['name']}.{part}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def written(kind, folder, samples):
    """A source of these samples: read at random, front to back, or given by a program."""
    if kind == "iterable":
        return lambda: iter(samples)
    if kind == "folder":
        for i, each in enumerate(samples):
            path = folder / "photos" / f"class{i // 10}" / each["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(each["data"]["a"])
        return folder / "photos"
    ending, mode = {"tar": ("tar", "w"), "tar.gz": ("tar.gz", "w:gz")}[kind]
    return tar_of(folder / f"samples.{ending}", samples, mode)


@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz", "iterable"])
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=70),
    seed=st.integers(0, 2**64 - 1),
    fault=st.integers(1, 60),
)
def test_no_fault_loses_or_repeats_a_sample(kind, sizes, seed, fault, tmp_path_factory):
    """One call that changes files is refused, or none; then the same command is given again."""
    folder = tmp_path_factory.mktemp("shuffled")
    source = written(kind, folder, [sample(i, size) for i, size in enumerate(sizes)])
    pack(source, folder / "plain", options=SMALL)
    plain = rows_of(folder / "plain")
    (folder / "out").mkdir()
    target = folder / "out" / "store.hr"
    with pytest.MonkeyPatch.context() as patch:
        Refusing(folder / "out", fault, errno.EIO).install(patch)
        with contextlib.suppress(HeadraceError):
            pack(source, target, options=SMALL, shuffle=seed)
    if not target.exists():
        pack(source, target, options=SMALL, shuffle=seed)
    assert rows_of(target) == [plain[i] for i in shuffled_order(len(sizes), seed)]
    assert verify(target).ok


@pytest.mark.parametrize("source", ["folder", "iterable"])
def test_a_killed_pack_resumes_to_the_same_bytes(folder, tmp_path, packer, source):  # noqa: F811
    root, _ = folder
    what = root if source == "folder" else "ITEMS"
    assert packer(what, tmp_path / "whole.hr", what="shuffle") == 0
    kills = 0
    for kind, n in [
        *(("pwrite", n) for n in (1, 2, 5, 9, 13, 17, 21, 26, 30, 36, 41, 47)),
        *(("fdatasync", n) for n in (1, 3, 6, 10)), ("fsync", 2), ("ftruncate", 2),
        ("renameat2", 1),
    ]:  # fmt: skip
        target = tmp_path / f"{kind}{n}.hr"
        code = packer(what, target, kind, n, what="shuffle")
        assert code in (0, KILLED)
        kills += code == KILLED
        if code:
            assert packer(what, target, what="shuffle") == 0
        assert files_of(target) == files_of(tmp_path / "whole.hr"), (kind, n)
        assert not target.with_name(target.name + ".partial").exists()
    assert kills >= 10


def test_the_manifest_says_how_it_was_shuffled_and_repair_still_mends(folder, tmp_path):
    root, _ = folder
    pack(root, tmp_path / "plain.hr")
    pack(root, tmp_path / "out.hr", shuffle=11)
    (segment,) = load_manifest(tmp_path / "out.hr").segments
    assert segment.source["shuffle"] == {"seed": 11}
    want = rows_of(tmp_path / "out.hr")
    assert want == [rows_of(tmp_path / "plain.hr")[i] for i in shuffled_order(60, 11)]
    flip(tmp_path / "out.hr" / "segment-0000-0000.hrv", 4100)
    assert repair(tmp_path / "out.hr").ok
    assert rows_of(tmp_path / "out.hr") == want


def test_an_appended_segment_is_shuffled_by_itself(tmp_path):
    def given(first, last):
        return [sample(i, 100) for i in range(first, last)]

    pack(given(0, 20), tmp_path / "out.hr", shuffle=1)
    before = rows_of(tmp_path / "out.hr")
    append(given(20, 50), tmp_path / "out.hr", shuffle=0)
    pack(given(20, 50), tmp_path / "more.hr")
    more = rows_of(tmp_path / "more.hr")
    assert rows_of(tmp_path / "out.hr") == before + [more[i] for i in shuffled_order(30, 0)]
    with pytest.raises(SourceError, match=r"is sample .* of the store already"):
        append(given(49, 60), tmp_path / "out.hr", shuffle=3)
    assert sorted(p.name for p in (tmp_path / "out.hr").iterdir() if "partial" in p.name) == []
    # Classes have the store's numbers, whatever the order in which a stream names them.
    for name, classes in (("a", "cat dog"), ("b", "emu dog cat")):
        for each in classes.split():
            (tmp_path / name / each).mkdir(parents=True)
            for i in range(8):
                (tmp_path / name / each / f"{name}{i}").write_bytes(each.encode())
    pack(tmp_path / "a", tmp_path / "pets.hr", shuffle=4)
    append(tmp_path / "b", tmp_path / "pets.hr", shuffle=4)
    assert all(data == [label.encode()] for _, label, data, _ in rows_of(tmp_path / "pets.hr"))


def test_samples_that_cannot_be_read_are_left_out_and_the_others_stay(tmp_path):
    make_folder(tmp_path / "root", classes=2, files=15)
    pack(tmp_path / "root", tmp_path / "plain.hr")
    plain = rows_of(tmp_path / "plain.hr")
    original, gone = extents._Files.read, {"class0/3.bin", "class1/7.bin"}

    def read(self, extent, number, view, start):
        if self._scan.columns.name(number).decode() in gone:
            raise SourceError("gone", path="gone")
        original(self, extent, number, view, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents._Files, "read", read)
        report = pack(
            tmp_path / "root", tmp_path / "out.hr", shuffle=5, on_error="skip", options=SMALL
        )
    assert len(report.skipped) == 2
    want = [plain[i] for i in shuffled_order(30, 5) if plain[i][0] not in gone]
    assert rows_of(tmp_path / "out.hr") == want


def test_large_samples_and_many_shards_are_shuffled(tmp_path, monkeypatch):
    monkeypatch.setattr(extents, "LARGE_BYTES", 20_000)
    monkeypatch.setattr(extents, "_OPEN_MAX", 2)
    shards = []
    for shard in range(9):
        samples = [sample(i, 30_000 if i % 7 == 0 else i) for i in range(shard * 9, shard * 9 + 9)]
        shards.append(tar_of(tmp_path / f"{shard}.tar", samples, "w"))
    pack(shards, tmp_path / "plain.hr", options=SMALL)
    pack(shards, tmp_path / "out.hr", options=SMALL, shuffle=2)
    plain = rows_of(tmp_path / "plain.hr")
    assert rows_of(tmp_path / "out.hr") == [plain[i] for i in shuffled_order(81, 2)]


def test_a_spool_that_the_disk_changed_is_an_error_not_a_sample(tmp_path):
    target, options = tmp_path / "out.hr", PackOptions(batch_bytes=5000, journal_bytes=9000)
    calls = 0

    def stop(done, total, *_):
        nonlocal calls
        calls += total is not None  # the second pass
        if calls == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(items, target, options=options, shuffle=3, progress=stop)
    flip(tmp_path / "out.hr.partial" / "spool" / "store" / "segment-0000-0000.hrv", 60_000)
    with pytest.raises(SourceError, match="checksum"):
        pack(items, target, options=options, shuffle=3)
    for other in (4, None):
        with pytest.raises(SourceChanged, match="packed shuffled by seed 3 here") as e:
            pack(items, target, options=options, shuffle=other)
        assert "seed 3 again" in e.value.next_step
        assert "--restart" in e.value.next_step
    pack(items, target, options=options, shuffle=4, resume=False)
    pack(items, tmp_path / "plain.hr")
    plain = rows_of(tmp_path / "plain.hr")
    assert rows_of(target) == [plain[i] for i in shuffled_order(60, 4)]


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5])
def test_a_seed_that_cannot_be_is_refused_and_nothing_is_left(tmp_path, seed):
    with pytest.raises((OrderError, TypeError)):
        pack([b"x"], tmp_path / "out.hr", shuffle=seed)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_or_failing_stream_leaves_nothing(tmp_path):
    def failing():
        yield b"x"
        raise ZeroDivisionError

    for source, error in (([], SourceError), (failing, ZeroDivisionError)):
        with pytest.raises(error):
            pack(source, tmp_path / "out.hr", shuffle=1)
        assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_both_copies_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.store.publish.free_bytes", lambda _: 10)
    with pytest.raises(VolumeError, match="10 bytes are free"):
        pack(items, tmp_path / "out.hr", shuffle=1)
