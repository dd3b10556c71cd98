"""gs:// by obstore's client for Google, against an S3 server that is asked in the same words.

Google's XML interface and S3 share paths, ranges, conditions, listings and deletions. What differs is
left out: who one is (the proxy says it in S3's way) and writing only where nothing stands. This is no proof of
how Google answers; the emulator on PyPI speaks another interface than obstore (docs/howto/object-stores.md).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.io.objects.listing import expand
from objects.conftest import AUTHORIZATION, refuses_what_was_replaced
from objects.faulty_proxy import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def google(moto_port: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(moto_port, AUTHORIZATION) as running:
        yield running


@pytest.fixture
def gs_options(google: FaultyProxy) -> dict[str, Any]:
    account = {
        "gcs_base_url": google.url, "disable_oauth": True, "client_email": "", "private_key": "",
        "private_key_id": "",
    }  # fmt: skip
    # An option of its own client: obstore reads, and Google is not asked for a signature.
    client = {"allow_http": True, "user_agent": "test"}
    return {"service_account_key": json.dumps(account), "client_options": client}


@pytest.fixture
def gs_bucket(bucket: str) -> str:
    return bucket.replace("s3://", "gs://")


def test_a_store_is_packed_listed_and_loaded(
    gs_bucket: str, gs_options: dict[str, Any], folder: Path, samples: dict[str, bytes],
    google: FaultyProxy,
) -> None:  # fmt: skip
    url = f"{gs_bucket}/a folder/füße.hr"
    hr.pack(folder, url, storage_options=gs_options, volume_bytes=12_000)
    assert f"{url}/store.json" in expand(f"{gs_bucket}/a folder/*/*.json", gs_options)
    with hr.open(url, storage_options=gs_options) as store:
        google.inject("status", pattern="hrv", status=503)
        got = {
            store.names[i]: bytes(batch[k])
            for batch in hr.loader(store, batch_size=16, seed=3)
            for k, i in enumerate(batch.indices.tolist())
        }
        assert got == samples
        assert store.objects is not None
        assert store.objects.stats().retries == 1
    assert google.injected == {"503": 1}


def test_an_object_that_was_replaced_is_detected(
    gs_bucket: str, gs_options: dict[str, Any]
) -> None:
    refuses_what_was_replaced(f"{gs_bucket}/blob.bin", gs_options)
