"""az:// against Azurite, the emulator of Azure's blobs: packed, listed, indexed, read, replaced.

Azurite comes from npm and is too large to be installed with the project: `npm install azurite`, then
put `node_modules/.bin` on PATH, or name the program in HEADRACE_AZURITE.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.errors import StoreExists
from headrace.io.objects.listing import expand, write
from objects.conftest import refuses_what_was_replaced
from objects.test_index import content, tar_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNT = "devstoreaccount1"
# Azurite's own, known to everybody.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def azurite_port() -> Iterator[int]:
    """The port of an emulator that keeps everything in memory."""
    program = os.environ.get("HEADRACE_AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("no azurite-blob on PATH nor in HEADRACE_AZURITE: npm install azurite")
    command = [program, "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck",
               "--blobHost", "127.0.0.1", "--blobPort", "0"]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"successfully listens on http://127\.0\.0\.1:(\d+)", line):
                yield int(found[1])
                break
        else:
            pytest.fail("azurite did not start: " + "".join(lines))
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture
def container(azurite_port: int, request: pytest.FixtureRequest) -> str:
    """A fresh container's URL."""
    name = "c" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    text = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n"
    text += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    mac = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    connection = http.client.HTTPConnection("127.0.0.1", azurite_port)
    try:
        connection.request(
            "PUT", f"/{ACCOUNT}/{name}?restype=container",
            headers={
                "x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
                "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}",
            },
        )  # fmt: skip
        response = connection.getresponse()
        assert response.status == 201, response.read()
    finally:
        connection.close()
    return f"az://{name}"


@pytest.fixture
def azure(azurite_port: int) -> dict[str, Any]:
    return {
        "endpoint": f"http://127.0.0.1:{azurite_port}/{ACCOUNT}", "account_name": ACCOUNT,
        "account_key": KEY,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["x.hr", "a folder/füße.hr"])
def test_a_store_is_packed_and_loaded(
    name: str, container: str, azure: dict[str, Any], folder: Path, samples: dict[str, bytes]
) -> None:
    url = f"{container}/{name}"
    hr.pack(folder, url, storage_options=azure, volume_bytes=12_000)
    with hr.open(url, storage_options=azure) as store:
        got = {
            store.names[i]: bytes(batch[k])
            for batch in hr.loader(store, batch_size=16, seed=3)
            for k, i in enumerate(batch.indices.tolist())
        }
        assert got == samples
    with pytest.raises(StoreExists):
        hr.pack(folder, url, storage_options=azure)


def test_shards_are_listed_and_indexed_in_place(
    container: str, azure: dict[str, Any], tmp_path: Path
) -> None:
    for k in range(3):
        names = {f"{k}/{i}.bin": content(10 * k + i) for i in range(10)}
        write(tar_of(names), f"{container}/shards/{k}.tar", azure, create=True)
    assert expand(f"{container}/shards/*.tar", azure) == [
        f"{container}/shards/{k}.tar" for k in range(3)
    ]
    hr.index(f"{container}/shards/*.tar", tmp_path / "i.hr", storage_options=azure)
    with hr.open(tmp_path / "i.hr", storage_options=azure) as store:
        assert bytes(store.read("2/7")) == content(27)
        assert hr.verify(tmp_path / "i.hr", storage_options=azure).ok


def test_an_object_that_was_replaced_is_detected(container: str, azure: dict[str, Any]) -> None:
    refuses_what_was_replaced(f"{container}/blob.bin", azure)
