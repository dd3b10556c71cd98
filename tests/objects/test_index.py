"""Indexing shards where they lie in an object store."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.base.checksum import crc32c
from headrace.errors import CorruptSample, SourceChanged, SourceError
from headrace.io.objects.listing import expand, list_objects, remove, write
from headrace.store.sources.tfrecord import mask

if TYPE_CHECKING:
    from pathlib import Path

    from objects.faulty_proxy import FaultyProxy


def tar_of(names: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def tfrecord_of(records: list[bytes]) -> bytes:
    out = b""
    for record in records:
        length = struct.pack("<Q", len(record))
        out += length + struct.pack("<I", mask(crc32c(length))) + record
        out += struct.pack("<I", mask(crc32c(record)))
    return out


def content(i: int, size: int = 3000) -> bytes:
    return hashlib.shake_128(str(i).encode()).digest(size)


@pytest.fixture
def shards(bucket: str, direct: dict[str, Any]) -> str:
    """The pattern of three tar shards of 40 samples of two parts each."""
    for k in range(3):
        names = {}
        for i in range(40):
            names[f"{k}/{i:03d}.jpg"] = content(40 * k + i)
            names[f"{k}/{i:03d}.cls"] = str(i % 4).encode()
        write(tar_of(names), f"{bucket}/shards of tar/{k}.tar", direct, create=True)
    return f"{bucket}/shards of tar/*.tar"


def test_tar_shards_are_indexed_and_read_in_place(
    shards: str, options: dict[str, Any], tmp_path: Path, proxy: FaultyProxy
) -> None:
    report = hr.index(shards, tmp_path / "i.hr", storage_options=options)
    assert report.samples == 120
    # For each shard: its head, the scan, the checksums.
    assert len(proxy.gets(".tar")) == 9
    with hr.open(tmp_path / "i.hr", storage_options=options) as store:
        for i in (0, 41, 119):
            assert bytes(store.read(f"{i // 40}/{i % 40:03d}", part="jpg")) == content(i)
        assert store.labels is not None
        assert store.labels[41] == 1
        assert hr.verify(tmp_path / "i.hr", storage_options=options).ok


def test_a_prefix_of_shards_is_what_is_in_them(
    shards: str, direct: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    prefix = shards.removesuffix("*.tar")
    write(b"shards", f"{prefix}README.md", direct, create=True)
    report = hr.index(prefix, tmp_path / "i.hr", storage_options=options)
    assert (report.samples, report.kind) == (120, "3 tar files")
    assert report.notes == ["left out, as they are no samples: README.md"]


def test_a_prefix_of_pictures_is_a_folder_of_them(
    bucket: str, direct: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    for i in range(6):
        write(content(i), f"{bucket}/pets/{'cd'[i % 2]}/{i}.jpg", direct, create=True)
    write(b"{}", f"{bucket}/pets/c/.hidden.jpg", direct, create=True)
    report = hr.index(f"{bucket}/pets/", tmp_path / "i.hr", storage_options=options)
    assert report.samples == 6
    with (
        hr.open(tmp_path / "i.hr", storage_options=options) as store,
        hr.open(f"{bucket}/pets/", storage_options=options) as opened,
    ):
        for each in (store, opened):
            assert bytes(each.read("d/3.jpg")) == content(3)
            assert each.classes == ["c", "d"]
        assert hr.verify(tmp_path / "i.hr", storage_options=options).ok
    assert hr.pack(f"{bucket}/pets/", tmp_path / "p.hr", storage_options=options).samples == 6
    write(b"x", f"{bucket}/pets/more.tar", direct, create=True)
    with pytest.raises(SourceError, match="several kinds"):
        hr.index(f"{bucket}/pets/", tmp_path / "o.hr", storage_options=options)
    with pytest.raises(SourceError, match="there are no objects"):
        hr.index(f"{bucket}/nothing/", tmp_path / "o.hr", storage_options=options)


def test_an_index_may_itself_stand_in_the_object_store(
    shards: str, bucket: str, options: dict[str, Any], tmp_path: Path
) -> None:
    hr.index(shards, f"{bucket}/i.hr", storage_options=options)
    hr.index(shards, tmp_path / "i.hr", storage_options=options)
    with (
        hr.open(f"{bucket}/i.hr", storage_options=options) as remote,
        hr.open(tmp_path / "i.hr", storage_options=options) as local,
    ):
        assert remote.fingerprint == local.fingerprint
        assert bytes(remote.read("2/039", part="jpg")) == content(119)
        again = pickle.loads(pickle.dumps(remote))
        assert bytes(again.read("0/000", part="jpg")) == content(0)
        again.close()


def test_the_fingerprint_is_that_of_the_same_shards_on_disk(
    shards: str, options: dict[str, Any], direct: dict[str, Any], tmp_path: Path
) -> None:
    from headrace.io.objects.engine import ObjectEngine

    engine = ObjectEngine(direct)
    for each in list_objects(shards.rpartition("/")[0], direct):
        data = bytearray(each.size)
        engine.fetch(each.url, 0, memoryview(data))
        (tmp_path / each.url.rpartition("/")[2]).write_bytes(data)
    engine.close()
    hr.index(str(tmp_path / "*.tar"), tmp_path / "disk.hr")
    hr.index(shards, tmp_path / "objects.hr", storage_options=options)
    with (
        hr.open(tmp_path / "disk.hr") as disk,
        hr.open(tmp_path / "objects.hr", storage_options=options) as objects,
    ):
        assert disk.fingerprint == objects.fingerprint


def test_shards_are_opened_without_an_index(shards: str, options: dict[str, Any]) -> None:
    numbered = shards.replace("*", "{0..2}")
    with hr.open(numbered, storage_options=options) as store:
        assert len(store) == 120
        assert bytes(store.read("1/000", part="jpg")) == content(40)
        again = pickle.loads(pickle.dumps(store))
        assert again.fingerprint == store.fingerprint
        again.close()


def test_members_far_apart_are_not_read_through(
    bucket: str, options: dict[str, Any], direct: dict[str, Any], tmp_path: Path,
    proxy: FaultyProxy,
) -> None:  # fmt: skip
    names = {f"{i}.bin": bytes([i]) * (9 << 20) for i in range(3)}
    write(tar_of(names), f"{bucket}/large.tar", direct, create=True)
    hr.index(f"{bucket}/large.tar", tmp_path / "i.hr", storage_options=options, checksum=False)
    asked = sum(
        int(b) - int(a) + 1
        for a, b in (r.removeprefix("bytes=").split("-") for _, r in proxy.gets("large.tar"))
    )
    assert asked < 20 << 20
    with hr.open(tmp_path / "i.hr", storage_options=options) as store:
        assert bytes(store.read("2", 0, 10)) == bytes([2]) * 10


def test_tfrecord_objects_bring_their_checksums(
    bucket: str, options: dict[str, Any], direct: dict[str, Any], tmp_path: Path
) -> None:
    data = tfrecord_of([content(i, 100 + i) for i in range(50)])
    write(data, f"{bucket}/a.tfrecord", direct, create=True)
    hr.index(f"{bucket}/a.tfrecord", tmp_path / "i.hr", storage_options=options)
    with hr.open(tmp_path / "i.hr", storage_options=options) as store:
        assert bytes(store.read(49)) == content(49, 149)
        assert store.segments[0].directory.has_crc


def test_parquet_objects_are_indexed_in_place(
    bucket: str, options: dict[str, Any], direct: dict[str, Any], tmp_path: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"image": [content(i, 200) for i in range(30)], "label": list(range(30))})
    parquet.write_table(table, tmp_path / "t.parquet", compression="NONE", use_dictionary=False)
    write((tmp_path / "t.parquet").read_bytes(), f"{bucket}/t.parquet", direct, create=True)
    hr.index(f"{bucket}/t.parquet", tmp_path / "i.hr", column="image", storage_options=options)
    with hr.open(tmp_path / "i.hr", storage_options=options) as store:
        assert bytes(store.read(17)) == content(17, 200)


def test_packing_from_an_object_store_to_disk(
    shards: str, options: dict[str, Any], tmp_path: Path
) -> None:
    hr.pack(shards, tmp_path / "p.hr", storage_options=options)
    with hr.open(tmp_path / "p.hr") as store:
        assert bytes(store.read("2/001", part="jpg")) == content(81)
        names = list(store.names)
    # Through a copy: a request for each sample would cost more than reading all of it front to back.
    hr.pack(shards, tmp_path / "s.hr", storage_options=options, shuffle=3)
    with hr.open(tmp_path / "s.hr") as store:
        assert list(store.names) != names
        assert sorted(store.names) == sorted(names)
        assert bytes(store.read("2/001", part="jpg")) == content(81)


def test_a_shard_that_was_replaced_is_never_read(
    shards: str, bucket: str, options: dict[str, Any], direct: dict[str, Any], tmp_path: Path
) -> None:
    hr.index(shards, tmp_path / "i.hr", storage_options=options)
    with hr.open(tmp_path / "i.hr", storage_options=options) as store:
        size = store.segments[0].entry.volumes[1].bytes or 0
        write(bytes(size), f"{bucket}/shards of tar/1.tar", direct, create=False)
        with pytest.raises(SourceChanged):
            store.read("1/000", part="jpg")
    with pytest.raises(SourceChanged, match=r"1\.tar"):
        hr.open(tmp_path / "i.hr", storage_options=options)


def test_a_shard_that_vanishes_is_named(
    shards: str, bucket: str, options: dict[str, Any], direct: dict[str, Any], tmp_path: Path
) -> None:
    hr.index(shards, tmp_path / "i.hr", storage_options=options)
    remove([f"{bucket}/shards of tar/2.tar"], direct)
    with pytest.raises(SourceChanged, match=r"2\.tar.*status 404"):
        hr.open(tmp_path / "i.hr", storage_options=options)


def test_a_shard_that_changes_while_it_is_indexed_is_an_error(
    shards: str, options: dict[str, Any], tmp_path: Path, proxy: FaultyProxy
) -> None:
    proxy.inject("wrong_etag", pattern=r"1\.tar", skip=1)
    with pytest.raises(SourceChanged, match=r"1\.tar"):
        hr.index(shards, tmp_path / "i.hr", storage_options=options)
    assert proxy.injected == {"wrong_etag": 1}
    assert list(tmp_path.iterdir()) == []


def test_faults_while_indexing_cost_time_only(
    shards: str, options: dict[str, Any], tmp_path: Path, proxy: FaultyProxy
) -> None:
    for fault in ("status", "reset", "truncate"):
        proxy.inject(fault, pattern=r"\.tar", times=2)
    hr.index(shards, tmp_path / "i.hr", storage_options=options)
    assert sum(proxy.injected.values()) == 6
    assert hr.verify(tmp_path / "i.hr", storage_options=options).ok


def test_wrong_bytes_after_indexing_are_detected(
    shards: str, options: dict[str, Any], tmp_path: Path, proxy: FaultyProxy
) -> None:
    hr.index(shards, tmp_path / "i.hr", storage_options=options)
    with hr.open(tmp_path / "i.hr", storage_options=options) as store:
        proxy.inject("wrong_bytes")
        with pytest.raises(CorruptSample):
            store.read("0/005", part="jpg")
    assert proxy.injected == {"wrong_bytes": 1}


def test_more_keys_than_a_page_of_the_listing_holds(
    bucket: str, direct: dict[str, Any], options: dict[str, Any], proxy: FaultyProxy
) -> None:
    import obstore

    from headrace.io.objects.clients import make_client

    client = make_client(bucket, direct)
    for i in range(55):
        obstore.put(client, f"many/{i:04d}.tar", b"", use_multipart=False)
    found = expand(f"{bucket}/many/*.tar", {k: v for k, v in options.items() if k[-2:] != "_s"})
    assert found == [f"{bucket}/many/{i:04d}.tar" for i in range(55)]
    assert len([1 for line, _ in proxy.requests if "list-type=2" in line]) == 2


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.tar", b"", "x.tar"),
        ("x.tar", b"\x1f\x8b" + bytes(600), "compressed"),
        ("x.npy", b"\x93NUMPY" + bytes(200), "cannot be read where it lies"),
        ("x.bin", bytes(1000), "begins with"),
    ],
)
def test_what_cannot_be_read_in_place_is_said(
    name: str, data: bytes, said: str, bucket: str, options: dict[str, Any],
    direct: dict[str, Any], tmp_path: Path,
) -> None:  # fmt: skip
    write(data, f"{bucket}/{name}", direct, create=True)
    with pytest.raises(SourceError, match=said):
        hr.index(f"{bucket}/{name}", tmp_path / "i.hr", storage_options=options)


def test_empty_objects_are_left_out_and_said(
    bucket: str, direct: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    line = b'{"text": "a"}\r\n'
    for name, data in {"0": b"", "1": line, "2": line * 2}.items():
        write(data, f"{bucket}/lines/{name}.jsonl", direct, create=True)
    for source in (f"{bucket}/lines/", f"{bucket}/lines/*.jsonl"):
        report = hr.pack(source, tmp_path / "a.hr", storage_options=options, overwrite=True)
        assert report.samples == 3
        assert [note for note in report.notes if "empty" in note and "0.jsonl" in note]
    with pytest.raises(SourceError, match=r"no samples found.*empty"):
        hr.pack(f"{bucket}/lines/0.jsonl", tmp_path / "b.hr", storage_options=options)


def test_a_pattern_without_objects(bucket: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such object"):
        hr.index(f"{bucket}/*.tar", tmp_path / "i.hr", storage_options=options)


def test_urls_and_files_are_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="expected one kind"):
        hr.index(["s3://b/x.tar", "y.tar"], tmp_path / "i.hr")


def test_the_manifest_records_url_size_etag_and_time(
    shards: str, options: dict[str, Any], tmp_path: Path
) -> None:
    hr.index(shards, tmp_path / "i.hr", storage_options=options)
    document = json.loads((tmp_path / "i.hr" / "store.json").read_text())
    volume = document["segments"][0]["volumes"][0]
    assert set(volume) == {"kind", "path", "bytes", "mtime_ns", "etag"}
    assert volume["kind"] == "object"
    assert "secret" not in json.dumps(document)
