"""`headrace cache`: what it lists, and that it removes no more than it may."""

import pytest

import headrace as hr
from headrace.base.files import lock_path
from headrace.plane.disk_cache import CacheDirectory


@pytest.fixture
def cached(packed_photos, tmp_path):
    """A folder with one complete cache."""
    loader = hr.loader(packed_photos, 8, cache_dir=tmp_path, cache_bytes=1 << 30)
    for _ in loader:
        pass
    loader.close()
    return tmp_path


def test_caches_are_listed(run, cached, packed_photos):
    ended = run("cache", "ls", cached)
    assert ended.code == 0
    assert "100%" in ended.out
    assert str(packed_photos) in ended.out
    (cache,) = run("cache", "ls", cached, "--json").document["caches"]
    assert cache["samples"] == cache["of_samples"] == 36
    assert cache["complete"]
    assert not cache["in_use"]


def test_a_cache_is_removed_by_how_its_fingerprint_begins(run, cached):
    (info,) = CacheDirectory(cached).caches()
    refused = run("cache", "rm", cached, "zz")
    assert refused.code == 2
    ended = run("cache", "rm", cached, info.fingerprint[:6], "--json")
    assert ended.document["bytes"] == info.bytes
    assert CacheDirectory(cached).caches() == []
    assert run("cache", "ls", cached).out == ""


def test_a_cache_in_use_stays(run, cached):
    import os

    (info,) = CacheDirectory(cached).caches()
    held = lock_path(cached / info.fingerprint, make=False, shared=True)
    assert run("cache", "rm", cached, info.fingerprint).code == 3
    assert run("cache", "rm", cached, "--all").code == 0
    assert len(CacheDirectory(cached).caches()) == 1
    os.close(held)
    assert run("cache", "rm", cached, "--all").code == 0
    assert CacheDirectory(cached).caches() == []


def test_what_to_remove_must_be_said(run, cached):
    assert run("cache", "rm", cached).code == 2
    assert len(CacheDirectory(cached).caches()) == 1
