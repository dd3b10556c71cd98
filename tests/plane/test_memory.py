"""Memory: 64 MB are enough and kept to, and fifty epochs take no more than ten, on every way."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

import headrace as hr
from tests_shared import ROOT, STEADY_MALLOC, own_bytes

MEGABYTES = 40
BUDGET = 64 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """More bytes than the budget, in samples of 2 MiB."""
    folder = tmp_path_factory.mktemp("large") / "large.hr"
    hr.pack(((str(i), large_content(i), 0) for i in range(MEGABYTES)), folder)
    return folder


def large_content(index: int) -> bytes:
    return bytes([index]) * (2 << 20)


WAYS = {
    "source": {},
    "direct": {"direct": "always"},
    "memory": {"ram_bytes": 8 << 20},
    "cache": {"cache_dir": "cache"},
}


def options_of(way: str, tmp_path) -> dict:
    return {**WAYS[way], **({"cache_dir": tmp_path / "cache"} if way == "cache" else {})}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch_size", [4, MEGABYTES], ids=["batches fit", "a batch is larger"])
def test_sixty_four_megabytes_are_enough(large, tmp_path, way, batch_size):
    """What does not fit comes all the same, alone."""
    gc.collect()
    before = own_bytes()
    loader = hr.loader(large, batch_size, memory_bytes=BUDGET, **options_of(way, tmp_path))
    held = grown = 0
    for _ in range(2):
        seen = []
        for batch in loader:
            seen += batch.indices.tolist()
            for i, index in enumerate(batch.indices):
                assert bytes(batch[i][:: 1 << 16]) == bytes([index]) * 32
            stages = loader.stats.stages.values()
            held = max(held, sum(stage.buffered_bytes for stage in stages))
            grown = max(grown, own_bytes() - before)
            del batch
        assert sorted(seen) == list(range(MEGABYTES))
    one = batch_size * (2 << 20)
    assert held <= max(BUDGET, 3 * one)
    # Delivered and recycled buffers, page tables and what the interpreter itself grew by.
    assert grown <= max(2 * BUDGET, 4 * one)
    loader.close()


FIFTY_EPOCHS = """
import gc, sys
import headrace as hr
from tests_shared import own_bytes

loader = hr.loader(sys.argv[1], 64, order=sys.argv[2])
for epoch in range(50):
    assert sum(len(batch) for batch in loader) == loader.order.length
    gc.collect()
    print(own_bytes())
loader.close()
"""


def sizes_of(program: str, *arguments: object) -> list[int]:
    """What a program prints of its memory, fifty times, in a process that gives back what it frees."""
    ran = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | STEADY_MALLOC | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    sizes = [int(size) for size in ran.stdout.split()]
    assert len(sizes) == 50
    return sizes


@pytest.mark.parametrize("order", ["shuffled", "blocked", "balanced"])
def test_memory_stays_flat_over_fifty_epochs(packed, order):
    """How many buffers are on their way at an epoch's end is chance, so the least of ten counts."""
    sizes = sizes_of(FIFTY_EPOCHS, packed, order)
    assert min(sizes[40:]) < min(sizes[:10]) + (2 << 20), sizes


FIFTY_LOADERS = """
import gc, sys
import headrace as hr
from tests_shared import own_bytes

for number in range(50):
    loader = hr.loader(sys.argv[1], 64, ram_bytes=1 << 20, cache_dir=sys.argv[2])
    next(iter(loader))
    del loader
    gc.collect()
    print(own_bytes())
"""


def test_fifty_loaders_take_no_more_memory_than_ten(packed, tmp_path):
    """One for each validation, say, dropped without a word.

    Buffers of the last few loaders may still be on their way out, so the least of ten loaders counts.
    """
    sizes = sizes_of(FIFTY_LOADERS, packed, tmp_path)
    assert min(sizes[40:]) < min(sizes[:10]) + (2 << 20), sizes
