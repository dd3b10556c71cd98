"""The recipe for JAX: two processes, stopped and gone on, as if it had never been stopped."""

import signal

import pytest

from recipes.packing import pack_data
from recipes.resuming import go_on, same, stop_in_the_first_epoch, whole


@pytest.mark.timeout(600)  # three starts of the framework, on two ranks
def test_stopped_it_goes_on_with_the_very_next_batch(tmp_path):
    data = pack_data(tmp_path)
    expected = whole("jax", data, tmp_path)
    assert expected[-1]["loss"] < expected[0]["loss"]
    step = stop_in_the_first_epoch("jax", data, tmp_path, signal.SIGTERM)
    assert step % 10 == 0  # all processes at the same, where they ask
    assert same(go_on("jax", data, tmp_path), expected)
