"""A folder as a source: ImageFolder's rules, and everything that a real folder may hold."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket

import pytest

from headrace.errors import SourceChanged, SourceError
from headrace.store import open_store
from headrace.store.directory import split_names
from headrace.store.pack import index, pack
from headrace.store.sources.folder import scan_folder
from headrace.store.sources.scan import SourceOptions

from .conftest import contents, make_folder
from .reference import open_either


def names_of(scan) -> list[bytes]:
    return split_names(scan.columns.names, scan.columns.name_offsets)


def test_sub_folders_are_classes(folder):
    root, want = folder
    scan = scan_folder(root)
    assert names_of(scan) == sorted(os.fsencode(n) for n in want)
    assert scan.columns.class_names == (b"class0", b"class1", b"class2")
    assert scan.columns.labels.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert scan.columns.length.tolist() == [len(want[n]) for n in sorted(want)]


def test_a_file_at_the_top_means_no_labels(folder):
    root, _ = folder
    (root / "notes.txt").write_bytes(b"x")
    scan = scan_folder(root)
    assert scan.columns.labels is None
    note = "no labels: 1 file lies in no class folder, the first is notes.txt"
    assert scan.notes == [f"{note} (leave it out, or put it into a folder)"]
    assert scan.columns.class_names is None
    # ... unless the extensions leave it out.
    assert scan_folder(root, SourceOptions(extensions=(".bin",))).columns.labels is not None
    for name in ("class0", "class1", "class2"):
        shutil.rmtree(root / name)
    assert not scan_folder(root).notes  # nobody meant classes


def test_hidden_files_are_left_out_and_extensions_ignore_case(tmp_path):
    for name in ("a.PNG", "b.png", ".hidden.png", "c.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.png").write_bytes(b"x")
    scan = scan_folder(tmp_path, SourceOptions(extensions=(".png",)))
    assert names_of(scan) == [b"a.PNG", b"b.png"]


def test_names_are_bytes_in_bytewise_order(tmp_path, reference):
    names = [b"\xff\xfe.png", "ä.png".encode(), b"a\nb.png", b"Z.png", b"a.png", b"\x80.png"]
    root = tmp_path / "root"
    root.mkdir()
    for name in names:
        (root / os.fsdecode(b"src-" + name)).write_bytes(name)
    pack(root, tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        stored = [os.fsencode(n) for n in store.names]
        assert stored == sorted(b"src-" + n for n in names)
        for name in names:
            assert bytes(store.read(os.fsdecode(b"src-" + name))) == name
            assert bytes(store.read(b"src-" + name)) == name


def test_links_are_followed_and_loops_end(tmp_path):
    root = tmp_path / "root"
    want = make_folder(root, files=3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.bin").write_bytes(b"linked")
    (root / "class0" / "link").symlink_to(elsewhere)
    (root / "class1" / "up").symlink_to(root)
    (root / "class2" / "self").symlink_to(root / "class2")
    (elsewhere / "back").symlink_to(root / "class0")
    scan = scan_folder(root)
    assert len(names_of(scan)) == len(want) + 1
    assert b"class0/link/x.bin" in names_of(scan)


def make_trouble(root) -> int:
    """Things that cannot be samples; returns how many."""
    (root / "class0" / "dangling").symlink_to(root / "nowhere")
    (root / "class0" / "circle").symlink_to(root / "class0" / "circle")
    os.mkfifo(root / "class1" / "fifo")
    with (
        socket.socket(socket.AF_UNIX) as s,
        contextlib.chdir(root),
    ):  # the socket's path must be short
        s.bind("class2/socket")
    return 4


def test_trouble_is_one_error_that_lists_it(folder):
    root, _ = folder
    count = make_trouble(root)
    with pytest.raises(SourceError) as caught:
        scan_folder(root)
    text = str(caught.value)
    assert f"{count} things cannot be samples" in text
    for name in ("dangling", "circle", "fifo", "socket"):
        assert name in text
    assert "on_error='skip'" in text


def test_trouble_beyond_ten_is_counted(tmp_path):
    for i in range(25):
        (tmp_path / f"link{i}").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"(?s)25 things.*and 15 more"):
        scan_folder(tmp_path)


@pytest.mark.parametrize("make", [pack, index])
def test_trouble_can_be_skipped_and_is_reported(folder, tmp_path, make):
    root, want = folder
    count = make_trouble(root)
    report = make(root, tmp_path / "out.hr", on_error="skip")
    assert len(report.skipped) == count
    with open_store(tmp_path / "out.hr") as store:
        assert contents(store) == want


def test_empty_files_are_samples(tmp_path, reference):
    root = tmp_path / "root"
    root.mkdir()
    for i in range(40):
        (root / f"{i:02d}").write_bytes(b"")
    pack(root, tmp_path / "p.hr")
    index(root, tmp_path / "i.hr")
    for path in ("p.hr", "i.hr"):
        with open_either(tmp_path / path, reference=reference) as store:
            assert [len(store.read(i)) for i in range(40)] == [0] * 40


def test_a_folder_without_samples_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="no samples"):
        scan_folder(tmp_path)
    with pytest.raises(SourceError, match="no such file"):
        pack(tmp_path / "nowhere", tmp_path / "out.hr")
    assert list(tmp_path.iterdir()) == []


class Meddler:
    """Changes a file after the listing, before its bytes are read."""

    def __init__(self, monkeypatch, change):
        from headrace.store.sources import extents

        self.done = 0
        original = extents.ScanReader.read

        def read(reader, plan):
            if not self.done:
                change()
                self.done += 1
            return original(reader, plan)

        monkeypatch.setattr(extents.ScanReader, "read", read)


CHANGES = {
    "grows": lambda f: f.write_bytes(f.read_bytes() + b"more"),
    "shrinks": lambda f: f.write_bytes(b""),
    "is touched": lambda f: os.utime(f, ns=(1, 1)),
    "vanishes": lambda f: f.unlink(),
}


@pytest.mark.parametrize("make", [pack, index])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_meanwhile_is_an_error(folder, tmp_path, monkeypatch, make, change):
    root, _ = folder
    victim = root / "class1" / "7.bin"
    victim.write_bytes(b"before")
    meddler = Meddler(monkeypatch, lambda: CHANGES[change](victim))
    with pytest.raises(SourceChanged, match=r"class1/7\.bin"):
        make(root, tmp_path / "out.hr")
    assert meddler.done == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos"]


@pytest.mark.parametrize("make", [pack, index])
def test_a_file_that_changes_meanwhile_can_be_skipped(folder, tmp_path, monkeypatch, make):
    root, want = folder
    victim = root / "class1" / "7.bin"
    meddler = Meddler(monkeypatch, victim.unlink)
    report = make(root, tmp_path / "out.hr", on_error="skip")
    assert meddler.done == 1
    assert [p.path for p in report.skipped] == [str(victim)]
    del want["class1/7.bin"]
    with open_store(tmp_path / "out.hr") as store:
        assert contents(store) == want
        assert store.labels.tolist() == [0] * 20 + [1] * 19 + [2] * 20
