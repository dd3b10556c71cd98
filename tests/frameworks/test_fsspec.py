"""`headrace://`: paths, listings, batched reads, and refusals."""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import headrace as hr
from headrace import _native
from headrace.errors import CorruptSample
from headrace.store.store import Store

fsspec = pytest.importorskip("fsspec")

from headrace.frameworks import fsspec as filesystem  # noqa: E402
from headrace.fsspec import HeadraceFileSystem  # noqa: E402


@pytest.fixture
def files():
    r = random.Random(5)
    names = [f"{split}/c{i % 3}/{i:03d}.bin" for split in ("train", "val") for i in range(20)]
    return {
        name: r.randbytes(r.choice([0, 1, 700, 5000])) for name in [*names, "readme", "train.txt"]
    }


@pytest.fixture
def root(tmp_path, files):
    shuffled = sorted(files.items(), key=lambda pair: pair[1])
    hr.pack(shuffled, tmp_path / "a.hr")
    return str(tmp_path / "a.hr")


@pytest.fixture(autouse=True)
def forget_instances():
    """fsspec keeps file systems that it made itself, and so their stores, until the process ends."""
    yield
    for instance in HeadraceFileSystem._cache.values():
        instance.invalidate_cache()
    HeadraceFileSystem.clear_instance_cache()


@pytest.fixture
def fs():
    found = HeadraceFileSystem(skip_instance_cache=True)
    yield found
    found.invalidate_cache()


def test_the_protocol_is_known_to_fsspec(root, files):
    """By the package's entry point, in a process that imports fsspec only."""
    code = f"import fsspec; print(len(fsspec.open('headrace://{root}/train/c1/001.bin').open().read()))"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(ended.stdout) == len(files["train/c1/001.bin"])


def test_folders_come_from_names_and_reading_gives_the_bytes(fs, root, files):
    assert fs.ls(root, detail=False) == [
        f"{root}/{n}" for n in ("readme", "train", "train.txt", "val")
    ]
    assert [e["type"] for e in fs.ls(root)] == ["file", "directory", "file", "directory"]
    assert {n.removeprefix(root + "/") for n in fs.find(root)} == set(files)
    walked = {f"{base}/{f}" for base, _, names in fs.walk(root) for f in names}
    assert {n.removeprefix(root + "/") for n in walked} == set(files)
    assert len(fs.glob(f"{root}/*/c1/*.bin")) == sum("/c1/" in n for n in files)
    found = fs.cat(f"headrace://{root}", recursive=True)
    assert {n.removeprefix(root + "/"): data for n, data in found.items()} == files
    for name, data in files.items():
        info = fs.info(f"{root}/{name}")
        assert (info["type"], info["size"]) == ("file", len(data))


