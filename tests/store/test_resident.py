"""Which samples lie in the page cache, and an order that begins with them."""

import os

import numpy as np
import pytest

import headrace as hr
from headrace.order import Opportunistic
from headrace.store.residency import ranges_of
from tests_shared import until


def drop(path):
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_is_in_the_page_cache_comes_first(tmp_path):
    sizes = [5000] * 300
    hr.pack((bytes([i % 256]) * size for i, size in enumerate(sizes)), tmp_path / "s.hr")
    (volume,) = (tmp_path / "s.hr").glob("*.hrv")

    def read(offset=0, nbytes=-1):
        """Once more if the system lets go of pages meanwhile."""
        with volume.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.seek(offset)
            file.read(nbytes)
        return store.resident_ranges()

    with hr.open(tmp_path / "s.hr") as store:
        until(lambda: read() == ((0, 300),))
        drop(volume)
        if store.resident_ranges():
            pytest.skip("this file system does not let go of its pages")

        def an_order_of_the_middle():
            found = read(4096 + 100 * 5000, 100 * 5000)
            order = hr.order_for(store, "opportunistic")
            stayed = store.resident_ranges() == found
            whole = len(found) == 1 and found[0][0] <= 100 and found[0][1] >= 199
            return stayed and whole and (*found[0], order)

        first, last, order = until(an_order_of_the_middle)
        assert last <= 220
        assert isinstance(order, Opportunistic)
        assert set(order.indices(0, 0, last - first).tolist()) == set(range(first, last))
        with pytest.raises(ValueError, match="page caches differ"):
            hr.loader(store, 4, order="opportunistic", rank=0, world_size=2)


def test_ranges_of_flags():

    assert ranges_of(np.array([0, 1, 1, 0, 1], bool), 10) == [(11, 13), (14, 15)]
    assert ranges_of(np.zeros(3, bool)) == []
