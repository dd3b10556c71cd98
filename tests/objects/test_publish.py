"""Packing into an object store: all of it or nothing, and nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.errors import SourceError, StoreExists, VolumeError
from headrace.io.objects import listing
from objects.conftest import ask

if TYPE_CHECKING:
    from pathlib import Path

    from objects.faulty_proxy import FaultyProxy


def _keys(url: str, direct: dict[str, Any]) -> list[str]:
    return sorted(o.url for o in listing.list_objects(url, direct))


def _uploads(moto_port: int, bucket: str) -> bytes:
    return ask(moto_port, "GET", f"/{bucket.removeprefix('s3://')}?uploads")


def test_the_manifest_comes_last(
    bucket: str, folder: Path, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    hr.pack(folder, f"{bucket}/x.hr", storage_options=options, volume_bytes=12_000)
    writes = [line.split()[1] for line, _ in proxy.requests if line.startswith("PUT ")]
    assert len(writes) > 3
    assert [w.endswith("/store.json") for w in writes] == [False] * (len(writes) - 1) + [True]


def test_a_store_that_stands_there_is_replaced_only_when_asked(
    bucket: str, folder: Path, direct: dict[str, Any], samples: dict[str, bytes]
) -> None:
    url = f"{bucket}/x.hr"
    hr.pack(folder, url, storage_options=direct)
    before = _keys(bucket, direct)
    with pytest.raises(StoreExists, match="overwrite=True"):
        hr.pack(folder, url, storage_options=direct)
    assert _keys(bucket, direct) == before
    (folder / "a" / "new.bin").write_bytes(b"new")
    hr.pack(folder, url, storage_options=direct, overwrite=True)
    with hr.open(url, storage_options=direct) as store:
        assert bytes(store.read("a/new.bin")) == b"new"
        assert len(store) == len(samples) + 1
    after = _keys(bucket, direct)
    assert len(after) == len(before) == 3
    assert set(after) & set(before) == {f"{url}/store.json"}


def test_an_open_store_is_never_torn_by_its_replacement(
    own_packed: str, folder: Path, options: dict[str, Any]
) -> None:
    with hr.open(own_packed, storage_options=options) as store:
        store.read(0)
        for path in folder.rglob("*.bin"):
            path.write_bytes(path.read_bytes()[::-1])
        hr.pack(folder, own_packed, storage_options=options, overwrite=True, volume_bytes=12_000)
        with pytest.raises(VolumeError, match="status 404"):
            store.read(0)  # its objects are gone: an error, not the new store's bytes


@pytest.mark.parametrize("name", ["hrv", "hrd", "store.json"])
def test_a_failed_upload_leaves_nothing(
    name: str, bucket: str, folder: Path, options: dict[str, Any], direct: dict[str, Any],
    proxy: FaultyProxy,
) -> None:  # fmt: skip
    proxy.inject("status", pattern=rf"^PUT .*{name}", status=400, body=b"no", times=None)
    with pytest.raises(VolumeError, match="cannot be written"):
        hr.pack(folder, f"{bucket}/x.hr", storage_options=options, volume_bytes=12_000)
    assert proxy.injected["400"] >= 1
    assert _keys(bucket, direct) == []


def test_a_failed_part_of_a_large_volume_aborts_the_whole_upload(
    bucket: str, tmp_path: Path, options: dict[str, Any], direct: dict[str, Any],
    proxy: FaultyProxy, moto_port: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(listing, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(listing, "_PARTS_AT_ONCE", 1)  # moto stumbles over parts that come late
    proxy.inject("status", pattern="^PUT .*partNumber=2", status=400, body=b"no", times=None)
    source = tmp_path / "source"
    source.mkdir()
    (source / "large.bin").write_bytes(bytes(12 << 20))
    with pytest.raises(VolumeError, match="cannot be written"):
        hr.pack(source, f"{bucket}/x.hr", storage_options=options)
    assert proxy.injected["400"] >= 1
    assert _keys(bucket, direct) == []
    assert b"<Upload>" not in _uploads(moto_port, bucket)


def test_a_large_volume_is_uploaded_in_parts_also_when_one_fails_once(
    bucket: str, tmp_path: Path, options: dict[str, Any], proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(listing, "PART_BYTES", 5 << 20)
    proxy.inject("status", pattern="^PUT .*partNumber=2", status=503)
    source = tmp_path / "source"
    source.mkdir()
    (source / "large.bin").write_bytes(bytes(range(256)) * (12 << 12))
    hr.pack(source, f"{bucket}/x.hr", storage_options=options)
    assert proxy.injected == {"503": 1}
    with hr.open(f"{bucket}/x.hr", storage_options=options) as store:
        assert bytes(store.read(0)) == bytes(range(256)) * (12 << 12)


def test_two_that_publish_at_once_are_told_apart(
    bucket: str, folder: Path, options: dict[str, Any], direct: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from headrace.store import remote

    upload = remote.upload

    def late(path: Any, url: str, given: Any) -> None:
        upload(path, url, given)
        if url.endswith(".hrd"):  # the other one was faster
            listing.write(b"other", f"{bucket}/x.hr/store.json", direct, create=False)

    monkeypatch.setattr(remote, "upload", late)
    with pytest.raises(StoreExists):
        hr.pack(folder, f"{bucket}/x.hr", storage_options=options)
    assert _keys(bucket, direct) == [f"{bucket}/x.hr/store.json"]


def test_nothing_stays_in_the_staging_folder(
    bucket: str, folder: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    hr.pack(folder, f"{bucket}/x.hr", storage_options=options | {"staging": str(staging)})
    assert list(staging.iterdir()) == []


def test_a_web_server_cannot_be_written_to(folder: Path, proxy: FaultyProxy) -> None:
    proxy.inject("status", status=404, times=None)
    with pytest.raises(VolumeError, match="web server cannot be written"):
        hr.pack(folder, f"{proxy.url}/x.hr")
    assert proxy.injected["404"] == 1


def test_a_web_server_cannot_be_listed() -> None:
    with pytest.raises(SourceError, match="no listing"):
        listing.expand("https://localhost/*.tar", {})
