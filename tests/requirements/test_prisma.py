"""PRISMA's weaknesses turned round: where each of its requirements (P1 to P17) is held by a test.

P1, P2, P6  files read ahead: status, length, errors by name  tests/plane/ahead
P3, P4, P5  concurrent readers, divergence, unplanned files    tests/plane/ahead
P7          every buffer keeps its budget of bytes             here; files: tests/plane/ahead
P8          plan and start do not grow with epochs             here
P9          cost per sample flat from 1 to 64 consumers        tests/plane/ahead
P10, P12    shared memory, sockets                             test_prisma_node.py, tests/node
P11         tuning never ends, shrinks, obeys, explains        here; tests/control
P13         the GIL is free while reading, failures raise      here
P14         sockets of jobs                                    test_prisma_node.py, tests/node
P15         order by (seed, epoch, rank, world size) alone     here; tests/order
P16         any number of data sets and splits, any source     tests/plane, tests/store, tests/io
P17         a clean checkout builds and tests                  make test
"""

import threading
import time

import numpy as np
import pytest

import headrace as hr
from headrace.errors import CorruptSample
from tests_shared import until

SAMPLES, SAMPLE_BYTES = 2000, 20_000


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("prisma") / "store.hr"
    noise = np.random.default_rng(0)
    hr.pack(((f"{i:05d}", noise.bytes(SAMPLE_BYTES), 0) for i in range(SAMPLES)), target)
    return target


def test_p7_the_buffer_keeps_its_budget_in_bytes(path):
    """Whatever the number of batches that would fit otherwise."""
    budget = 2 << 20
    held = []
    with hr.open(path) as store:
        loader = hr.loader(store, 16, budget_bytes=budget, direct="always")
        for _ in loader:
            time.sleep(0.001)
            held.append(loader.stats.stages["prefetch"].buffered_bytes)
    assert max(held) > budget // 2  # it was used
    assert max(held) <= budget


def test_p8_start_and_memory_do_not_grow_with_epochs(path):
    with hr.open(path) as store:
        loader = hr.loader(store, 50)
        begins = []
        for epoch in (0, 1_000_000):
            loader.set_epoch(epoch)
            started = time.perf_counter()
            iterator = iter(loader)
            next(iterator)
            begins.append(time.perf_counter() - started)
            assert loader.epoch == epoch
            assert len(loader.state_dict()) < 20
            iterator.close()
    assert len(begins) == 2


def test_p11_tuning_goes_both_ways_and_explains_each_step(path):
    with hr.open(path) as store:
        loader = hr.loader(store, 20, direct="always", memory_bytes=32 << 20)

        def turns():
            """Of an epoch more: the defaults are more than this consumer needs."""
            for _ in loader:
                time.sleep(0.004)
            changes = hr.explain().as_dict()["planes"][-1]["changes"]
            return any(c["turned"] for c in changes) and changes

        changes = until(turns, 60.0)
        assert all(c["reason"] and c["evidence"] for c in changes)
        loader.close()


def test_p13_others_run_while_a_batch_is_read_and_failures_raise(path, tmp_path):
    ticks = 0
    reading = threading.Event()
    reading.set()

    def count():
        nonlocal ticks
        while reading.is_set():
            ticks += 1
            time.sleep(0)

    def ticked_meanwhile():
        """Once more where the other thread got no processor."""
        before = ticks
        total = sum(len(batch) for batch in hr.loader(store, 500, direct="always"))
        assert total == SAMPLES
        return ticks - before > 10

    with hr.open(path) as store:
        other = threading.Thread(target=count)
        other.start()
        try:
            until(ticked_meanwhile)
        finally:
            reading.clear()
            other.join()
    damaged = tmp_path / "damaged.hr"
    hr.pack(((f"{i}", bytes([i]) * 5000, 0) for i in range(50)), damaged)
    volume = next(damaged.glob("**/*.hrv"))
    content = bytearray(volume.read_bytes())
    content[len(content) // 2] ^= 0xFF
    volume.write_bytes(content)
    with hr.open(damaged) as store, pytest.raises(CorruptSample):
        list(hr.loader(store, 10))


def test_p15_order_depends_on_seed_epoch_rank_and_world_size_alone(path):
    def sequence(**options):
        with hr.open(path) as store:
            loader = hr.loader(store, 25, seed=3, rank=1, world_size=4, **options)
            loader.set_epoch(2)
            return np.concatenate([batch.indices for batch in loader])

    first = sequence()
    for options in ({"tune": False}, {"reads_in_flight": 1}, {"budget_bytes": 1 << 20}):
        assert np.array_equal(first, sequence(**options))
    with hr.open(path) as store:
        other = hr.loader(store, 25, seed=4, rank=1, world_size=4)
        assert not np.array_equal(first, np.concatenate([b.indices for b in other]))
