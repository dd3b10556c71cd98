"""Batches in TensorFlow: headrace's own, in headrace's order, whole and without a copy too many."""

import io
import shutil

import numpy as np
import pytest
import tensorflow as tf

import headrace as hr
from headrace.errors import OrderError
from headrace.frameworks.tensorflow.elements import Elements, can_cut
from headrace.tensorflow import Loader, dataset

from .samples import BATCH, LENGTH, SAMPLES, STEPS, content


def expected(path, epochs=1, **arguments):
    with hr.open(path) as store:
        loader = hr.loader(store, BATCH, **arguments)
        return [
            ([bytes(sample) for sample in batch], batch.labels.tolist(), batch.indices.tolist())
            for _ in range(epochs)
            for batch in loader
        ]


def delivered(elements):
    return [(data.numpy().tolist(), labels.numpy().tolist()) for data, labels in elements]


@pytest.mark.parametrize("order", ["shuffled", "sequential", "blocked"])
def test_strings_are_the_loaders_batches(path, order):
    assert can_cut(), "strings are cut inside this TensorFlow"
    loader = Loader(path, BATCH, seed=5, order=order)
    found = delivered(loader) + delivered(loader)
    assert found == [(data, labels) for data, labels, _ in expected(path, 2, seed=5, order=order)]
    assert loader.epoch == 2


def test_a_batch_of_the_buffer_finds_its_samples(path):
    batches = list(Loader(path, BATCH, seed=5, elements="buffer"))
    assert len(batches) == STEPS
    for batch, (data, labels, indices) in zip(batches, expected(path, seed=5), strict=True):
        assert batch["indices"].numpy().tolist() == indices
        assert batch["labels"].numpy().tolist() == labels
        found = [
            batch["data"][at : at + length].numpy().tobytes()
            for at, length in zip(batch["offsets"], batch["lengths"], strict=True)
        ]
        assert found == data


@pytest.mark.parametrize("direct", ["never", "always"])
def test_rows_are_samples_of_equal_length(equal_path, direct):
    seen = []
    for rows, labels in dataset(equal_path, BATCH, seed=1, elements="rows", direct=direct):
        assert rows.shape == (len(labels), LENGTH)
        assert (rows == rows[:, :1]).numpy().all()
        seen += rows[:, 0].numpy().tolist()
    assert sorted(seen) == list(range(SAMPLES))


def test_the_buffer_crosses_without_a_copy(path, monkeypatch):
    here = []
    of = Elements.of

    def noted(self, batch):
        here.append(batch.data.ctypes.data)
        return of(self, batch)

    monkeypatch.setattr(Elements, "of", noted)
    there = [
        np.from_dlpack(batch["data"]).ctypes.data
        for batch in dataset(path, BATCH, elements="buffer")
    ]
    assert there == here


def test_rows_of_different_lengths_are_an_error(path):
    with pytest.raises(ValueError, match=r"lengths are \d+ to \d+ bytes, expected all equal"):
        list(Loader(path, BATCH, elements="rows"))


def test_several_parts_come_by_name(tmp_path):
    hr.pack(
        ((f"{i}", {"jpg": b"j%d" % i, "txt": b"t%d" % i}) for i in range(10)), tmp_path / "parts.hr"
    )
    ((data, _),) = list(Loader(tmp_path / "parts.hr", 10, order="sequential"))
    assert data["jpg"].numpy().tolist() == [b"j%d" % i for i in range(10)]
    assert data["txt"].numpy().tolist() == [b"t%d" % i for i in range(10)]


def test_decode_turns_each_sample_into_a_tensor(path):
    def decode(data):
        return tf.io.decode_raw(tf.strings.substr(data, 0, 4), tf.int32)[0]

    batches = list(dataset(path, BATCH, seed=2, decode=decode))
    for (numbers, _), (_, _, indices) in zip(batches, expected(path, seed=2), strict=True):
        assert numbers.numpy().tolist() == indices


def test_seeds_depend_on_the_sample_and_its_epoch_alone(path):
    def decode(data, seed):
        return tf.io.decode_raw(tf.strings.substr(data, 0, 4), tf.int32)[0], seed

    def seeds(**arguments):
        by_sample = {}
        for (numbers, each), _ in Loader(path, seed=2, epochs=2, decode=decode, **arguments):
            for number, one in zip(numbers.numpy().tolist(), each.numpy().tolist(), strict=True):
                by_sample.setdefault(number, []).append(one)
        return by_sample

    one = seeds(batch_size=BATCH)
    assert one == seeds(batch_size=7, prefetch=0)
    assert all(first != second for first, second in one.values())
    assert len({str(pair) for pair in one.values()}) == SAMPLES


