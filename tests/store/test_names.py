"""The name tree: builders agree, every name is found, nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.errors import CorruptStore, SourceError
from headrace.store.directory import (
    DirectoryColumns,
    build_levels,
    join_names,
    split_names,
    write_directory,
)
from headrace.store.segment import memory_file

from .reference import ReferenceDirectory, decode_block
from .reference_names import build_levels_reference

PREFIXES = st.sampled_from([b"", b"train/n01440764/", b"a" * 300, b"\xff\xfe", b"\x00"])
NAME = st.builds(lambda p, s: p + s, PREFIXES, st.binary(max_size=12))
LONG = st.integers(60_000, 65_535).map(lambda n: b"L" * n)
NAMES = st.lists(st.one_of(NAME, NAME, NAME, LONG), min_size=1, max_size=80, unique=True)


def directory_of(names: list[bytes], cls=ReferenceDirectory):
    n = len(names)
    blob, offsets = join_names(names)
    zero = np.zeros(n, np.uint8)
    with memory_file() as fd:
        write_directory(DirectoryColumns(blob, offsets, zero, zero, zero), fd)
        return cls.from_fd(fd, "memory")


@settings(max_examples=60, deadline=None)
@given(NAMES, st.lists(NAME, max_size=20))
def test_names_round_trip_and_search_agrees_with_a_dict(names, others):
    index = {name: i for i, name in enumerate(names)}
    queries = [*names, *others, *(n[:-1] for n in names if n), *(n + b"\0" for n in names[:5])]
    queries = [q for q in queries if len(q) <= 65_535]
    classes = [ReferenceDirectory, _native.Directory]
    for cls in classes:
        directory = directory_of(names, cls)
        assert [directory.name(i) for i in range(len(names))] == names
        assert directory.names(np.arange(len(names))) == names
        assert directory.find_many(queries).tolist() == [index.get(q, -1) for q in queries]
        assert [directory.find(q) for q in queries] == [index.get(q, -1) for q in queries]
        by_rank = [names[directory.index_at_rank(r)] for r in range(len(names))]
        assert by_rank == sorted(names)


@settings(max_examples=60, deadline=None)
@given(NAMES)
def test_native_builder_equals_the_reference(names):
    blob, offsets = join_names(names)
    assert split_names(blob, offsets) == names
    a, b = build_levels(blob, offsets), build_levels_reference(blob, offsets)
    assert (a[0] is None) == (b[0] is None)
    if b[0] is not None:
        assert a[0].tolist() == b[0].tolist()
    assert len(a[1]) == len(b[1])
    for (offsets_a, blob_a), (offsets_b, blob_b) in zip(a[1], b[1], strict=True):
        assert offsets_a.tolist() == offsets_b.tolist()
        assert blob_a.tobytes() == blob_b.tobytes()


@pytest.mark.parametrize("builder", [build_levels, build_levels_reference])
def test_a_duplicate_is_named(builder):
    blob, offsets = join_names([b"b", b"twice/7.png", b"a", b"twice/7.png"])
    with pytest.raises(SourceError, match=r"twice/7\.png"):
        builder(blob, offsets)


def test_a_name_that_is_too_long_is_refused():
    blob, offsets = join_names([b"a", b"x" * 65_536])
    with pytest.raises(SourceError, match="sample 1 is 65,536 bytes"):
        build_levels(blob, offsets)


def test_front_coding_shrinks_long_common_prefixes():
    names = [b"train/n%08d/n%08d_%d.JPEG" % (i // 50, i // 50, i) for i in range(5000)]
    blob, offsets = join_names(sorted(names))
    tree = build_levels_reference(blob, offsets)
    stored = sum(level_blob.nbytes for _, level_blob in tree[1])
    assert stored < len(blob) / 2
    assert tree[0] is None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 16))
def test_any_bytes_decode_to_ascending_names_or_an_error(data, count):
    try:
        names = decode_block(memoryview(data), count, "x", 0)
    except CorruptStore:
        return
    assert len(names) == count
    assert names == sorted(set(names))
