"""Names that are odd as paths, samples of several parts, sources without a store."""

from __future__ import annotations

import errno
import io
import os
import tarfile

import pytest

import headrace as hr

ODD = {
    "fine.bin": b"0", "a": b"1", "a/b": b"2", "a/b/c": b"3", "a//b": b"4", "x/": b"5", "/x": b"6",
    ".": b"7", "..": b"8", "d/./e": b"9", "d/../e": b"10", "e/": b"11", "l" * 256: b"12",
    "l" * 255: b"13", "nul\0": b"14", "ü/日本": b"15", "new\nline": b"16", "z" * 300 + "/deep": b"17",
    "a!": b"18", "d/f": b"19",
}  # fmt: skip


@pytest.fixture
def odd(mounts, tmp_path):
    hr.pack(ODD.items, tmp_path / "odd.hr")
    return mounts(tmp_path / "odd.hr"), list(ODD)


def test_names_that_can_be_paths_are_paths_and_the_others_are_at_the_door(odd):
    folder, names = odd
    assert sorted(os.listdir(folder)) == sorted(
        ["fine.bin", "a", "a!", "d", "e", "l" * 255, "new\nline", "x", "ü"]
    )
    assert os.listdir(folder / "x") == []  # the name `x/` makes a folder, and no file in it
    shown = {"fine.bin", "a/b/c", "a!", "d/f", "l" * 255, "ü/日本", "new\nline"}
    paths = set()
    for where, _, files in os.walk(folder):
        for name in files:
            path = os.path.relpath(os.path.join(where, name), folder)
            paths.add(path)
            with open(os.path.join(where, name), "rb") as f:
                assert f.read() == ODD[path]
    assert paths == shown
    for index, name in enumerate(names):  # all are there, the odd ones too
        door = folder / ".headrace" / str(index)
        assert door.read_bytes() == ODD[name]
        assert os.getxattr(door, "user.headrace.name") == name.encode()
    log = os.getxattr(folder, "user.headrace.log").decode()
    assert f"read it as .headrace/{names.index('a')}\n" in log
    assert f"read it as .headrace/{names.index('a//b')}\n" in log


def test_a_name_that_is_a_file_and_a_folder_is_the_folder(odd):
    folder, _ = odd
    assert (folder / "a").is_dir()
    assert os.listdir(folder / "a") == ["b"]
    assert os.listdir(folder / "a/b") == ["c"]


def test_the_door_shows_nothing_and_holds_nothing_else(odd):
    folder, names = odd
    assert ".headrace" not in os.listdir(folder)
    assert os.listdir(folder / ".headrace") == []
    for name in (str(len(names)), "-1", "00", "1.bin", "x", "1.", "٣", "9" * 19, "1/2"):
        with pytest.raises(OSError) as caught:
            os.stat(folder / ".headrace" / name)
        assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR), name


def test_a_sample_called_like_the_door_is_itself(mounts, tmp_path):
    hr.pack(lambda: [(".headrace", b"mine"), ("b", b"2")], tmp_path / "s.hr")
    folder = mounts(tmp_path / "s.hr")
    assert (folder / ".headrace").read_bytes() == b"mine"


def test_parts_are_files(mounts, tmp_path):
    parts = {}
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for i in range(300):
            for part in ("cls", "jpg", "seg.png")[: 2 + i % 2]:
                data = f"{i} {part}".encode()
                info = tarfile.TarInfo(f"train/{i:04d}.{part}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
                parts[info.name] = data
    folder = mounts(tmp_path / "shard.tar")  # directly, without a store
    assert sorted(f"train/{n}" for n in os.listdir(folder / "train")) == sorted(parts)
    for name, data in parts.items():
        assert (folder / name).read_bytes() == data
        assert (folder / name).stat().st_size == len(data)
    assert (folder / ".headrace/7.seg.png").read_bytes() == b"7 seg.png"
    assert not (folder / "train/0000").exists()
    assert not (folder / "train/0000.seg.png").exists()


def test_labels_are_attributes(mounts, tmp_path, packed_photos):
    folder = mounts(packed_photos)
    assert os.getxattr(folder / "owls/1.png", "user.headrace.label") == b"2"
    assert os.getxattr(folder / "cats/1.png", "user.headrace.label") == b"0"


def test_a_folder_that_is_no_store_is_mounted_as_it_lies(mounts, tmp_path):
    """Programs open also what no training would take: its splits, shards, READMEs and hidden files."""
    root = tmp_path / "data"
    for name in (
        "train/1.bin",
        "val/1.bin",
        "README.md",
        ".hidden",
        ".cache/index",
        "empty",
        "a.tar",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name if name != "empty" else "")
    (root / "nowhere").symlink_to("none")
    folder = mounts(root)
    assert b"/nowhere is left out" in os.getxattr(folder, "user.headrace.log")
    shown = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert shown == {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_path_with_spaces_commas_and_backslashes(mounts, tmp_path, packed_photos):
    store = tmp_path / "a store, with\\odd name.hr"
    store.symlink_to(packed_photos)
    target = tmp_path / "mount here, with\\space"
    target.mkdir()
    folder = mounts(store, target)
    assert len(os.listdir(folder / "owls")) == 12
    assert os.getxattr(folder, "user.headrace.store").decode() == str(store)


def test_a_small_store_of_many_names(mounts, tmp_path):
    """What the slow test does with a million."""
    _many(mounts, tmp_path, folders=20, files=300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_files(mounts, tmp_path):
    _many(mounts, tmp_path, folders=1000, files=1000)


def _many(mounts, tmp_path, folders: int, files: int) -> None:
    import random
    import subprocess

    def items():
        for i in range(folders):
            for k in range(files):
                yield f"{i}/{k}.bin", b"%d %d" % (i, k)

    hr.pack(items, tmp_path / "many.hr")
    folder = mounts(tmp_path / "many.hr")
    count = subprocess.run(
        ["find", str(folder), "-type", "f"], capture_output=True, check=True
    ).stdout.count(b"\n")
    assert count == folders * files
    assert len(os.listdir(folder / "7")) == files
    some = random.Random(1)
    for _ in range(500):
        i, k = some.randrange(folders), some.randrange(files)
        path = folder / f"{i}/{k}.bin"
        assert path.stat().st_size == len(b"%d %d" % (i, k))
        assert path.read_bytes() == b"%d %d" % (i, k)
        assert not (folder / f"{i}/{files + k}.bin").exists()
