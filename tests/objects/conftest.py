"""An S3 server on loopback (moto), and the faulty proxy in front of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("obstore", reason="the extra `objects` is not installed")
pytest.importorskip("moto.server", reason="moto is not installed")

from objects.faulty_proxy import FaultyProxy

BUCKET = "bucket"


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, endpoints or proxies of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def options(proxy: FaultyProxy) -> dict[str, Any]:
    return s3_options(proxy.url)


def s3_options(endpoint: str, key: str = "key") -> dict[str, Any]:
    return {
        "endpoint": endpoint, "region": "us-east-1", "access_key_id": key,
        "secret_access_key": "secret", "stall_s": 5.0, "deadline_s": 20.0,
    }  # fmt: skip


@pytest.fixture
def direct(moto_port: int) -> dict[str, Any]:
    """The client's options for the server itself, to put things there and take them away."""
    full = s3_options(f"http://127.0.0.1:{moto_port}")
    return {k: v for k, v in full.items() if k not in ("stall_s", "deadline_s")} | {
        "allow_http": True
    }


@pytest.fixture
def proxy(moto_port: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(moto_port) as running:
        yield running


@pytest.fixture
def bucket(moto_port: int, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh bucket's URL."""
    import http.client

    name = "b" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    connection = http.client.HTTPConnection("127.0.0.1", moto_port)
    connection.request("PUT", f"/{name}", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request"})  # fmt: skip
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    connection.close()
    yield f"s3://{name}"
