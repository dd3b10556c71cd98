"""Loaders over stores in object stores: whole epochs, faults in the middle, the cost in requests."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import CorruptSample, SourceChanged, StoreError, VolumeError
from headrace.io.objects.listing import remove, write
from objects.conftest import files_of_packed, put_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

    from objects.faulty_proxy import FaultyProxy


@pytest.fixture(scope="module")
def samples() -> dict[str, bytes]:
    return samples_of(150, 2000)


@pytest.fixture(scope="module")
def packed_files(
    samples: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The files of a packed store of six volumes."""
    return files_of_packed(samples, tmp_path_factory.mktemp("packed"), volume_bytes=60_000)


@pytest.fixture(scope="module")
def packed(moto_port: int, shared_bucket: str, packed_files: dict[str, bytes]) -> str:
    return put_store(moto_port, f"{shared_bucket}/several.hr", packed_files)


def epoch(store: hr.Store, **options: Any) -> dict[str, bytes]:
    got: dict[str, bytes] = {}
    for batch in hr.loader(store, batch_size=32, seed=3, **options):
        for k, index in enumerate(batch.indices.tolist()):
            assert store.names[index] not in got
            got[store.names[index]] = bytes(batch[k])
    return got


def test_an_epoch_delivers_every_sample_once_in_the_order_of_the_local_store(
    opened: hr.Store, samples: dict[str, bytes], folder: Path, tmp_path: Path
) -> None:
    hr.pack(folder, tmp_path / "local.hr", volume_bytes=60_000)
    with hr.open(tmp_path / "local.hr") as local:
        wanted = epoch(local)
    got = epoch(opened)
    assert got == samples
    assert list(got) == list(wanted)


