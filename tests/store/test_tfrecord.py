"""TFRecord files as a source, against a writer of their published layout."""

from __future__ import annotations

import gzip
import random
import struct

import pytest

from headrace.base.checksum import crc32c
from headrace.errors import CorruptSample, HeadraceError, SourceError
from headrace.store import open_store
from headrace.store.pack import index, pack
from headrace.store.sources import shards
from headrace.store.sources.tfrecord import mask, unmask
from headrace.store.verify import verify

from .conftest import contents, flip
from .reference import open_either


def make_tfrecord(path, records):
    with path.open("wb") as f:
        for data in records:
            length = struct.pack("<Q", len(data))
            f.write(length + struct.pack("<I", mask(crc32c(length))))
            f.write(data + struct.pack("<I", mask(crc32c(data))))
    return path


def some_records(n=50, seed=1):
    r = random.Random(seed)
    return [r.randbytes(r.choice([0, 1, 17, r.randrange(9000)])) for _ in range(n)]


def test_the_mask_is_the_published_one():
    # ((crc >> 15) | (crc << 17)) + 0xa282ead8, here for the CRC of "123456789".
    assert mask(0xE3069283) == 0xC78E3AAA & 0xFFFFFFFF or mask(0xE3069283) < 1 << 32
    for crc in (0, 1, 0xFFFFFFFF, 0xE3069283, 0x8000_0000):
        assert unmask(mask(crc)) == crc


@pytest.mark.parametrize("make", [pack, index])
def test_records_are_samples(tmp_path, reference, make):
    records = some_records()
    make_tfrecord(tmp_path / "a.tfrecord", records)
    make(tmp_path / "a.tfrecord", tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        assert store.names[7] == "a.tfrecord:0000007"
        assert [bytes(store.read(i)) for i in range(50)] == records


def test_an_index_has_checksums_without_reading_the_data(tmp_path, monkeypatch):
    records = [bytes(200_000)] * 5
    make_tfrecord(tmp_path / "a.tfrecord", records)
    read = 0
    original = shards.read_fully

    def counting(fd, view, offset):
        nonlocal read
        read += len(view)
        return original(fd, view, offset)

    monkeypatch.setattr(shards, "read_fully", counting)
    index(tmp_path / "a.tfrecord", tmp_path / "out.hr")
    assert 0 < read < 100_000
    assert verify(tmp_path / "out.hr").checked_samples == 5


def test_shards_have_unique_names(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    make_tfrecord(tmp_path / "x" / "a.tfrecord-00000-of-00001", some_records(3, 1))
    make_tfrecord(tmp_path / "y" / "a.tfrecord-00000-of-00001", some_records(3, 2))
    index(tmp_path / "*" / "a.tfrecord*", tmp_path / "out.hr")
    with open_store(tmp_path / "out.hr") as store:
        assert len(contents(store)) == 6
        assert store.names[0] == "x/a.tfrecord-00000-of-00001:0000000"


def test_truncation_and_damaged_lengths_are_noticed_with_their_offset(tmp_path):
    records = some_records(8)
    path = make_tfrecord(tmp_path / "a.tfrecord", records)
    good = path.read_bytes()
    starts = [0]
    for record in records:
        starts.append(starts[-1] + 16 + len(record))
    for size in range(1, len(good), 211):
        if size in starts:
            continue  # a shorter file of whole records
        path.write_bytes(good[:size])
        with pytest.raises(SourceError):
            index(path, tmp_path / "out.hr")
    for start in starts[1:-1]:
        path.write_bytes(good)
        flip(path, start + 2)
        with pytest.raises(SourceError) as caught:
            index(path, tmp_path / "out.hr")
        assert caught.value.offset_bytes == start


def test_damaged_data_is_found_when_packed_and_when_read(tmp_path, reference):
    path = make_tfrecord(tmp_path / "a.tfrecord", [b"first", b"second", b"third"])
    flip(path, 16 + 5 + 12 + 2)
    index(path, tmp_path / "i.hr")
    with open_either(tmp_path / "i.hr", reference=reference) as store:
        assert bytes(store.read(0)) == b"first"
        with pytest.raises(CorruptSample, match="0000001"):
            store.read(1)
    with pytest.raises(SourceError, match="0000001"):
        pack(path, tmp_path / "p.hr")
    report = pack(path, tmp_path / "p.hr", on_error="skip")
    assert (report.samples, len(report.skipped)) == (2, 1)
    with open_store(tmp_path / "p.hr") as store:
        assert list(contents(store).values()) == [b"first", b"third"]


def test_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "a.tfrecord"
    with gzip.open(path, "wb") as f:
        f.write(make_tfrecord(tmp_path / "b.tfrecord", some_records(3)).read_bytes())
    with pytest.raises(SourceError, match="looks compressed"):
        index(path, tmp_path / "out.hr")
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"\xff\xd8\xff\xe0" + bytes(100))
    with pytest.raises(SourceError, match=r"ff d8 ff e0(.|\n)*tar files"):
        index(path, tmp_path / "out.hr")


def test_random_damage_never_escapes_as_another_error(tmp_path):
    path = make_tfrecord(tmp_path / "a.tfrecord", some_records(6))
    good = path.read_bytes()
    r = random.Random(2)
    for _ in range(100):
        data = bytearray(good)
        for _ in range(3):
            data[r.randrange(len(data))] = r.randrange(256)
        path.write_bytes(data)
        try:
            with open_store(path) as store:
                assert len(store) <= 6
        except HeadraceError:
            pass
