"""The recipe for JAX: on two ranks, stopped, and gone on as if it had never been stopped."""

import pytest

from recipes.packing import pack_data
from recipes.resuming import go_on, same, stop, whole


@pytest.mark.timeout(600)  # three starts of the framework, on two ranks
def test_asked_to_stop_it_goes_on_with_the_very_next_batch(tmp_path):
    data = pack_data(tmp_path)
    expected = whole("jax", data, tmp_path)
    assert expected[-1]["loss"] < expected[0]["loss"]
    stop("jax", data, tmp_path)
    assert same(go_on("jax", data, tmp_path), expected)
