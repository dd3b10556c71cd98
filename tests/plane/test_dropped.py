"""What is dropped is gone at once: descriptors, threads and shared memory, without garbage collection.

A training script that makes a loader for each validation, or leaves one by an exception, never calls
`close`. Only reference counts can be relied on: a cycle would keep rings, threads and buffers until the
collector happens to run, which programs with large heaps turn off.
"""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import CorruptSample
from store.reference import open_either
from tests_shared import descriptors, threads, until

from .test_faults import extent_of, flip_byte, volume_of


@pytest.fixture(autouse=True)
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


WAYS = {
    "read": {},
    "direct": {"direct": "always"},
    "threads": {"engine": "threads"},
    "limited": {"bytes_per_s": 1 << 40},
    "memory": {"ram_bytes": 1 << 20},
    "cached": {"cache_dir": "cache"},
    "folder": {},
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_loader_leaves_nothing(way, early, packed, photos, tmp_path):
    options = dict(WAYS[way])
    if "cache_dir" in options:
        options["cache_dir"] = tmp_path / "cache"
    source = photos[0] if way == "folder" else packed
    roots = [source, tmp_path]
    before = descriptors(*roots)

    def use():
        loader = hr.loader(source, 32, **options)
        for _ in range(2):
            for _ in loader:
                if early:
                    break
        assert descriptors(source)
        assert threads() > 1
        return weakref.ref(loader), weakref.ref(loader.source), weakref.ref(loader.reader)

    left = use()
    assert until(lambda: [ref() for ref in left] == [None, None, None])
    assert until(lambda: descriptors(*roots) == before), descriptors(*roots)

    def alive():
        return {t.name for t in threading.enumerate() if t.name.startswith("headrace")}

    assert until(lambda: alive() <= {"headrace-control"}), alive()


@pytest.mark.parametrize("reference", [False, True])
def test_a_dropped_store_leaves_nothing(packed, photos, reference):
    for source in (packed, photos[0]):
        store = open_either(source, reference=reference)
        names = store.names
        assert len(store.read(0)) > 0
        gone = weakref.ref(store)
        del store
        assert names[0]
        assert gone() is not None, "its names need it"
        del names
        assert gone() is None
        assert descriptors(source) == {}


def test_an_error_that_is_let_go_of_leaves_nothing(packed, tmp_path):
    """The traceback holds the loader as long as the error is held, and no longer."""
    copy = Path(shutil.copytree(packed, tmp_path / "copy.hr"))
    offset, _ = extent_of(copy, 123)
    flip_byte(volume_of(copy), offset + 3)
    raised = 0
    try:
        for _ in hr.loader(copy, 32):
            assert descriptors(copy)
    except CorruptSample:
        raised += 1
    assert raised == 1
    assert until(lambda: descriptors(copy) == {})
