"""Strings that TensorFlow cuts from the buffer: the bytes of the samples, for as long as anybody holds them."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import headrace as hr
from headrace.frameworks.tensorflow import elements
from headrace.tensorflow import Loader

SIZES = (0, 1, 22, 23, 4095, 4096, 70_000)


def content(index):
    return np.random.default_rng(index).bytes(SIZES[index % len(SIZES)])


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    """Samples of all kinds of TensorFlow's strings: inside, of their own, views."""
    folder = tmp_path_factory.mktemp("strings") / "sized.hr"
    hr.pack(((f"{i:03d}", content(i), i) for i in range(40)), folder)
    return folder


def by_label(path, **arguments):
    return {
        int(label): bytes(sample)
        for data, labels in Loader(path, 16, **arguments)
        for sample, label in zip(data.numpy(), labels.numpy(), strict=True)
    }


@pytest.mark.parametrize("cuts", [True, False])
def test_both_ways_give_the_same_strings(sized, monkeypatch, cuts):
    assert elements.can_cut(), "this TensorFlow has its C API"
    monkeypatch.setattr(elements, "can_cut", lambda: cuts)
    assert by_label(sized) == {i: content(i) for i in range(40)}


def test_strings_outlive_their_loader_and_other_batches(sized):
    with Loader(sized, 8, epochs=3, order="sequential") as loader:
        kept = [data[:8] for data, _ in loader]
    del loader
    gc.collect()
    again = [content(i) for _ in range(3) for i in range(40)]
    assert [sample for data in kept for sample in data.numpy().tolist()] == again


def test_a_string_that_is_changed_does_not_change_the_sample(sized):
    batches = Loader(sized, 40, order="sequential", epochs=2).dataset()
    for data, _ in batches.map(lambda data, labels: (tf.strings.join([data, "x"]), labels)):
        assert data.numpy().tolist() == [content(i) + b"x" for i in range(40)]


def test_offsets_outside_of_the_buffer_are_refused():
    data = tf.zeros(100, tf.uint8)
    cut = tf.function(elements.cut, autograph=False)
    for offset, length in ((99, 2), (-1, 1), (0, -1), (101, 1), (2**62, 2**62)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside of the buffer"):
            cut(data, tf.constant([offset], tf.int64), tf.constant([length], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many"):
        cut(data, tf.constant([0, 1], tf.int64), tf.constant([1], tf.int64))


def test_it_is_found_out_inside_of_a_graph_too(sized):
    """The trial runs eagerly, wherever it is asked for first."""
    elements.can_cut.cache_clear()
    found = []

    @tf.function
    def traced():
        found.append(elements.can_cut())
        return tf.constant(0)

    traced()
    assert found == [True]