def test_neighbours_are_read_by_one_request(
    packed: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    with hr.open(packed, storage_options=options) as store:
        proxy.clear()
        batches = sum(1 for _ in hr.loader(store, batch_size=30, order="sequential"))
        assert batches == 5
        # Each batch lies in one volume, or in two.
        assert batches <= len(proxy.gets(".hrv")) <= 2 * batches


def test_random_order_fetches_no_more_than_a_quarter_beside_the_samples(
    bucket: str, options: dict[str, Any], proxy: FaultyProxy, direct: dict[str, Any],
    samples: dict[str, bytes], folder: Path,
) -> None:  # fmt: skip
    hr.pack(folder, f"{bucket}/one.hr", storage_options=direct)
    wanted = sum(map(len, samples.values()))
    with hr.open(f"{bucket}/one.hr", storage_options=options) as store:
        proxy.clear()
        for _ in hr.loader(store, batch_size=32, seed=3):
            pass
        asked = [r.removeprefix("bytes=").split("-") for _, r in proxy.gets(".hrv")]
    fetched = sum(int(last) - int(first) + 1 for first, last in asked)
    free = (4 << 10) * (len(samples) - len(asked))
    assert wanted < fetched <= 1.25 * wanted + free
    assert len(asked) < len(samples)


def test_faults_in_the_middle_of_an_epoch_cost_time_only(
    opened: hr.Store, samples: dict[str, bytes], proxy: FaultyProxy
) -> None:
    for fault, times in (("status", 5), ("reset", 5), ("truncate", 5), ("wrong_range", 3)):
        proxy.inject(fault, pattern=r"\.hrv", times=times)
    assert epoch(opened) == samples
    assert sum(proxy.injected.values()) == 18
    assert opened.objects is not None
    assert opened.objects.stats().retries >= 13  # a reset of an idle connection is no fault


def test_wrong_bytes_end_the_epoch_or_are_skipped_and_never_delivered(
    opened: hr.Store, samples: dict[str, bytes], proxy: FaultyProxy
) -> None:
    proxy.inject("wrong_bytes", pattern=r"\.hrv", times=None)
    with pytest.raises(CorruptSample, match="checksum"):
        epoch(opened)
    proxy.clear()
    proxy.inject("wrong_bytes", pattern=r"\.hrv", times=None)
    assert epoch(opened, on_error="skip") == {}
    assert proxy.injected["wrong_bytes"] > 0
    proxy.clear()
    assert epoch(opened) == samples


def test_a_volume_that_is_deleted_in_mid_epoch_is_an_error_that_names_it(
    own_opened: hr.Store, direct: dict[str, Any]
) -> None:
    paths = own_opened.segments[0].volumes.paths
    batches = iter(hr.loader(own_opened, batch_size=8, seed=1))
    next(batches)
    remove(paths, direct)
    with pytest.raises(VolumeError, match=r"\.hrv: bytes .* status 404") as caught:
        list(batches)
    assert caught.value.name in set(own_opened.names)  # type: ignore[attr-defined]


def test_a_volume_that_is_replaced_in_mid_epoch_is_an_error_that_names_it(
    own_opened: hr.Store, direct: dict[str, Any]
) -> None:
    volumes = own_opened.segments[0].volumes
    batches = iter(hr.loader(own_opened, batch_size=8, seed=1))
    next(batches)
    for path, entry in zip(volumes.paths, volumes.entries, strict=True):
        write(bytes(entry.bytes or 0), path, direct, create=False)
    with pytest.raises(SourceChanged):
        list(batches)


def test_a_server_that_is_gone_ends_the_epoch(
    packed: str, options: dict[str, Any], proxy: FaultyProxy
) -> None:
    with hr.open(packed, storage_options=options | {"attempts_max": 3}) as store:
        proxy.inject("reset", times=None)
        with pytest.raises(VolumeError, match=r"connection lost.*3 attempts in"):
            epoch(store)
    assert proxy.injected["reset"] > 1


def test_leaving_an_epoch_early_leaves_nothing_running(
    opened: hr.Store, proxy: FaultyProxy, samples: dict[str, bytes]
) -> None:
    proxy.inject("slow", pattern=r"\.hrv", times=None, seconds=0.01)
    batches = iter(hr.loader(opened, batch_size=8, seed=1))
    next(batches)
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert proxy.injected["slow"] > 0
    proxy.clear()
    assert epoch(opened) == samples


def test_an_index_of_shards_is_loaded(
    bucket: str, options: dict[str, Any], direct: dict[str, Any], tmp_path: Path
) -> None:
    from objects.test_index import tar_of

    wanted = {f"{i:04d}": hashlib.sha512(str(i).encode()).digest() * 20 for i in range(200)}
    for k in range(4):
        part = {f"{n}.bin": d for n, d in wanted.items() if int(n) % 4 == k}
        write(tar_of(part), f"{bucket}/{k}.tar", direct, create=True)
    hr.index(f"{bucket}/*.tar", tmp_path / "i.hr", storage_options=options)
    with hr.open(tmp_path / "i.hr", storage_options=options) as store:
        assert epoch(store) == wanted
        assert len(np.unique([store.names.index(n) for n in wanted])) == 200


def test_sources_on_object_stores_are_mixed_with_each_other_and_with_files(
    opened: hr.Store,
    own_opened: hr.Store,
    samples: dict[str, bytes],
    folder: Path,
    options: dict[str, Any],
) -> None:
    names = sorted(samples)
    with hr.mix({"far": opened, "own": own_opened, "near": folder}, stop=400) as mixture:
        seen = 0
        for batch in hr.loader(mixture, 16):
            for k, index in enumerate(batch.source_indices.tolist()):
                assert bytes(batch[k]) == samples[names[index]]
            seen += len(batch)
        assert seen == 400
        assert {mixture.locate(i)[0] for i in (0, 150, 300)} == {"far", "own", "near"}
    other = hr.open(own_opened.path, storage_options={**options, "stall_s": 4.0})
    with other, pytest.raises(StoreError, match="the same storage_options"):
        hr.mix({"far": opened, "other": other})
