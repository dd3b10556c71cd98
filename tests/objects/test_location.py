"""URLs taken apart and put together."""

from __future__ import annotations

import pytest

from headrace.io.objects.location import (
    base_name,
    expand_numbers,
    is_url,
    join,
    key_of,
    literal_folder,
    local_path,
    matches,
    root_of,
    shown,
)


def test_urls_are_told_from_paths() -> None:
    for url in ("s3://b/k", "gs://b", "http://h/x", "memory://x", "simplecache::s3://b/k"):
        assert is_url(url)
    for path in ("/data/x", "x.hr", "C:x", "a:b", "file:///data/x", b"s3://b", 7):
        assert not is_url(path)


def test_a_file_url_is_a_local_path() -> None:
    assert local_path("file:///data/x.hr") == "/data/x.hr"
    assert local_path("s3://b/x") == "s3://b/x"


def test_keys_are_taken_as_they_stand() -> None:
    url = "s3://bucket/a b/#1?/100%.bin"
    assert root_of(url) == "s3://bucket"
    assert key_of(url) == "a b/#1?/100%.bin"
    assert base_name(url) == "100%.bin"


def test_a_query_stays_at_the_end_and_is_never_shown() -> None:
    url = "https://user:pw@host/store.hr/?sig=secret"
    assert join(url, "store.json") == "https://user:pw@host/store.hr/store.json?sig=secret"
    assert shown(url) == "https://host/store.hr/"
    assert base_name("https://host/a.tar?sig=a/b") == "a.tar"


def test_joining_below_a_bucket_or_a_folder() -> None:
    assert join("s3://b/x/", "y") == "s3://b/x/y"
    assert join("/data/x", "y") == "/data/x/y"


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("s3://b/*.tar", "s3://b/1.tar", "s3://b/a/1.tar"),
        ("s3://b/**.tar", "s3://b/a/1.tar", "s3://b/a/1.tgz"),
        ("s3://b/?.tar", "s3://b/1.tar", "s3://b/10.tar"),
        ("s3://b/[0-1].tar", "s3://b/1.tar", "s3://b/2.tar"),
        ("s3://b/[!0-1].tar", "s3://b/2.tar", "s3://b/1.tar"),
        ("s3://b/a.b*", "s3://b/a.bc", "s3://b/axbc"),
    ],
)
def test_patterns(pattern: str, yes: str, no: str) -> None:
    assert matches(pattern).match(yes)
    assert not matches(pattern).match(no)


def test_only_the_folder_before_the_pattern_is_listed() -> None:
    assert literal_folder("s3://b/a/x*/y") == "s3://b/a"


def test_numbers_in_braces_are_counted_with_their_zeros() -> None:
    assert expand_numbers("s-{008..010}.tar") == ["s-008.tar", "s-009.tar", "s-010.tar"]
    assert len(expand_numbers("{0..2}/{0..3}")) == 12
    assert expand_numbers("plain") == ["plain"]


def test_numbers_that_would_fill_the_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        expand_numbers("{5..1}")
    with pytest.raises(ValueError, match="names"):
        expand_numbers("{0..99999999999}")
