"""An S3 server on loopback (moto), the faulty proxy in front of it, and what the tests put there."""

from __future__ import annotations

import hashlib
import http.client
import os
import subprocess
import sys
import urllib.parse
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.errors import SourceChanged
from headrace.io.objects.engine import ObjectEngine
from headrace.io.objects.listing import write
from headrace.io.objects.reading import RemoteObject
from objects.faulty_proxy import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request"
DATA = bytes(range(256)) * 400


_SERVER = """
import logging, os, sys
os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "50"  # a page of a listing; 1,000 would take as many writes
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the tests end
server.stop()
"""


@pytest.fixture(scope="package")
def moto_port() -> Iterator[int]:
    """The port of a server in a process of its own: its sockets and warnings are not ours."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()
        process.wait(10)


@pytest.fixture(scope="package", autouse=True)
def own_environment() -> Iterator[None]:
    """No credentials, endpoints or proxies of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
                monkeypatch.delenv(name)
        yield


@pytest.fixture
def proxy(moto_port: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(moto_port) as running:
        yield running


def client_options(endpoint: str, key: str = "key") -> dict[str, Any]:
    return {
        "endpoint": endpoint, "region": "us-east-1", "access_key_id": key,
        "secret_access_key": "secret",
    }  # fmt: skip


@pytest.fixture
def options(proxy: FaultyProxy) -> dict[str, Any]:
    """`storage_options` that go through the proxy."""
    return client_options(proxy.url) | {"stall_s": 5.0, "deadline_s": 20.0}


@pytest.fixture(scope="package")
def direct(moto_port: int) -> dict[str, Any]:
    """The client's options for the server itself, to put things there unharmed."""
    return client_options(f"http://127.0.0.1:{moto_port}")


@pytest.fixture(scope="package")
def shared_bucket(moto_port: int) -> str:
    """The URL of a bucket for what no test changes."""
    ask(moto_port, "PUT", "/shared")
    return "s3://shared"


@pytest.fixture
def bucket(moto_port: int, request: pytest.FixtureRequest) -> str:
    """A fresh bucket's URL."""
    name = "b" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    ask(moto_port, "PUT", f"/{name}")
    return f"s3://{name}"


def ask(port: int, method: str, target: str, body: bytes | None = None, **headers: str) -> bytes:
    """A request to the server itself."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, target, body, {"Authorization": AUTHORIZATION, **headers})
        response = connection.getresponse()
        assert response.status < 300, response.read()
        return response.read()
    finally:
        connection.close()


@pytest.fixture
def engine(options: dict[str, Any]) -> Iterator[ObjectEngine]:
    made = ObjectEngine(options)
    yield made
    made.close()


@pytest.fixture(scope="package")
def blob(shared_bucket: str, direct: dict[str, Any]) -> str:
    """The URL of an object that holds `DATA`. Not to be changed: see `own_blob`."""
    write(DATA, f"{shared_bucket}/blob.bin", direct, create=True)
    return f"{shared_bucket}/blob.bin"


@pytest.fixture
def own_blob(moto_port: int, bucket: str) -> str:
    """The same, of the test's own."""
    put(moto_port, f"{bucket}/blob.bin", DATA)
    return f"{bucket}/blob.bin"


def samples_of(count: int, size: int = 500) -> dict[str, bytes]:
    return {
        f"{'abc'[i % 3]}/{i:04d}.bin": hashlib.shake_128(str(i).encode()).digest(size + i)
        for i in range(count)
    }


def write_folder(samples: dict[str, bytes], folder: Path) -> Path:
    """Writes samples as the files of a folder."""
    for name, data in samples.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


@pytest.fixture(scope="package")
def samples() -> dict[str, bytes]:
    return samples_of(60)


def files_of_packed(
    samples: dict[str, bytes], folder: Path, *, volume_bytes: int
) -> dict[str, bytes]:
    """Packs the samples below `folder`; the files of the store, by name."""
    hr.pack(write_folder(samples, folder / "source"), folder / "x.hr", volume_bytes=volume_bytes)
    return {path.name: path.read_bytes() for path in (folder / "x.hr").iterdir()}


@pytest.fixture
def folder(samples: dict[str, bytes], tmp_path: Path) -> Path:
    return write_folder(samples, tmp_path / "source")


@pytest.fixture(scope="package")
def packed_files(
    samples: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The files of a packed store of several volumes, by name."""
    return files_of_packed(samples, tmp_path_factory.mktemp("packed"), volume_bytes=12_000)


@pytest.fixture(scope="package")
def packed(moto_port: int, shared_bucket: str, packed_files: dict[str, bytes]) -> str:
    """The URL of that store, with a space and an umlaut in it. Not to be changed: see `own_packed`."""
    return put_store(moto_port, f"{shared_bucket}/a folder/füße.hr", packed_files)


@pytest.fixture
def own_packed(moto_port: int, bucket: str, packed_files: dict[str, bytes]) -> str:
    """The URL of the same store, of the test's own."""
    return put_store(moto_port, f"{bucket}/own.hr", packed_files)


def put(port: int, url: str, data: bytes) -> None:
    """Puts an object onto the server itself."""
    ask(port, "PUT", "/" + urllib.parse.quote(url.removeprefix("s3://")), data)


def refuses_what_was_replaced(url: str, options: dict[str, Any]) -> None:
    """Writes an object, reads it, writes another in its place: reading on is SourceChanged."""
    write(b"a" * 1000, url, options, create=True)
    engine = ObjectEngine(options)
    try:
        found = engine.fetch(url, 0, memoryview(bytearray(10)))
        assert found.size == 1000
        engine.register([RemoteObject(url, found.size, found.etag, found.modified_ns)])
        write(b"b" * 1000, url, options, create=False)
        with pytest.raises(SourceChanged, match="status 412"):
            engine.fetch(url, 0, memoryview(bytearray(10)))
    finally:
        engine.close()


def put_store(port: int, url: str, files: dict[str, bytes]) -> str:
    """A store's files as objects: as cheap as a fixture for many tests should be."""
    for name, data in files.items():
        put(port, f"{url}/{name}", data)
    return url


@pytest.fixture
def opened(packed: str, options: dict[str, Any]) -> Iterator[hr.Store]:
    with hr.open(packed, storage_options=options) as store:
        yield store


@pytest.fixture
def own_opened(own_packed: str, options: dict[str, Any]) -> Iterator[hr.Store]:
    with hr.open(own_packed, storage_options=options) as store:
        yield store


@pytest.fixture
def fetch(engine: ObjectEngine) -> Callable[..., bytes]:
    """Reads a range and returns its bytes."""

    def fetch(url: str, offset: int = 100, size: int = 5000) -> bytes:
        dest = bytearray(size)
        engine.fetch(url, offset, memoryview(dest))
        return bytes(dest)

    return fetch
