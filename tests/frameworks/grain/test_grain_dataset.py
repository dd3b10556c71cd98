"""Whole batches for Grain and JAX: headrace's own, in headrace's order, without a copy."""

import io

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import headrace as hr
from headrace.errors import OrderError
from headrace.grain import Dataset, dataset

from .decoders import number_and_size, number_of
from .samples import BATCH, LENGTH, SAMPLES, STEPS


def expected(path, epochs=1, batch_size=BATCH, **arguments):
    with hr.open(path) as store:
        loader = hr.loader(store, batch_size, **arguments)
        return [batch.indices.tolist() for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("order", ["shuffled", "sequential", "blocked"])
def test_batches_are_the_loaders_batches(path, order):
    found = list(dataset(path, BATCH, seed=5, order=order, epochs=2))
    assert [b["indices"].tolist() for b in found] == expected(path, 2, seed=5, order=order)
    for batch in found:
        for i, index in enumerate(batch["indices"]):
            data = batch["data"][batch["offsets"][i] :][: batch["lengths"][i]]
            assert number_of(data.tobytes()) == index
            assert batch["labels"][i] == index % 7


def test_each_iterator_begins_anew_as_grains_own_do(path):
    batches = dataset(path, BATCH, seed=5)
    assert isinstance(batches, grain.IterDataset)
    assert batches.steps_per_epoch == STEPS
    first, second = ([b["indices"].tolist() for b in batches] for _ in range(2))
    assert first == second


def test_an_endless_iterator_goes_from_epoch_to_epoch(path):
    it = iter(dataset(path, BATCH, seed=5, epochs=None))
    found = [next(it)["indices"].tolist() for _ in range(3 * STEPS)]
    assert found == expected(path, 3, seed=5)


@pytest.mark.parametrize("direct", ["never", "always"])
def test_rows_are_samples_of_equal_length(equal_path, direct):
    for batch in dataset(equal_path, BATCH, seed=1, elements="rows", direct=direct):
        assert batch["data"].shape == (len(batch["labels"]), LENGTH)
        assert (batch["data"] == batch["indices"][:, None]).all()


@pytest.mark.parametrize("threads", [0, 3])
def test_decode_stacks_what_it_returns(path, threads):
    for batch in dataset(path, BATCH, decode=number_and_size, threads=threads):
        assert batch["data"]["number"].tolist() == batch["indices"].tolist()
        assert (batch["data"]["size"][0] == 24 + 7 * batch["indices"] % 100).all()


def test_jax_arrays_share_headraces_buffer(path):
    device = jax.devices()[0]
    here = dataset(path, BATCH, seed=1, direct="always")
    for batch in here:
        there = jax.device_put(batch["data"], device)
        assert there.unsafe_buffer_pointer() == batch["data"].ctypes.data
    for batch in dataset(path, BATCH, seed=1, device=device):
        assert batch["data"].devices() == {device}
        assert batch["labels"].tolist() == (batch["indices"] % 7).tolist()
        assert isinstance(batch["indices"], np.ndarray)


def test_batches_are_sharded_over_devices(path):
    devices = jax.devices()
    assert len(devices) == 2
    sharding = NamedSharding(Mesh(devices, ("batch",)), PartitionSpec("batch"))
    batches = dataset(path, BATCH, tail="drop", decode=number_of, device=sharding)
    for batch in batches:
        assert batch["data"].shape == (BATCH,)
        assert [s.data.shape for s in batch["data"].addressable_shards] == [(8,), (8,)]
        assert batch["data"].tolist() == batch["indices"].tolist()


def test_ranks_share_each_epoch(path):
    parts = [list(dataset(path, 8, seed=3, rank=rank, world_size=2)) for rank in (0, 1)]
    assert len(parts[0]) == len(parts[1])
    seen = {int(i) for part in parts for batch in part for i in batch["indices"]}
    assert seen == set(range(SAMPLES))


def test_processes_of_jax_are_ranks(path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    found = [b["indices"].tolist() for b in dataset(path, 8, seed=3)]
    assert found == expected(path, batch_size=8, seed=3, rank=1, world_size=2)


def test_grains_own_transformations_follow(path):
    batches = dataset(path, BATCH, seed=3).map(lambda b: b["indices"].sum())
    batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=2)
    assert [int(n) for n in batches] == [sum(i) for i in expected(path, seed=3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"elements": "tensors"}, "elements is 'tensors', expected one of"),
        ({"epochs": 0}, "epochs is 0"),
        ({"threads": -1}, "threads is -1"),
        ({"parts": ["jpg"]}, "no part 'jpg'"),
        ({"batchsize": 3}, "unknown options"),
    ],
)
def test_wrong_arguments_are_refused_at_once(path, arguments, message):
    with pytest.raises(ValueError, match=message):
        Dataset(path, BATCH, **arguments)


def test_a_wrong_batch_size_is_an_order_error(path):
    with pytest.raises(OrderError, match="batch_size is 0"):
        dataset(path, 0)


def photo_store(folder):
    from PIL import Image

    def encoded(i):
        noise = np.random.default_rng(i).integers(0, 255, (5, 6, 3), np.uint8)
        out = io.BytesIO()
        Image.fromarray(noise).resize((70 + i, 60)).save(out, "JPEG")
        return out.getvalue()

    hr.pack(((f"{i:02d}", encoded(i), i % 3) for i in range(12)), folder)
    return folder


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_pictures_are_decoded_natively_and_jax_shares_their_buffer(tmp_path, dtype):
    store = photo_store(tmp_path / "photos.hr")
    images = hr.Images(size=16, flip=True, dtype=dtype)
    expected = hr.loader(store, 4, seed=3, decode=images)
    wanted = [batch for _ in range(2) for batch in expected]
    batches = list(dataset(store, 4, seed=3, decode=images, epochs=2))
    assert len(batches) == len(wanted)
    for element, batch in zip(batches, wanted, strict=True):
        assert element["data"].tobytes() == batch.pixels.tobytes()
        assert element["indices"].tolist() == batch.indices.tolist()
    there = jax.device_put(batches[0]["data"], jax.devices()[0])
    assert (there.shape, there.dtype) == ((4, 3, 16, 16), jax.numpy.dtype(dtype))
    assert there.unsafe_buffer_pointer() == batches[0]["data"].ctypes.data
    with pytest.raises(ValueError, match="makes pixels"):
        dataset(store, 4, decode=images, elements="rows")


def test_grains_workers_decode_the_same_pictures(tmp_path):
    store = photo_store(tmp_path / "photos.hr")
    images = hr.Images(size=16, flip=True)
    batches = dataset(store, 4, seed=3, decode=images)
    alone = [element["data"].tobytes() for element in batches]
    shared = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    assert [element["data"].tobytes() for element in shared] == alone