def test_an_iterator_goes_through_as_many_epochs_as_asked(path):
    assert delivered(dataset(path, BATCH, seed=4, epochs=3)) == [
        (data, labels) for data, labels, _ in expected(path, 3, seed=4)
    ]
    endless = dataset(path, BATCH, seed=4, epochs=None)
    assert len(list(endless.take(4 * STEPS))) == 4 * STEPS
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY


def test_repeat_gives_each_epoch_its_own_order(path):
    found = delivered(dataset(path, BATCH, seed=4).repeat(2))
    assert found == [(data, labels) for data, labels, _ in expected(path, 2, seed=4)]


def test_ranks_share_each_epoch(path):
    both = [list(Loader(path, 8, seed=3, rank=rank, world_size=2)) for rank in (0, 1)]
    assert len(both[0]) == len(both[1])
    seen = [sample for batches in both for data, _ in batches for sample in data.numpy().tolist()]
    assert set(seen) == {content(i) for i in range(SAMPLES)}


def test_padded_batches_have_a_static_size(path):
    spec = dataset(path, BATCH, tail="pad").element_spec
    assert spec[0].shape == (BATCH,)
    assert dataset(path, BATCH).element_spec[0].shape == (None,)
    assert [len(labels) for _, labels in dataset(path, BATCH, tail="pad")] == [BATCH] * STEPS


def test_batches_are_distributed_over_replicas(path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def of_pipeline(context):
        return dataset(path, context.get_per_replica_batch_size(2 * BATCH), tail="drop", seed=3)

    parts = []
    for data, _ in strategy.distribute_datasets_from_function(of_pipeline):
        parts += [tensor.numpy().tolist() for tensor in strategy.experimental_local_results(data)]
    assert [len(part) for part in parts] == [BATCH] * len(parts)
    found = [sample for part in parts for sample in part]
    assert found == [s for data, _, _ in expected(path, seed=3) for s in data][: len(found)]
    assert len(parts) >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"elements": "tensors"}, "elements is 'tensors', expected one of"),
        ({"elements": "rows", "decode": tf.io.decode_png}, "decode takes 'strings'"),
        ({"epochs": 0}, "epochs is 0"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"parts": ["jpg"]}, "no part 'jpg'"),
        ({"batchsize": 3}, "unknown options"),
    ],
)
def test_wrong_arguments_are_refused_at_once(path, arguments, message):
    with pytest.raises(ValueError, match=message):
        Loader(path, BATCH, **arguments)


def test_a_wrong_batch_size_is_an_order_error(path):
    with pytest.raises(OrderError, match="batch_size is 0"):
        Loader(path, 0)


def test_a_folder_of_images_decodes(tmp_path, photos):
    copied = shutil.copytree(photos, tmp_path / "photos")

    def decode(data):
        image = tf.io.decode_image(data, channels=3, expand_animations=False)
        return tf.image.resize(image, (8, 8))

    (images, labels), *_ = dataset(copied, 36, seed=1, decode=decode)
    assert images.shape == (36, 8, 8, 3)
    assert sorted(labels.numpy().tolist()) == [0] * 12 + [1] * 12 + [2] * 12


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
def test_pictures_are_decoded_natively_and_cross_without_a_copy(tmp_path, monkeypatch, dtype):
    """The epochs' crops are the loader's own; the buffer that TensorFlow sees is the batch's."""
    store = photo_store(tmp_path / "photos.hr")
    images = hr.Images(size=16, flip=True, dtype=dtype, layout="nhwc")
    loader = Loader(store, 4, seed=3, decode=images, tail="drop", epochs=2, decode_threads=2)
    assert loader.dataset().element_spec[0] == tf.TensorSpec((4, 16, 16, 3), tf.as_dtype(dtype))
    crossed, of = [], Elements.of

    def seen(self, batch):
        crossed.append(batch.pixels.ctypes.data)
        return of(self, batch)

    monkeypatch.setattr(Elements, "of", seen)
    batches = list(loader.dataset())
    bits = [tf.bitcast(pixels, tf.uint8) for pixels, _ in batches]
    assert [np.from_dlpack(each).ctypes.data for each in bits] == crossed
    expected = hr.loader(store, 4, seed=3, decode=images)
    wanted = [batch for _ in range(2) for batch in expected]
    assert len(batches) == len(wanted) == 6
    for (pixels, labels), batch in zip(batches, wanted, strict=True):
        assert pixels.numpy().tobytes() == batch.pixels.tobytes()
        assert labels.numpy().tolist() == batch.labels.tolist()
    loader.close()
    expected.close()
    with pytest.raises(ValueError, match="makes pixels"):
        Loader(store, 4, decode=images, elements="buffer")
