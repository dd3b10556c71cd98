"""Damaged stores: every injected fault is an error that names it, or provably harmless; never a wrong byte.

Then `verify` must name exactly the samples that were damaged, and `repair` must mend them.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from headrace.errors import (
    CorruptSample,
    CorruptStore,
    HeadraceError,
    SourceChanged,
    StoreNotFound,
)
from headrace.store import open_store
from headrace.store.pack import index, pack
from headrace.store.packing import PackOptions
from headrace.store.repair import repair
from headrace.store.segment import read_extent
from headrace.store.verify import verify

from .conftest import contents, flip, make_folder
from .reference import open_either

OPTIONS = PackOptions(volume_bytes=30_000)


@pytest.fixture
def packed(folder, tmp_path):
    root, want = folder
    pack(root, tmp_path / "out.hr", options=OPTIONS)
    return tmp_path / "out.hr", want


def read_all(path, reference):
    """{name: bytes} of all that can be read, and the errors of the rest by name."""
    good, bad = {}, {}
    with open_either(path, reference=reference) as store:
        for i, name in enumerate(store.names):
            try:
                good[name] = bytes(store.read(i))
            except HeadraceError as e:
                bad[name] = e
    return good, bad


def test_native_and_reference_read_alike(packed):
    path, want = packed
    with open_store(path) as fast, open_either(path, reference=True) as slow:
        assert contents(fast) == contents(slow) == want
        for i in (5, 0, 59, 5):
            segment = slow.segment_of(i)
            pieces = [read_extent(segment, extent) for extent in segment.extents(i)]
            assert pieces == [fast.read(i)]


def test_every_flip_in_a_volume_is_detected_or_harmless(packed, reference):
    path, want = packed
    r = random.Random(1)
    volumes = sorted(path.glob("*.hrv"))
    injected = detected = harmless = 0
    for _ in range(80):
        volume = r.choice(volumes)
        good = volume.read_bytes()
        at = r.choice([r.randrange(4096), r.randrange(4096, len(good))])
        flip(volume, at, 1 << r.randrange(8))
        injected += 1
        try:
            found, bad = read_all(path, reference)
        except CorruptStore as e:
            detected += at < 4096 and volume.name in str(e)
        else:
            assert all(found[name] == want[name] for name in found)
            assert found.keys() | bad.keys() == want.keys()
            detected += len(bad) == 1
            harmless += not bad
            for name, error in bad.items():
                assert isinstance(error, CorruptSample)
                assert (error.name, error.path) == (name, str(volume))
                assert "checksum" in str(error)
        assert not verify(path).ok
        volume.write_bytes(good)
    assert injected == detected + harmless
    assert detected > 50
    assert verify(path).ok


def test_overwritten_ranges_give_errors_and_never_wrong_bytes(packed, reference):
    path, want = packed
    r = random.Random(2)
    volume = sorted(path.glob("*.hrv"))[1]
    data = bytearray(volume.read_bytes())
    data[6000:16_000] = r.randbytes(10_000)
    volume.write_bytes(data)
    found, bad = read_all(path, reference)
    assert len(bad) >= 3
    assert all(found[name] == want[name] for name in found)
    assert {b.name for b in verify(path).bad_samples} == bad.keys()


@pytest.mark.parametrize("change", ["missing", "shorter", "longer", "empty", "foreign"])
def test_a_volume_that_is_not_right_is_found_when_opened(packed, reference, change):
    path, _ = packed
    volume = sorted(path.glob("*.hrv"))[1]
    if change == "missing":
        volume.unlink()
    elif change == "foreign":
        volume.write_bytes(b"\x89PNG\r\n\x1a\n".ljust(volume.stat().st_size, b"\0"))
    else:
        size = {"shorter": volume.stat().st_size - 4096, "longer": 1 << 20, "empty": 0}[change]
        os.truncate(volume, size)
    with pytest.raises(CorruptStore) as caught:
        open_either(path, reference=reference)
    assert volume.name in str(caught.value)
    assert caught.value.path == str(volume)
    assert caught.value.next_step
    assert not verify(path).ok


def test_swapped_volumes_are_found_and_not_replaced(packed):
    path, _ = packed
    volumes = sorted(path.glob("*.hrv"))
    a, b = volumes[0], volumes[1]
    os.truncate(a, max(a.stat().st_size, b.stat().st_size))
    os.truncate(b, a.stat().st_size)
    before = (a.read_bytes(), b.read_bytes())
    a.rename(path / "x")
    b.rename(a)
    (path / "x").rename(b)
    with pytest.raises(CorruptStore):
        open_store(path)
    report = repair(path)
    assert not report.ok
    assert report.rewritten == []
    assert "move that file back" in report.unrepairable[0][1]
    assert (b.read_bytes(), a.read_bytes()) == before


def test_a_volume_of_another_store_is_found(tmp_path, reference):
    for name in "ab":
        make_folder(tmp_path / name, seed=ord(name))
        for file in (tmp_path / name).rglob("*.bin"):
            file.write_bytes(name.encode() * 500)
        pack(tmp_path / name, tmp_path / f"{name}.hr")
    shutil.copy(tmp_path / "a.hr" / "segment-0000-0000.hrv", tmp_path / "b.hr")
    with pytest.raises(CorruptStore, match="uuid"):
        open_either(tmp_path / "b.hr", reference=reference)


def test_a_directory_of_another_store_is_found(tmp_path, reference):
    for name, size in (("a", 1), ("b", 2)):
        pack([("x", b"x" * size)], tmp_path / name)
    shutil.copy(tmp_path / "a" / "segment-0000.hrd", tmp_path / "b")
    with pytest.raises(CorruptStore, match="uuid"):
        open_either(tmp_path / "b", reference=reference)
    report = verify(tmp_path / "b")
    assert not report.ok
    assert report.unchecked_samples == 1


def test_a_missing_directory_is_named(packed, reference):
    path, _ = packed
    (path / "segment-0000.hrd").unlink()
    with pytest.raises(StoreNotFound, match=r"segment-0000\.hrd"):
        open_either(path, reference=reference)
    with pytest.raises(StoreNotFound, match="there is no store and no data"):
        open_either(path.parent / "nowhere", reference=reference)


def test_every_flip_in_the_directory_is_detected_or_harmless(packed, reference):
    path, want = packed
    file = path / "segment-0000.hrd"
    good = file.read_bytes()
    r = random.Random(4)
    detected = harmless = 0
    for _ in range(60):
        flip(file, r.choice([r.randrange(1200), r.randrange(len(good))]), 1 << r.randrange(8))
        try:
            found, bad = read_all(path, reference)
        except HeadraceError:
            detected += 1
        else:
            assert (found, bad) == (want, {})
            harmless += 1
        assert not verify(path).ok or file.read_bytes()[8192:] == good[8192:]
        file.write_bytes(good)
    assert detected + harmless == 60
    assert detected > 40


def test_verify_names_exactly_the_damaged_samples_and_repair_mends_them(packed, folder):
    path, want = packed
    root, _ = folder
    r = random.Random(9)
    with open_store(path) as store:
        victims = r.sample([i for i in range(60) if len(want[store.names[i]]) > 0], 7)
        names = {store.names[i] for i in victims}
        places = []
        for i in victims:
            extent = store.segment_of(i).extents(i)[0]
            places.append((store.segments[0].volumes.paths[extent.volume], extent))
    for where, extent in places:
        flip(Path(where), extent.offset + r.randrange(extent.length), 0x40)
    seen = []
    report = verify(path, progress=lambda *a: seen.append(a))
    assert {b.name for b in report.bad_samples} == names
    assert {b.index for b in report.bad_samples} == set(victims)
    assert {(b.path, b.offset_bytes) for b in report.bad_samples} == {
        (where, e.offset) for where, e in places
    }
    assert report.checked_samples == report.samples == 60
    assert seen[-1][0] == 60
    assert all(b.name in str(b) for b in report.bad_samples)

    # One of them has changed in the source, one is gone: those stay bad, and are named.
    changed, gone = sorted(names)[:2]
    (root / changed).write_bytes(b"another content")
    (root / gone).unlink()
    mended = repair(path)
    assert {b.name for b in mended.repaired} == names - {changed, gone}
    assert {b.name for b, _ in mended.unrepairable} == {changed, gone}
    assert not mended.ok
    assert {b.name for b in verify(path).bad_samples} == {changed, gone}
    found, bad = read_all(path, reference=False)
    assert bad.keys() == {changed, gone}
    assert found == {n: d for n, d in want.items() if n not in (changed, gone)}

    # The source comes back.
    for name in (changed, gone):
        (root / name).write_bytes(want[name])
    assert repair(path).ok
    assert verify(path).ok
    assert not list(path.glob("*.new"))


@pytest.mark.parametrize("change", ["missing", "shorter", "header", "tail"])
def test_a_broken_volume_is_made_again(packed, change):
    path, want = packed
    volume = max(path.glob("*.hrv"))
    good = volume.read_bytes()
    if change == "missing":
        volume.unlink()
    elif change == "shorter":
        os.truncate(volume, 5000)
    elif change == "header":
        flip(volume, 20)
    else:
        flip(volume, len(good) - 1)
    assert not verify(path).ok
    assert repair(path).ok
    assert volume.read_bytes() == good
    with open_store(path) as store:
        assert contents(store) == want


def test_a_store_made_of_an_iterable_cannot_be_repaired_and_says_so(tmp_path):
    pack([("a", b"x" * 100), ("b", b"y" * 100)], tmp_path / "out.hr")
    volume = tmp_path / "out.hr" / "segment-0000-0000.hrv"
    flip(volume, 4100)
    before = volume.read_bytes()
    report = repair(tmp_path / "out.hr")
    assert not report.ok
    assert "iterable" in report.unrepairable[0][1]
    assert volume.read_bytes() == before


@pytest.mark.parametrize("checksum", [True, False])
def test_an_indexed_folder_that_changed_is_noticed(folder, tmp_path, reference, checksum):
    root, want = folder
    target = tmp_path / "out.hr"
    index(root, target, checksum=checksum)
    victims = {
        "class0/1.bin": lambda f: f.write_bytes(b"longer " * 1000),
        "class0/2.bin": lambda f: f.unlink(),
        "class0/3.bin": lambda f: os.utime(f, ns=(1, 1)),
        "class0/4.bin": lambda f: (f.unlink(), os.mkfifo(f)),
        "class0/5.bin": lambda f: (f.unlink(), f.mkdir()),
    }
    for name, change in victims.items():
        change(root / name)
    found, bad = read_all(target, reference)
    assert bad.keys() == victims.keys()
    assert all(isinstance(e, SourceChanged) for e in bad.values())
    assert all(str(root / name) in str(e) for name, e in bad.items())
    assert found == {n: d for n, d in want.items() if n not in victims}
    assert {b.name for b in verify(target).bad_samples} == victims.keys()
    # Content changed behind the clock's back: only a checksum notices.
    name = next(n for n, d in want.items() if len(d) > 10 and n not in victims)
    status = (root / name).stat()
    flip(root / name, 3)
    os.utime(root / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    _, bad = read_all(target, reference)
    assert (name in bad) == checksum
    shutil.rmtree(root)
    with pytest.raises(SourceChanged, match="folder is gone"):
        open_either(target, reference=reference)


def test_a_hostile_name_does_not_lead_out_of_the_tree(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    (root / "xx-yyyyyy").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"secret")
    status = (tmp_path / "secret").stat()
    os.utime(root / "xx-yyyyyy", ns=(status.st_atime_ns, status.st_mtime_ns))
    from headrace.store import directory
    from headrace.store.pack import index as index_function

    original = directory.join_names
    monkeypatch.setattr(directory, "join_names", lambda _: original([b"../secret"]))
    index_function(root, tmp_path / "out.hr", checksum=False)
    with open_either(tmp_path / "out.hr", reference=True) as store:
        assert store.names[0] == "../secret"
        with pytest.raises(CorruptStore, match="leads out"):
            store.read(0)
