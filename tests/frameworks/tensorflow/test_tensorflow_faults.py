"""What is wrong reaches TensorFlow's user by name, and nothing hangs or is left behind."""

import gc
import shutil

import numpy as np
import pytest
import tensorflow as tf

import headrace as hr
from headrace.errors import CorruptSample, DecodeError, StoreNotFound
from headrace.tensorflow import Loader, dataset
from tests_shared import descriptors, own_bytes, python_threads, until

from .samples import BATCH, SAMPLES, STEPS


@pytest.fixture
def damaged(path, tmp_path):
    """A store whose sample 40 has a flipped bit."""
    copy = shutil.copytree(path, tmp_path / "damaged.hr")
    with hr.open(copy) as store:
        rows = store.segments[0].directory.extents_of(np.array([40]))
        at = int(rows["offset"][0])
    (volume,) = copy.glob("*.hrv")
    data = bytearray(volume.read_bytes())
    data[at] ^= 1
    volume.write_bytes(data)
    return copy


def test_a_corrupt_sample_is_named(damaged):
    batches = iter(Loader(damaged, BATCH, seed=1))
    for _ in range(2):  # the error is no epoch's end
        with pytest.raises(CorruptSample, match=r"sample 40 \('00040'\).*checksum") as e:
            list(batches)
        assert e.value.index == 40
        assert isinstance(e.value.__cause__, tf.errors.OpError)


def test_a_corrupt_sample_is_named_in_tensorflows_error_too(damaged):
    with pytest.raises(tf.errors.OpError, match=r"CorruptSample: sample 40 \('00040'\)"):
        list(dataset(damaged, BATCH, seed=1))


def test_a_corrupt_sample_is_left_out_on_request(damaged):
    loader = Loader(damaged, BATCH, seed=1, on_error="skip", elements="buffer")
    seen = [i for batch in loader for i in batch["indices"].numpy().tolist()]
    assert sorted(seen) == [i for i in range(SAMPLES) if i != 40]
    assert [(s.index, s.name) for s in loader.skipped] == [(40, "00040")]
    assert loader.stats.batches == STEPS


@pytest.mark.parametrize("seeded", [False, True])
def test_a_sample_that_does_not_decode_is_named(photos, tmp_path, seeded):
    copy = shutil.copytree(photos, tmp_path / "photos")
    (copy / "dogs" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")

    def decode(data):
        return tf.image.resize(tf.io.decode_png(data, channels=3), (4, 4))

    def seeded_decode(data, seed):
        return decode(data) + tf.cast(seed[0] * 0, tf.float32)

    function = seeded_decode if seeded else decode
    with pytest.raises(DecodeError, match=r"'dogs/3.png'\) failed") as e:
        list(Loader(copy, 10, seed=1, decode=function))
    assert e.value.name == "dogs/3.png"


def test_a_failure_of_the_users_transform_stays_tensorflows(path):
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(Loader(path, BATCH, transform=lambda d: d.map(_negative)))


def _negative(data, labels):
    with tf.control_dependencies([tf.debugging.assert_less(labels, tf.constant(0, tf.int64))]):
        return data, tf.identity(labels)


def test_a_missing_store_is_an_error_at_once(tmp_path):
    with pytest.raises(StoreNotFound):
        Loader(tmp_path / "nothing.hr", BATCH)


def test_an_iterator_that_is_dropped_ends_its_run(path):
    loader = Loader(path, 4, seed=1)
    before = python_threads()
    for _ in range(3):
        next(iter(loader.dataset()))
    gc.collect()
    loader.close()
    assert until(lambda: python_threads() <= before)
    assert loader.epoch == 2
    assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("elements", ["strings", "buffer"])
def test_a_dropped_loader_lets_go_of_its_files(path, elements):
    """TensorFlow itself keeps every function that it was given."""
    before = descriptors(path)
    for _ in range(2):
        batches = dataset(path, BATCH, seed=1, elements=elements)
        next(iter(batches))
        assert descriptors(path) - before
    del batches
    gc.collect()
    assert until(lambda: not descriptors(path) - before)


@pytest.mark.parametrize("made_of", [iter, lambda d: iter(d.repeat(2).map(lambda *e: e))])
def test_what_is_made_of_a_data_set_keeps_its_loader(path, made_of):
    batches = made_of(dataset(path, BATCH, seed=1))
    gc.collect()
    assert len(list(batches)) % STEPS == 0


def test_a_data_set_that_is_made_in_a_graph_keeps_its_loader(path):
    def labels_of(seed):
        return dataset(path, BATCH, order="sequential").map(lambda _, labels: labels)

    nested = tf.data.Dataset.range(2).flat_map(labels_of)
    gc.collect()
    found = [label for labels in nested for label in labels.numpy().tolist()]
    assert found == [i % 7 for i in range(SAMPLES)] * 2


def test_memory_stays_flat_over_many_iterators(equal_path):
    batches = (loader := Loader(equal_path, BATCH, seed=1, elements="buffer")).dataset()
    sizes = []
    for _ in range(24):
        for batch in batches:
            del batch
        sizes.append(own_bytes())
    assert loader.epoch == 24
    assert max(sizes[12:]) < sizes[8] + (8 << 20)
