"""Tar files as a source: WebDataset's grouping, every dialect of names, every kind of damage."""

from __future__ import annotations

import gzip
import io
import os
import tarfile

import pytest

from headrace.errors import HeadraceError, SourceError
from headrace.store import open_store
from headrace.store.pack import index, pack
from headrace.store.repair import repair
from headrace.store.verify import verify

from .conftest import COMPRESSIONS, compress, flip
from .reference import open_either


def make_tar(path, members, fmt=tarfile.GNU_FORMAT, mode="w"):
    with tarfile.open(path, mode, format=fmt) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def dataset(n=30, first=0):
    for i in range(first, first + n):
        yield f"cats/{i:04d}.jpg", os.urandom(100 + i * 37 % 3000)
        yield f"cats/{i:04d}.cls", str(i % 7).encode()
        if i % 3 == 0:
            yield f"cats/{i:04d}.seg.png", b"mask %d" % i


def check(store, members):
    members = dict(members)
    for name, data in members.items():
        folder, base = name.rsplit("/", 1)
        key, part = base.split(".", 1)
        assert bytes(store.read(f"{folder}/{key}", part=part)) == data
    assert sum(len(store.parts_of(i)) for i in range(len(store))) == len(members)


@pytest.mark.parametrize("make", [pack, index])
@pytest.mark.parametrize(
    "fmt",
    [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT],
    ids=["gnu", "pax", "ustar"],
)
def test_members_of_one_key_are_one_sample(tmp_path, reference, make, fmt):
    members = list(dataset())
    make_tar(tmp_path / "a.tar", members, fmt)
    make(tmp_path / "a.tar", tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        assert len(store) == 30
        assert store.parts == ["cls", "jpg", "seg.png"]
        assert store.labels.tolist() == [i % 7 for i in range(30)]
        check(store, members)
        assert store.parts_of(1).keys() == {"cls", "jpg"}
        with pytest.raises(ValueError, match="has the parts"):
            store.read(0)
    assert verify(tmp_path / "out.hr").ok


def test_a_tar_opens_directly(tmp_path, reference):
    members = list(dataset())
    make_tar(tmp_path / "a.tar", members)
    with open_either(tmp_path / "a.tar", reference=reference) as store:
        check(store, members)


@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_long_and_odd_names(tmp_path, fmt):
    members = [
        ("d/" + "long" * 100 + ".jpg", b"1"),
        ("./e/x.jpg", b"2"),
        ("/abs/y.jpg", b"3"),
        ("f/ä\udcff.jpg", b"4"),
        ("noext", b"5"),
    ]
    with tarfile.open(
        tmp_path / "a.tar", "w", format=fmt, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    index(tmp_path / "a.tar", tmp_path / "out.hr")
    with open_store(tmp_path / "out.hr") as store:
        assert bytes(store.read("d/" + "long" * 100, part="jpg")) == b"1"
        assert bytes(store.read("e/x", part="jpg")) == b"2"
        assert bytes(store.read("abs/y", part="jpg")) == b"3"
        assert bytes(store.read("f/ä\udcff", part="jpg")) == b"4"
        assert bytes(store.read("noext")) == b"5"


def test_a_tar_is_one_whatever_its_first_member_is(tmp_path):
    make_tar(tmp_path / "shard", [("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(600))])
    with open_store(tmp_path / "shard") as store:
        assert bytes(store.read("a")) == b"\x89HDF\r\n\x1a\n" + bytes(600)


def test_ustar_prefix(tmp_path):
    name = "p" * 80 + "/" + "q" * 60 + "/x.bin"
    make_tar(tmp_path / "a.tar", [(name, b"data")], tarfile.USTAR_FORMAT)
    with open_store(tmp_path / "a.tar") as store:
        assert store.names[0] == name.removesuffix(".bin")


def test_folders_and_hidden_members_are_left_out(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        folder = tarfile.TarInfo("cats")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in ("cats/.DS_Store", "cats/1.jpg"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with open_store(tmp_path / "a.tar") as store:
        assert list(store.names) == ["cats/1"]


def test_shards_are_one_store(tmp_path, reference):
    for s in range(4):
        make_tar(tmp_path / f"shard-{s}.tar", dataset(10, s * 10))
    members = [m for s in range(4) for m in dataset(10, s * 10)]
    index(tmp_path / "shard-*.tar", tmp_path / "glob.hr")
    index([tmp_path / f"shard-{s}.tar" for s in range(4)], tmp_path / "list.hr")
    for name in ("glob.hr", "list.hr"):
        with open_either(tmp_path / name, reference=reference) as store:
            assert len(store) == 40
            assert list(store.names) == [f"cats/{i:04d}" for i in range(40)]
            labels = {n: d for n, d in members if n.endswith("cls")}
            assert [int(bytes(store.read(i, part="cls"))) for i in range(40)] == [
                int(v) for v in labels.values()
            ]


def test_a_key_in_two_shards_is_an_error_that_names_both(tmp_path):
    make_tar(tmp_path / "a.tar", dataset(5))
    make_tar(tmp_path / "b.tar", dataset(5, 4))
    with pytest.raises(SourceError, match=r"(?s)b\.tar.*cats/0004.*a\.tar.*prefix_names"):
        index([tmp_path / "a.tar", tmp_path / "b.tar"], tmp_path / "out.hr")
    index([tmp_path / "a.tar", tmp_path / "b.tar"], tmp_path / "out.hr", prefix_names=True)
    with open_store(tmp_path / "out.hr") as store:
        assert len(store) == 10
        assert store.names[4:6] == ["a.tar/cats/0004", "b.tar/cats/0004"]


def test_members_of_a_sample_must_be_adjacent_and_unique(tmp_path):
    make_tar(tmp_path / "a.tar", [("1.jpg", b"x"), ("2.jpg", b"y"), ("1.cls", b"0")])
    with pytest.raises(SourceError, match="side by side"):
        index(tmp_path / "a.tar", tmp_path / "out.hr")
    make_tar(tmp_path / "a.tar", [("1.jpg", b"x"), ("1.jpg", b"y")])
    with pytest.raises(SourceError, match="'jpg' twice"):
        index(tmp_path / "a.tar", tmp_path / "out.hr")


def test_links_and_sparse_members_are_refused_or_skipped(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("ok.jpg"), io.BytesIO())
        for name, kind in (("hard", tarfile.LNKTYPE), ("soft", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "ok.jpg"
            tar.addfile(info)
        info = tarfile.TarInfo("sparse.bin")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        tar.addfile(info, io.BytesIO())
    with pytest.raises(SourceError, match=r"(?s)3 things.*hard link.*symbolic link.*sparse"):
        index(tmp_path / "a.tar", tmp_path / "out.hr")
    report = index(tmp_path / "a.tar", tmp_path / "out.hr", on_error="skip")
    assert (report.samples, len(report.skipped)) == (1, 3)


def test_every_truncation_is_noticed(tmp_path):
    path = make_tar(tmp_path / "a.tar", dataset(6))
    good = path.read_bytes()
    with tarfile.open(path) as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    for size in [*range(1, end, 997), end]:
        path.write_bytes(good[:size])
        with pytest.raises(SourceError) as caught:
            index(path, tmp_path / "out.hr")
        assert caught.value.path == str(path)
    path.write_bytes(b"")
    with pytest.raises(SourceError):
        index(path, tmp_path / "out.hr")


def test_a_flip_in_a_header_is_noticed_with_its_offset(tmp_path):
    path = make_tar(tmp_path / "a.tar", dataset(6))
    with tarfile.open(path) as tar:
        offsets = [m.offset for m in tar]
    good = path.read_bytes()
    for offset in offsets:
        flip(path, offset + 3)
        with pytest.raises(SourceError) as caught:
            index(path, tmp_path / "out.hr")
        assert caught.value.offset_bytes == offset
        path.write_bytes(good)


def test_random_damage_never_escapes_as_another_error(tmp_path):
    import random

    path = make_tar(tmp_path / "a.tar", dataset(4), tarfile.PAX_FORMAT)
    good = path.read_bytes()
    r = random.Random(1)
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        for _ in range(r.randrange(1, 4)):
            data[r.randrange(len(data))] = r.randrange(256)
        path.write_bytes(data)
        try:
            open_store(path).close()
        except HeadraceError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize("end", COMPRESSIONS)
def test_compressed_tars_are_packed_but_not_indexed(tmp_path, end):
    members = list(dataset())
    path = tmp_path / f"a.tar.{end}"
    plain = make_tar(tmp_path / "a.tar", members)
    path.write_bytes(compress(end, plain.read_bytes()))
    with pytest.raises(SourceError, match="front to back"):
        index(path, tmp_path / "i.hr")
    with pytest.raises(HeadraceError, match="front to back"):
        open_store(path)
    pack(path, tmp_path / "out.hr")
    with open_store(tmp_path / "out.hr") as store:
        check(store, members)
        assert store.labels.tolist() == [i % 7 for i in range(30)]
    assert pack([path, plain], tmp_path / "both.hr", prefix_names=True).samples == 60
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SourceError, match="no sound compressed file: it ends too early"):
        pack(path, tmp_path / "out2.hr")


def test_a_damaged_compressed_tar_loses_no_member_in_silence(tmp_path):
    path = tmp_path / "a.tar.gz"
    good = make_tar(
        tmp_path / "a.tar", [(f"{i:02}.bin", bytes([i]) * 600) for i in range(30)]
    ).read_bytes()
    member = 512 + 1024
    flipped = bytearray(good)
    flipped[10 * member + 150] ^= 255  # the header's checksum
    stored = bytearray(gzip.compress(good, 0))
    stored[10 * member + 1000] ^= 1  # a byte of a member
    cases = {
        "a header is none": gzip.compress(flipped),
        "header is none: empty": gzip.compress(good[: 10 * member]),
        "unexpected end": gzip.compress(good[: 10 * member + 600]),
        "incorrect data check": stored,
    }
    for message, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(SourceError, match=message):
            pack(path, tmp_path / "out.hr", resume=False)


def test_a_packed_tar_is_repaired_from_its_shards(tmp_path):
    members = list(dataset())
    make_tar(tmp_path / "a.tar", members)
    pack(tmp_path / "a.tar", tmp_path / "out.hr")
    flip(tmp_path / "out.hr" / "segment-0000-0000.hrv", 5000)
    assert len(verify(tmp_path / "out.hr").bad_samples) == 1
    assert len(repair(tmp_path / "out.hr").repaired) == 1
    assert verify(tmp_path / "out.hr").ok


def test_an_indexed_tar_that_changed_is_noticed(tmp_path, reference):
    path = make_tar(tmp_path / "a.tar", dataset())
    index(path, tmp_path / "out.hr")
    status = path.stat()
    # Touched: noticed when the store is opened.
    os.utime(path, ns=(1, 1))
    with pytest.raises(HeadraceError, match="modification time"):
        open_either(tmp_path / "out.hr", reference=reference)
    # Changed behind the clock's back: noticed by the checksum.
    flip(path, 600)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with (
        open_either(tmp_path / "out.hr", reference=reference) as store,
        pytest.raises(HeadraceError, match="checksum"),
    ):
        store.read(0, part="jpg")
    bad = verify(tmp_path / "out.hr").bad_samples
    assert [(b.name, b.path, b.kind) for b in bad] == [("cats/0000", str(path), "checksum")]
    report = repair(tmp_path / "out.hr")
    assert "never writes" in report.unrepairable[0][1]
