"""Hopping through shards: the places are those that a whole listing finds, also when the time ends it."""

import io
import struct
import tarfile
import time

import numpy as np
import pytest

from headrace.base.checksum import crc32c
from headrace.errors import SourceError
from headrace.insight.doctor.samples import hop
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


def test_records_lie_where_a_listing_finds_them(tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord", [bytes(n) for n in sizes(50)])
    hops = hop(str(path), "tfrecord", time.monotonic() + LATER)
    scan = open_source([str(path)], SourceOptions())
    listed = list(zip(scan.columns.offset.tolist(), scan.columns.length.tolist(), strict=True))
    assert hops.places == listed
    assert (len(hops.places), hops.complete, hops.seen_bytes) == (50, True, path.stat().st_size)


def test_samples_of_a_tar_are_its_keys_largest_parts(tmp_path):
    members = []
    for i, size in enumerate(sizes(40)):
        members += [(f"train/{i:04d}.cls", b"7"), (f"train/{i:04d}.jpg", bytes(size + 1))]
    path = write_tar(tmp_path / "a.tar", members)
    hops = hop(str(path), "tar", time.monotonic() + LATER)
    assert (len(hops.places), hops.complete, hops.suffix) == (40, True, ".jpg")
    scan = open_source([str(path)], SourceOptions())
    listed = set(zip(scan.columns.offset.tolist(), scan.columns.length.tolist(), strict=True))
    assert set(hops.places) <= listed
    assert [length for _, length in hops.places] == [size + 1 for size in sizes(40)]


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_a_shard_is_left_when_the_time_is_over(tmp_path, kind):
    if kind == "tar":
        path = write_tar(tmp_path / "a.tar", [(f"{i}.jpg", b"x" * 10) for i in range(50)])
        hops = hop(str(path), "tar", time.monotonic() - 1)
    else:
        path = write_tfrecord(tmp_path / "a.tfrecord", [b"x" * 10] * 50)
        hops = hop(str(path), "tfrecord", time.monotonic() - 1)
    assert not hops.complete
    assert len(hops.places) < 50


def test_damaged_shards_are_told(tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord", [b"x" * 100] * 3)
    data = bytearray(path.read_bytes())
    data[116] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="offset 116"):
        hop(str(path), "tfrecord", time.monotonic() + LATER)
    path.write_bytes(
        struct.pack("<Q", 1 << 50) + struct.pack("<I", mask(crc32c(struct.pack("<Q", 1 << 50))))
    )
    with pytest.raises(SourceError, match="at most the file's size"):
        hop(str(path), "tfrecord", time.monotonic() + LATER)
    (tmp_path / "b.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(SourceError, match="checksum of a member's header"):
        hop(str(tmp_path / "b.tar"), "tar", time.monotonic() + LATER)
