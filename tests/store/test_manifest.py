"""`store.json`: saved whole, loaded with suspicion."""

from __future__ import annotations

import json
import random

import pytest

from headrace.errors import CorruptStore, HeadraceError, StoreNotFound
from headrace.store.manifest import (
    FILE_NAME,
    Manifest,
    Segment,
    VolumeEntry,
    _document_crc,
    load_manifest,
)


def example() -> Manifest:
    volumes = (
        VolumeEntry("packed", "segment-0000-0000.hrv", 8192, uuid="1" * 32),
        VolumeEntry("file", "/data/a\udcff.tar", 10_240, mtime_ns=-1),
        VolumeEntry("tree", "/data/photos"),
    )
    segment = Segment("segment-0000.hrd", 8192, "0" * 32, 2, 3, volumes, {"kind": "folder"})
    return Manifest("2" * 32, "3" * 32, (segment,))


def test_a_manifest_survives(tmp_path):
    example().save(tmp_path)
    assert load_manifest(tmp_path) == example()
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE_NAME]


def test_the_bytes_are_as_documented(tmp_path):
    example().save(tmp_path)
    document = json.loads((tmp_path / FILE_NAME).read_bytes())
    stated = document.pop("crc32c")
    assert stated == _document_crc(document)
    assert document["segments"][0]["volumes"][2] == {"kind": "tree", "path": "/data/photos"}
    assert list(document) == sorted(document)


def test_no_manifest_is_no_store(tmp_path):
    with pytest.raises(StoreNotFound, match="no store here"):
        load_manifest(tmp_path)


def test_every_flip_is_detected_or_harmless(tmp_path):
    example().save(tmp_path)
    path = tmp_path / FILE_NAME
    good = path.read_bytes()
    r = random.Random(3)
    detected = harmless = 0
    for offset in range(0, len(good), 3):
        data = bytearray(good)
        data[offset] ^= 1 << r.randrange(8)
        path.write_bytes(data)
        try:
            assert load_manifest(tmp_path) == example()
            harmless += 1
        except HeadraceError:
            detected += 1
    assert detected + harmless == len(range(0, len(good), 3))
    assert detected > harmless


def test_truncation_is_detected(tmp_path):
    example().save(tmp_path)
    path = tmp_path / FILE_NAME
    good = path.read_bytes()
    for size in range(0, len(good) - 1, 13):
        path.write_bytes(good[:size])
        with pytest.raises(CorruptStore):
            load_manifest(tmp_path)


def test_too_large_too_deep_and_odd_json_is_refused(tmp_path, monkeypatch):
    path = tmp_path / FILE_NAME
    for data in (b"[" * 200_000, b"[]", b"null", b"1" * 10_000, b"\xff", b'{"segments": NaN}'):
        path.write_bytes(data)
        with pytest.raises(CorruptStore):
            load_manifest(tmp_path)
    monkeypatch.setattr("headrace.store.manifest.BYTES_MAX", 100)
    path.write_bytes(b"{" + b" " * 200 + b"}")
    with pytest.raises(CorruptStore, match="more than 100"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("format",), "tar"),
        (("version",), 2),
        (("uuid",), "xyz"),
        (("samples",), 3),
        (("segments",), []),
        (("segments",), {}),
        (("segments", 0), 7),
        (("segments", 0, "directory"), "../../etc/passwd"),
        (("segments", 0, "directory"), "/etc/passwd"),
        (("segments", 0, "directory"), ".."),
        (("segments", 0, "extents"), 1),
        (("segments", 0, "samples"), -1),
        (("segments", 0, "samples"), True),
        (("segments", 0, "samples"), 1e3),
        (("segments", 0, "samples"), 1 << 70),
        (("segments", 0, "source"), []),
        (("segments", 0, "volumes"), []),
        (("segments", 0, "volumes", 0, "kind"), "device"),
        (("segments", 0, "volumes", 0, "path"), "../other/segment-0000-0000.hrv"),
        (("segments", 0, "volumes", 0, "path"), "segment-0000.hrd"),
        (("segments", 0, "volumes", 0, "uuid"), None),
        (("segments", 0, "volumes", 1, "path"), ""),
        (("segments", 0, "volumes", 1, "path"), "a\0b"),
        (("segments", 0, "volumes", 1, "mtime_ns"), "yesterday"),
    ],
)
def test_a_lying_manifest_with_a_right_checksum_is_refused(tmp_path, where, value):
    document = json.loads(example().to_bytes())
    del document["crc32c"]
    at = document
    for key in where[:-1]:
        at = at[key]
    assert at[where[-1]] != value or value is True
    at[where[-1]] = value
    document["crc32c"] = _document_crc(document)
    (tmp_path / FILE_NAME).write_text(json.dumps(document))
    with pytest.raises(CorruptStore, match=r"store\.json"):
        load_manifest(tmp_path)
