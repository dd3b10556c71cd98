"""What is wrong reaches the user by name, and an iterator that failed can be asked again."""

import grain
import numpy as np
import pytest

from headrace.errors import CorruptSample, DecodeError, StoreNotFound
from headrace.grain import dataset

from .decoders import number_and_size, number_of
from .samples import BATCH, SAMPLES


def test_a_corrupt_sample_is_named_each_time_it_is_asked_for(damaged):
    it = iter(dataset(damaged, BATCH, order="sequential"))
    assert len([next(it), next(it)]) == 2
    for _ in range(2):
        with pytest.raises(CorruptSample, match=r"sample 40 \('00040'\).*checksum") as e:
            next(it)
        assert e.value.index == 40


def test_a_corrupt_sample_is_named_by_workers_too(damaged):
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=1)
    it = iter(dataset(damaged, BATCH, order="sequential").mp_prefetch(options))
    with pytest.raises(CorruptSample, match=r"sample 40 \('00040'\)"):
        list(it)
    it.close()


def test_a_corrupt_sample_is_left_out_on_request(damaged):
    it = iter(dataset(damaged, BATCH, seed=1, on_error="skip", decode=number_of))
    seen = [int(i) for batch in it for i in batch["data"]]
    assert sorted(seen) == [i for i in range(SAMPLES) if i != 40]
    assert [(s.index, s.name) for s in it.skipped] == [(40, "00040")]


def fails_at_17(data):
    if number_of(data) == 17:
        raise RuntimeError("no such thing")
    return number_of(data)


def test_a_sample_that_does_not_decode_is_named(path):
    with pytest.raises(DecodeError, match=r"sample 17 \('00017'\) failed: RuntimeError") as e:
        list(dataset(path, BATCH, decode=fails_at_17))
    assert isinstance(e.value.__cause__, RuntimeError)


def test_a_sample_that_does_not_decode_is_left_out_on_request(path):
    it = iter(dataset(path, BATCH, decode=fails_at_17, on_error="skip"))
    seen = [int(i) for batch in it for i in batch["indices"]]
    assert sorted(seen) == [i for i in range(SAMPLES) if i != 17]
    assert [s.index for s in it.skipped] == [17]
    assert it._loader.stats.samples == SAMPLES - 1


def test_a_batch_without_samples_cannot_be_stacked(path):
    def fails(data):
        raise RuntimeError(len(data))

    with pytest.raises(ValueError, match="a batch has no samples: all were skipped"):
        list(dataset(path, BATCH, decode=fails, on_error="skip"))


def test_of_an_exact_tail_of_fewer_samples_than_ranks_one_gets_an_empty_batch(path):
    (batch,) = dataset(
        path, BATCH, rank=SAMPLES, world_size=SAMPLES + 1, tail="exact", decode=number_and_size
    )
    number, (size,) = batch["data"]["number"], batch["data"]["size"]
    assert number.shape == size.shape == batch["labels"].shape == batch["indices"].shape == (0,)
    assert (number.dtype, size.dtype) == (np.int32, np.int64)


def test_rows_of_different_lengths_are_an_error(path):
    with pytest.raises(ValueError, match=r"lengths are \d+ to \d+ bytes, expected all equal"):
        list(dataset(path, BATCH, elements="rows"))


def test_a_missing_store_is_an_error_at_once(tmp_path):
    with pytest.raises(StoreNotFound):
        dataset(tmp_path / "nothing.hr", BATCH)


def test_workers_refuse_what_they_cannot_do(path):
    import jax

    with pytest.raises(ValueError, match="sequential_slice"):
        dataset(path, BATCH).set_slice(slice(0, None, 2), sequential_slice=True)
    with pytest.raises(ValueError, match="cannot hand on JAX arrays"):
        dataset(path, BATCH, device=jax.devices()[0]).set_slice(slice(0, None, 2))
