"""Stores that are objects: opened, sent to other processes, damaged, hostile."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.base.checksum import crc32c
from headrace.errors import (
    CorruptSample,
    CorruptStore,
    SourceChanged,
    StoreError,
    StoreNotFound,
    VolumeError,
)
from headrace.io.objects.listing import list_objects, remove, write
from objects.conftest import ask, client_options, put_store
from tests_shared import until

if TYPE_CHECKING:
    from objects.faulty_proxy import FaultyProxy

Samples = dict[str, bytes]


def test_a_packed_store_reads_as_its_source(
    bucket: str, direct: dict[str, Any], samples: Samples, folder: Path, opened: hr.Store
) -> None:
    url = f"{bucket}/x.hr"
    hr.pack(folder, url, storage_options=direct, volume_bytes=12_000)
    with hr.open(url, storage_options=direct) as store:
        assert {name: bytes(store.read(name)) for name in store.names} == samples
        assert store.classes == ["a", "b", "c"]
        assert len(store.segments[0].entry.volumes) > 1
        assert store.fingerprint == opened.fingerprint  # of the same store, packed locally


def test_ranges_of_a_sample(opened: hr.Store, samples: Samples) -> None:
    name = opened.names[5]
    assert bytes(opened.read(name, 10, 20)) == samples[name][10:30]


def test_opening_costs_a_request_for_the_manifest_two_for_the_directory_one_for_each_volume(
    packed: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    with hr.open(packed, storage_options=options) as store:
        volumes = len(store.segments[0].entry.volumes)
        assert len(proxy.requests) == 3 + volumes


def test_a_pickled_store_opens_in_a_fresh_process_and_looks_at_no_volume_again(
    opened: hr.Store, samples: Samples, proxy: FaultyProxy
) -> None:
    name = opened.names[3]
    before = len(proxy.requests)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_read, (pickle.dumps(opened), name)) == samples[name]
    assert len(proxy.requests) - before == 4  # manifest, directory, sample


def _read(pickled: bytes, name: str) -> bytes:
    with pickle.loads(pickled) as store:
        return bytes(store.read(name))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_the_inherited_store_and_opens_others(
    opened: hr.Store, packed: str, options: dict[str, Any], samples: Samples
) -> None:
    name = opened.names[7]
    opened.read(name)  # the parent's event loop, connections and obstore are at work
    with multiprocessing.get_context("fork").Pool(1, _inherit, (opened,)) as pool:
        assert pool.apply(_read_inherited, (name,)) == samples[name]
        assert pool.apply(_read_anew, (packed, options, name)) == samples[name]
        with pytest.raises(VolumeError, match="forked"):
            pool.apply(_list, (packed, options))
    assert bytes(opened.read(name)) == samples[name]


_INHERITED: list[hr.Store] = []


def _inherit(store: hr.Store) -> None:
    _INHERITED.append(store)


def _read_inherited(name: str) -> bytes:
    return bytes(_INHERITED[0].read(name))


def _read_anew(url: str, options: dict[str, Any], name: str) -> bytes:
    with hr.open(url, storage_options=options) as store:
        return bytes(store.read(name))


def _list(url: str, options: dict[str, Any]) -> int:
    return len(list(list_objects(url, client_options(options["endpoint"]))))


def test_directories_are_kept_in_a_folder_when_asked(
    packed: str, options: dict[str, Any], proxy: FaultyProxy, tmp_path: Path, samples: Samples
) -> None:
    cached = options | {"directory_cache": str(tmp_path / "directories")}
    with hr.open(packed, storage_options=cached) as store:
        names = list(store.names)
    (kept,) = (tmp_path / "directories").iterdir()
    proxy.clear()
    with hr.open(packed, storage_options=cached) as store:
        assert list(store.names) == names
    assert not proxy.gets(".hrd")
    kept.write_bytes(kept.read_bytes()[:-4096] + bytes(4096))
    data = bytearray(kept.read_bytes())
    data[100] ^= 1
    kept.write_bytes(data)
    with hr.open(packed, storage_options=cached) as store:  # damaged: fetched again
        assert bytes(store.read(names[0])) == samples[names[0]]
    assert proxy.gets(".hrd")


def test_anonymous_access_sends_no_signature(
    own_packed: str, moto_port: int, proxy: FaultyProxy, samples: Samples
) -> None:
    name = own_packed.split("/")[2]
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*",
              "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{name}/*"}]}  # fmt: skip
    ask(moto_port, "PUT", f"/{name}?policy", json.dumps(policy).encode())
    public = {"endpoint": proxy.url, "region": "us-east-1", "skip_signature": True}
    with hr.open(own_packed, storage_options=public) as store:
        assert bytes(store.read(0)) == samples[store.names[0]]
    assert proxy.requests
    assert not any("Signature" in line for line, _ in proxy.requests)


def test_a_store_on_a_web_server_needs_no_client(
    folder: Path, tmp_path: Path, samples: Samples
) -> None:
    (tmp_path / "web").mkdir()
    hr.pack(folder, tmp_path / "web" / "photos.hr")
    with _web_server(tmp_path / "web") as url, hr.open(f"{url}/photos.hr") as store:
        assert {n: bytes(store.read(n)) for n in list(store.names)[:9]} == {
            n: samples[n] for n in list(store.names)[:9]
        }


def test_a_store_in_memory_goes_through_fsspec(folder: Path, samples: Samples) -> None:
    hr.pack(folder, "memory://packs/photos.hr")
    with hr.open("memory://packs/photos.hr") as store:
        assert {name: bytes(store.read(name)) for name in store.names} == samples
        again = pickle.loads(pickle.dumps(store))
        assert bytes(again.read(0)) == bytes(store.read(0))
        again.close()


def test_wrong_bytes_are_never_delivered(
    packed: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    with hr.open(packed, storage_options=options) as store:
        proxy.inject("wrong_bytes", pattern=r"\.hrv", times=None)
        with pytest.raises(CorruptSample, match="checksum"):
            store.read(4)
    assert proxy.injected == {"wrong_bytes": 1}


def test_a_damaged_directory_is_refused(
    packed: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    proxy.inject("wrong_bytes", pattern=r"\.hrd", times=None)
    with pytest.raises(CorruptStore, match="hrd"):
        hr.open(packed, storage_options=options)
    assert proxy.injected["wrong_bytes"] == 1


def test_a_volume_that_is_deleted_in_mid_epoch_names_sample_and_object(
    own_opened: hr.Store, direct: dict[str, Any]
) -> None:
    own_opened.read(0)
    path = own_opened.segments[0].volumes.paths[0]
    remove([path], direct)
    with pytest.raises(VolumeError, match="status 404") as caught:
        own_opened.read(0)
    assert path in str(caught.value)


def test_a_volume_that_is_replaced_in_mid_epoch_is_detected(
    own_opened: hr.Store, direct: dict[str, Any]
) -> None:
    own_opened.read(0)
    path = own_opened.segments[0].volumes.paths[0]
    write(bytes(own_opened.segments[0].entry.volumes[0].bytes or 0), path, direct, create=False)
    with pytest.raises(SourceChanged, match="status 412"):
        own_opened.read(0)


def test_a_missing_volume_is_found_when_the_store_is_opened(
    own_packed: str, options: dict[str, Any], direct: dict[str, Any]
) -> None:
    with hr.open(own_packed, storage_options=options) as store:
        paths = store.segments[0].volumes.paths
    remove([paths[1]], direct)
    with pytest.raises(CorruptStore, match="status 404"):
        hr.open(own_packed, storage_options=options)


def test_there_is_no_store(bucket: str, options: dict[str, Any]) -> None:
    with pytest.raises(StoreNotFound, match="there is no store here"):
        hr.open(f"{bucket}/absent.hr", storage_options=options)


def test_a_store_whose_server_is_away_is_not_called_absent(
    bucket: str, options: dict[str, Any]
) -> None:
    away = options | {"endpoint": "http://127.0.0.1:9", "deadline_s": 5.0}
    with pytest.raises(VolumeError, match="connect failed"):
        hr.open(f"{bucket}/x.hr", storage_options=away)


# -- hostile manifests ------------------------------------------------------------------------------


def _rewrite(manifest: bytes, change: Any) -> bytes:
    document = json.loads(manifest)
    change(document)
    del document["crc32c"]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    document["crc32c"] = f"{crc32c(canonical.encode('ascii')):08x}"
    return json.dumps(document).encode()


def _set(key: str, value: Any) -> Any:
    def change(document: dict[str, Any]) -> None:
        document["segments"][0][key] = value

    return change


def _set_volume(**fields: Any) -> Any:
    def change(document: dict[str, Any]) -> None:
        volume = document["segments"][0]["volumes"][0]
        volume.update(fields)
        if fields.get("kind") != "packed":
            volume.pop("uuid", None)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("directory_bytes", 1 << 61), "directory size in bytes"),
        (_set("directory_bytes", 8 << 30), "object size in bytes"),
        (_set("directory", "../other.hrd"), "a file name without"),
        (_set("directory", "http://other/x.hrd"), "a file name without"),
        (_set_volume(kind="packed", path="../../secret"), "a file name without"),
        (_set_volume(kind="object", path="s3://another/secret"), "expected objects below"),
        (
            _set_volume(kind="object", path="http://169.254.169.254/latest"),
            "expected objects below",
        ),
        (_set_volume(kind="file", path="/etc/passwd", mtime_ns=0), "is a local file"),
        (_set_volume(kind="tree", path="/etc"), "is a local file"),
        (_set_volume(kind="object", path="not a URL"), "expected a URL"),
        (_set_volume(kind="packed", bytes=1 << 60), "volume size in bytes"),
    ],
)
def test_a_hostile_manifest_is_refused_before_anything_is_fetched_or_allocated(
    change: Any, said: str, bucket: str, packed_files: dict[str, bytes], options: dict[str, Any],
    moto_port: int, proxy: FaultyProxy,
) -> None:  # fmt: skip
    manifest = {"store.json": _rewrite(packed_files["store.json"], change)}
    put_store(moto_port, f"{bucket}/x.hr", packed_files | manifest)
    with pytest.raises(StoreError):
        hr.open(f"{bucket}/x.hr", storage_options=options)
    with pytest.raises(CorruptStore, match=said):
        hr.open(f"{bucket}/x.hr", storage_options=options, trust="*")
    assert not any("secret" in line or "latest" in line for line, _ in proxy.requests)


def test_a_manifest_without_end_is_refused_by_its_size(
    packed: str, options: dict[str, Any], proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.store.remote.BYTES_MAX", 100)
    with pytest.raises(CorruptStore, match="manifest size in bytes"):
        hr.open(packed, storage_options=options)
    assert len(proxy.requests) == 1


def test_a_long_manifest_is_fetched_in_two_reads_of_one_version(
    packed: str, options: dict[str, Any], proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.store.remote._FIRST_BYTES", 100)
    with hr.open(packed, storage_options=options) as store:
        assert len(store) == 60
    assert proxy.gets("store.json")[0][1] == "bytes=0-99"
    assert len(proxy.gets("store.json")) == 2


def test_secrets_stand_in_no_message_and_no_repr(packed: str, options: dict[str, Any]) -> None:
    with hr.open(packed, storage_options=options) as store:
        assert "secret" not in repr(store)
        with pytest.raises(VolumeError) as caught:
            store.objects.fetch(f"{packed}/no", 0, memoryview(bytearray(1)))
    assert "secret" not in str(caught.value)
    assert "Signature" not in str(caught.value)


class _web_server:  # noqa: N801 - used like a function
    """A web server that knows ranges."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> str:
        import http.server
        import threading

        folder = self._folder

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = folder / self.path.lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                data = path.read_bytes()
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                piece = data[int(first) : int(last) + 1]
                self.send_response(206)
                end = int(first) + len(piece) - 1
                self.send_header("Content-Range", f"bytes {first}-{end}/{len(data)}")
                self.send_header("Content-Length", str(len(piece)))
                self.end_headers()
                self.wfile.write(piece)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def test_nothing_is_left_open(packed: str, options: dict[str, Any]) -> None:
    with hr.open(packed, storage_options=options) as store:
        store.read(0)
    before = _descriptors()
    for _ in range(5):
        with hr.open(packed, storage_options=options) as store:
            store.read(0)
    # The proxy lives here too, and closes its side when it comes to it.
    until(lambda: _descriptors() <= before)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
