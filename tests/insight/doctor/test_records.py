"""Hopping through shards: the places are those that a whole listing finds, also when the time ends it."""

import io
import struct
import tarfile

import numpy as np
import pytest

from headrace.base.checksum import crc32c
from headrace.errors import SourceError
from headrace.insight.doctor.survey import survey
from headrace.store.sources.detect import open_source
from headrace.store.sources.scan import SourceOptions
from headrace.store.sources.tfrecord import mask

LATER = 60.0


def write_tfrecord(path, records):
    with path.open("wb") as out:
        for data in records:
            length = struct.pack("<Q", len(data))
            out.write(length + struct.pack("<I", mask(crc32c(length))))
            out.write(data + struct.pack("<I", mask(crc32c(data))))
    return path


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sizes(count):
    return np.random.default_rng(0).integers(1, 5000, count).tolist()


def places_of(path, seconds=LATER):
    """The data set of a shard, its samples by place, and how many are its own by a whole listing."""
    data, pool = survey(str(path), seconds)
    columns = open_source([str(path)], SourceOptions()).columns
    listed = set(zip(columns.offset.tolist(), columns.length.tolist(), strict=True))
    return data, sorted((p.offset, p.length) for p in pool.pieces), listed


def test_records_lie_where_a_listing_finds_them(tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord", [bytes(n) for n in sizes(50)])
    data, places, listed = places_of(path)
    assert places == sorted(listed)
    assert (data.samples, data.exact) == (50, True)


def test_samples_of_a_tar_are_its_keys_largest_parts(tmp_path):
    members = []
    for i, size in enumerate(sizes(40)):
        members += [(f"train/{i:04d}.cls", b"7"), (f"train/{i:04d}.jpg", bytes(size + 1))]
    data, places, listed = places_of(write_tar(tmp_path / "a.tar", members))
    assert (data.samples, data.exact, data.format) == (40, True, "jpeg in tar")
    assert set(places) <= listed
    assert [length for _, length in places] == [size + 1 for size in sizes(40)]


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_a_shard_is_left_when_the_time_is_over(tmp_path, kind):
    if kind == "tar":
        path = write_tar(tmp_path / "a.tar", [(f"{i}.jpg", b"x" * 10) for i in range(20_000)])
    else:
        path = write_tfrecord(tmp_path / "a.tfrecord", [b"x" * 10] * 50_000)
    data, _, listed = places_of(path, 0.01)
    assert not data.exact
    assert data.samples == pytest.approx(len(listed), rel=0.1)


def test_damaged_shards_are_told(tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord", [b"x" * 100] * 3)
    data = bytearray(path.read_bytes())
    data[116] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="offset 116"):
        survey(str(path), LATER)
    (tmp_path / "b.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(SourceError, match="checksum of a member's header"):
        survey(str(tmp_path / "b.tar"), LATER)
