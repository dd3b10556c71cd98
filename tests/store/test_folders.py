"""A store's names as folders: native = reference, and both = the obvious way over all names."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.store import open_store
from headrace.store.directory import DirectoryColumns, join_names, write_directory
from headrace.store.folders import FOLDER, FolderTree
from headrace.store.pack import append, pack

from .reference import ReferenceDirectory, open_either

components = st.text("ab/.-0\xff", min_size=1, max_size=6) | st.sampled_from(
    ["a", "b", "a/b", "a/b/c", "a!", "a0", "ab", "a/", "/a", "a//b", ".", "..", "a/../b", "é" * 200]
)
names = st.sets(components, min_size=1, max_size=40)


def truth(all_names: list[str]) -> dict[bytes, dict[bytes, int]]:
    """{folder: {entry: sample, or -1 for a folder}}, by the rules of `headrace.store.folders`."""
    found: dict[bytes, dict[bytes, int]] = {b"": {}}

    def good(component: bytes) -> bool:
        return bool(component) and component not in (b".", b"..") and len(component) <= 255

    for index, name in enumerate(all_names):
        path = os.fsencode(name).split(b"/")
        above = b""
        for depth, component in enumerate(path):
            if not good(component):
                break
            here = found.setdefault(above, {})
            if depth < len(path) - 1:
                here[component] = -1
                above = above + b"/" + component if above else component
                found.setdefault(above, {})
            elif here.get(component, 0) != -1:
                here[component] = index
    return found


def listed(tree: FolderTree, folder: bytes, count: int) -> dict[bytes, int]:
    entries, place = {}, 0
    while True:
        page = tree.page(folder, place, count)
        for entry in page.entries:
            assert entry.name not in entries
            entries[entry.name] = -1 if entry.part == FOLDER else entry.sample
        if page.place < 0:
            return entries
        assert page.place > place
        place = page.place


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=names, split=st.integers(0, 40), count=st.integers(1, 50))
def test_listings_and_look_ups_follow_the_rules(tmp_path_factory, names, split, count):
    path = tmp_path_factory.mktemp("store") / "s.hr"
    order = sorted(names, key=hash)
    first, second = order[: split + 1], order[split + 1 :]
    pack(lambda: [(n, n.encode()) for n in first], path)
    if second:
        append(lambda: [(n, n.encode()) for n in second], path)
    for reference in (False, True):
        with open_either(path, reference=reference) as store:
            tree = FolderTree(store)
            want = truth(list(store.names))
            for folder, entries in want.items():
                assert listed(tree, folder, count) == entries
                for name, sample in entries.items():
                    full = folder + b"/" + name if folder else name
                    found = tree.resolve(full)
                    assert found is not None
                    assert (found.sample if sample >= 0 else -1) == sample
                    assert found.is_folder == (sample < 0)
                    assert found.size == (len(store.read(sample)) if sample >= 0 else 0)
                for strange in (b"nothing", b"a", b"b", b"0", b".", b"..", b""):
                    full = folder + b"/" + strange if folder else strange
                    assert (tree.resolve(full) is None) == (strange not in entries)


def test_the_parts_of_a_sample_are_files_and_the_longer_name_wins(tmp_path):
    def items():
        yield "x", {"jpg": b"1", "seg.png": b"22"}
        yield "x.seg", {"png": b"333", "jpg": b"4444"}
        yield "d/y", {"jpg": b"55555"}

    pack(items, tmp_path / "s.hr")
    with open_store(tmp_path / "s.hr") as store:
        tree = FolderTree(store)
        for count in (1, 2, 50):
            entries, place = [], 0
            while place >= 0:
                page = tree.page(b"", place, count)
                entries += [(e.name, e.sample, e.size) for e in page.entries]
                assert not page.hidden
                place = page.place
            assert sorted(entries) == [
                (b"d", 2, 0), (b"x.jpg", 0, 1), (b"x.seg.jpg", 1, 4), (b"x.seg.png", 1, 3),
            ]  # fmt: skip
        # A listing may be left behind any entry.
        whole = tree.page(b"", 0, 50).entries
        for k, entry in enumerate(whole):
            assert tree.page(b"", entry.place, 50).entries == whole[k + 1 :]
        part = tree.part_number(b"seg.png")
        hidden = tree.file_at(0, part)
        assert hidden is not None
        assert hidden.size == 2


def test_an_only_part_is_a_file_of_the_samples_name_whatever_the_part_is_called(tmp_path):
    pack(lambda: [("d/x", {"jpg": b"1"}), ("y", {"jpg": b"22"})], tmp_path / "s.hr")
    with open_store(tmp_path / "s.hr") as store:
        tree = FolderTree(store)
        assert listed(tree, b"", 50) == {b"d": -1, b"y": 1}
        for folder, name in ((b"d", b"x"), (b"", b"y")):
            (entry,) = (e for e in tree.page(folder, 0, 50).entries if e.name == name)
            found = tree.resolve(folder + b"/" + name if folder else name)
            assert found is not None
            assert (found.sample, found.size) == (entry.sample, entry.size)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.sets(st.binary(max_size=8).map(lambda b: b.replace(b"\x01", b"/")), min_size=1),
    keys=st.lists(st.binary(max_size=9), max_size=20),
    limit=st.integers(0, 30),
)
def test_the_native_directory_answers_as_the_reference(tmp_path_factory, names, keys, limit):
    path = tmp_path_factory.mktemp("directory") / "a.hrd"
    blob, offsets = join_names(sorted(names, key=hash))
    n = len(names)
    zeros, lengths = np.zeros(n, np.uint8), np.arange(n).astype(np.uint32)
    write_directory(DirectoryColumns(blob, offsets, zeros, zeros, lengths), path)
    native = _native.Directory.open(os.fsencode(path))
    slow = ReferenceDirectory.open(os.fsencode(path))
    for key in [*keys, *names, b"", b"/"]:
        assert native.seek(key) == slow.seek(key)
        assert native.lookup(key) == slow.lookup(key)
        prefix = key.rpartition(b"/")[0] + b"/" if b"/" in key else b""
        for first in (0, 1, n // 2, n, n + 5):
            ours, theirs = (
                native.children(prefix, first, limit),
                slow.children(prefix, first, limit),
            )
            assert ours[0] == theirs[0]
            for a, b in zip(ours[1:], theirs[1:], strict=True):
                assert a.tolist() == b.tolist()
    wanted = np.arange(n)
    assert (
        native.lengths(wanted, 0).tolist() == slow.lengths(wanted, 0).tolist() == lengths.tolist()
    )
    assert native.lengths(wanted, 1).tolist() == [-1] * n


@pytest.mark.parametrize("first", [-5, 2**62])
def test_ranks_outside_are_the_ends(tmp_path, first):
    pack(lambda: [("a", b""), ("b", b"")], tmp_path / "s.hr")
    with open_store(tmp_path / "s.hr") as store:
        names = store.segments[0].directory.children(b"", first, 9)[0]
    assert names == ([b"a", b"b"] if first < 0 else [])