def test_listing_reads_no_sample(fs, root, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a sample was read")

    monkeypatch.setattr(Store, "read", refuse)
    monkeypatch.setattr(filesystem, "BatchReader", refuse)
    assert len(fs.find(root, detail=True)) == 42
    assert fs.du(root) > 0
    with pytest.raises(AssertionError):  # the trap works
        fs.cat_file(f"{root}/readme")


def test_listing_one_folder_looks_at_few_names(fs, tmp_path, monkeypatch):
    """Of 20,000 names in 100 folders, a listing of the root takes searches, not a walk."""
    hr.pack(((f"d{i % 100:02d}/{i:05d}", b"") for i in range(20_000)), tmp_path / "b.hr")
    looked = 0
    original = _native.Directory.children

    def counting(directory, prefix, first, limit):
        nonlocal looked
        found = original(directory, prefix, first, limit)
        looked += len(found[0])
        return found

    monkeypatch.setattr(_native.Directory, "children", counting)
    assert len(fs.ls(f"{tmp_path}/b.hr")) == 100
    assert looked == 100
    looked = 0
    assert len(fs.ls(f"{tmp_path}/b.hr/d42")) == 200
    assert looked == 200


def test_ranges_are_as_slices_of_the_whole(fs, root, files):
    names = [n for n in files if len(files[n]) > 100]
    paths = [f"{root}/{n}" for n in names for _ in range(3)]
    starts = [s for _ in names for s in (None, 5, -20)]
    ends = [e for _ in names for e in (10, None, -3)]
    got = fs.cat_ranges(paths, starts, ends)
    assert got == [
        files[p.removeprefix(root + "/")][s:e] for p, s, e in zip(paths, starts, ends, strict=True)
    ]
    assert fs.cat_file(paths[0], 7, 3) == b""
    assert fs.read_block(paths[0], 5, 10) == files[names[0]][5:15]


def test_many_files_are_one_native_batch(fs, root, files, monkeypatch):
    batches = []
    submit = filesystem.BatchReader.submit

    def counting(self, indices):
        batches.append(len(indices))
        return submit(self, indices)

    monkeypatch.setattr(filesystem.BatchReader, "submit", counting)
    paths = [f"{root}/{name}" for name in files]
    assert fs.cat_ranges([*paths, *paths], 0, None) == [*files.values(), *files.values()]
    assert batches == [len(files)]
    monkeypatch.setattr(filesystem, "BATCH_BYTES", 6000)  # then in batches of bounded size
    batches.clear()
    assert fs.cat_ranges(paths, 0, None) == list(files.values())
    assert len(batches) > 5
    monkeypatch.setattr(filesystem, "BATCH_BYTES", 1000)  # and large ones alone
    assert fs.cat_ranges(paths, 0, None) == list(files.values())


def test_what_is_missing_has_the_error_of_its_kind(fs, root, tmp_path):
    for path in ("train/none", "tra", "readme/x", "train/c1/001.bin.jpg"):
        for act in (fs.info, fs.ls, fs.cat_file, fs.open):
            with pytest.raises(FileNotFoundError):
                act(f"{root}/{path}")
        assert not fs.exists(f"{root}/{path}")
    with pytest.raises(FileNotFoundError, match="no store"):
        fs.ls(str(tmp_path))
    for act in (fs.cat_file, fs.open):
        with pytest.raises(IsADirectoryError):
            act(f"{root}/train")
    errors = fs.cat_ranges([f"{root}/readme", f"{root}/none", f"{root}/val"], 0, None)
    assert [type(e) for e in errors] == [bytes, FileNotFoundError, IsADirectoryError]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([f"{root}/readme", f"{root}/none"], 0, None, on_error="raise")
    assert list(fs.cat([f"{root}/readme", f"{root}/none"], on_error="omit")) == [f"{root}/readme"]


def test_writing_is_refused_as_on_a_read_only_file_system(fs, root, tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    before = fs.find(root)
    target = f"{root}/new"
    for act in (
        lambda: fs.open(target, "wb"), lambda: fs.open(f"{root}/readme", "ab"),
        lambda: fs.pipe(target, b"x"), lambda: fs.put(str(tmp_path / "x"), target),
        lambda: fs.touch(target), lambda: fs.mkdir(target), lambda: fs.makedirs(target),
        lambda: fs.rm(f"{root}/readme"), lambda: fs.rm(f"{root}/train", recursive=True),
        lambda: fs.rm_file(f"{root}/readme"), lambda: fs.rmdir(f"{root}/train"),
        lambda: fs.mv(f"{root}/readme", target), lambda: fs.copy(f"{root}/readme", target),
    ):  # fmt: skip
        with pytest.raises(OSError, match="read-only"):
            act()
    assert fs.find(root) == before


def test_an_open_file_reads_ranges_of_a_large_sample(fs, tmp_path, monkeypatch):
    data = random.Random(1).randbytes(12 << 20)
    hr.pack([("huge", data)], tmp_path / "h.hr")
    read = []
    original = Store.read

    def counting(self, sample, start=None, size=None, part=None):
        read.append(size)
        return original(self, sample, start, size, part)

    monkeypatch.setattr(Store, "read", counting)
    with fs.open(f"{tmp_path}/h.hr/huge", block_size=1 << 16) as f:
        f.seek(5 << 20)
        assert f.read(100) == data[5 << 20 : (5 << 20) + 100]
        f.seek(-10, 2)
        assert f.read() == data[-10:]
    assert 0 < sum(read) < 1 << 20
    with fs.open(f"{tmp_path}/h.hr/huge") as f:
        assert f.read() == data


def test_parts_are_files_with_the_part_behind_a_dot(fs, tmp_path):
    """A WebDataset tar gets the names of its members back."""
    members = {
        f"a/{i:02d}.{ext}": f"{i}{ext}".encode() for i in range(5) for ext in ("jpg", "seg.png")
    }
    with tarfile.open(tmp_path / "w.tar", "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    where = f"{tmp_path}/w.tar"
    assert {n.removeprefix(where + "/") for n in fs.find(where)} == set(members)
    assert {n.removeprefix(where + "/a/") for n in fs.ls(f"{where}/a", detail=False)} == {
        n.removeprefix("a/") for n in members
    }
    got = fs.cat(f"{where}/a/*")
    assert {n.removeprefix(where + "/"): data for n, data in got.items()} == members
    assert fs.info(f"{where}/a/03.seg.png")["part"] == "seg.png"
    assert not fs.exists(f"{where}/a/03")


def test_a_damaged_sample_is_an_error_and_its_neighbours_are_not(fs, tmp_path):
    hr.pack([("a", b"a" * 100), ("b", b"b" * 100), ("c", b"c" * 100)], tmp_path / "d.hr")
    volume = tmp_path / "d.hr/segment-0000-0000.hrv"
    data = bytearray(volume.read_bytes())
    at = data.index(b"b" * 100) + 50
    data[at] ^= 1
    volume.write_bytes(data)
    paths = [f"{tmp_path}/d.hr/{n}" for n in "abc"]
    got = fs.cat_ranges(paths, 0, None)
    assert [type(x) for x in got] == [bytes, CorruptSample, bytes]
    with pytest.raises(CorruptSample):
        fs.cat_file(paths[1])


def test_appended_samples_show_after_the_cache_is_dropped(fs, root):
    assert not fs.exists(f"{root}/train/new.bin")
    hr.append([("train/new.bin", b"new"), ("zoo/x", b"x")], root)
    assert not fs.exists(f"{root}/train/new.bin")  # its snapshot
    fs.invalidate_cache(root)
    assert fs.cat_file(f"{root}/train/new.bin") == b"new"
    listed = [Path(n).name for n in fs.ls(root, detail=False)]
    assert listed == ["readme", "train", "train.txt", "val", "zoo"]
    assert len(fs.find(root)) == 44


def test_odd_names_neither_loop_nor_escape(fs, tmp_path):
    names = ["a//b", "a/", "/abs", "a/ok", "..", "x/../y", "\udcff\udcfe", "spa ce/ü"]
    hr.pack([(name, name.encode(errors="surrogateescape")) for name in names], tmp_path / "o.hr")
    root = f"{tmp_path}/o.hr"
    listed = {n.removeprefix(root + "/") for n in fs.find(root)}
    assert listed == {"a/ok", "..", "x/../y", "\udcff\udcfe", "spa ce/ü"}
    walked = [base for base, _, _ in fs.walk(root)]
    assert len(walked) == len(set(walked)) < 10
    for name in listed:
        assert fs.cat_file(f"{root}/{name}") == name.encode(errors="surrogateescape")


def test_a_file_system_goes_to_another_process(root, files):
    code = "import sys, pickle; fs, p = pickle.load(sys.stdin.buffer); print(len(fs.cat_file(p)))"
    fs = fsspec.filesystem("headrace")
    fs.cat_file(f"{root}/readme")
    sent = pickle.dumps((fs, f"{root}/train/c2/002.bin"))
    ended = subprocess.run(
        [sys.executable, "-c", code], input=sent, check=True, capture_output=True
    )
    assert int(ended.stdout) == len(files["train/c2/002.bin"])
    fs.invalidate_cache()


def test_a_cache_in_front_reads_through(root, files, tmp_path):
    with fsspec.open(
        f"simplecache::headrace://{root}/readme", simplecache={"cache_storage": str(tmp_path / "c")}
    ) as f:
        assert f.read() == files["readme"]
