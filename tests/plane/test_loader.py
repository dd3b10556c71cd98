"""The loader: every sample exactly once, in the order's sequence, from wherever a run stopped."""

import gc
import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import OrderError, RankError, SampleNotFound, StateMismatch
from headrace.order import Blocked, combine_hashes

from .conftest import SAMPLES, content

ORDERS = ["shuffled", "sequential", "blocked", "balanced"]


def delivered(loader):
    """Indices of the rest of the epoch; checks every byte on the way."""
    indices = []
    for batch in loader:
        for i, index in enumerate(batch.indices):
            assert bytes(batch[i]) == content(int(index))
            assert batch.labels[i] == index % 7
        indices.extend(batch.indices.tolist())
    return indices


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("engine", ["auto", "uring", "threads", "mmap"])
@pytest.mark.parametrize("direct", ["auto", "always", "never"])
def test_every_engine_delivers_the_orders_sequence(store, order, engine, direct):
    loader = hr.loader(store, 32, order=order, seed=3, engine=engine, direct=direct)
    expected = loader.order.indices(0, 0, loader.order.length).tolist()
    assert delivered(loader) == expected
    loader.close()


@pytest.mark.parametrize("order", ORDERS[:3])
def test_an_epoch_has_every_sample_once_and_epochs_differ(store, order):
    loader = hr.loader(store, 50, order=order, seed=1)
    first, second = delivered(loader), delivered(loader)
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert (first == second) == (order == "sequential")
    assert loader.epoch == 2


def test_a_blocked_order_reads_windows_and_padded_ranks_come_back_to_the_first(store):
    order = Blocked(SAMPLES, 10, 4, seed=5)
    positions = []
    for rank in range(3):
        loader = hr.loader(store, 16, order=order, rank=rank, world_size=3, tail="pad")
        expected = np.concatenate(
            [loader.slices.indices(order, 0, step) for step in range(len(loader))],
        )
        got = delivered(loader)
        assert got == expected.tolist()
        positions += got
    assert set(positions) == set(range(SAMPLES))


@given(data=st.data())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_stopping_and_resuming_anywhere_with_other_worlds_loses_and_repeats_nothing(store, data):
    """Three runs over one epoch, each with its own world size, batch size and readers."""
    order = data.draw(st.sampled_from(["shuffled", "blocked", "sequential"]))
    seen, state = [], None
    for run in range(3):
        world = data.draw(st.integers(1, 5))
        batch = data.draw(st.integers(1, 64))
        loaders = [
            hr.loader(
                store, batch, order=order, seed=9, rank=r, world_size=world, tail="exact",
                workers=data.draw(st.integers(1, 3)), budget_bytes=1 << 20,
            )
            for r in range(world)
        ]  # fmt: skip
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        if loaders[0].epoch == 1:
            break
        begin = loaders[0].position
        steps = loaders[0].slices.steps(begin)
        stop = steps if run == 2 else data.draw(st.integers(0, steps))
        rows = []
        states = []
        for loader in loaders:
            iterator = iter(loader)
            rows.append([next(iterator).indices.tolist() for _ in range(stop)])
            states.append(loader.state_dict())
            loader.close()
        for step in range(stop):
            for row in rows:
                seen += row[step]
        assert len({s["position"] for s in states}) == 1
        base = int(state["order_hash"], 16) if state else 0
        combined = base
        for s in states:
            combined = combine_hashes(combined, int(s["order_hash"], 16) - base)
        state = {**states[0], "order_hash": f"{combined:016x}"}
    whole = hr.loader(store, 7, order=order, seed=9)
    expected = delivered(whole)
    assert seen == expected[: len(seen)]
    assert len(seen) == SAMPLES or state["position"] == len(seen)
    if len(seen) == SAMPLES:
        assert state["order_hash"] == whole.last_order_hash


@pytest.mark.parametrize("tail", ["drop", "pad", "exact"])
@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_every_rank_has_the_same_number_of_steps(store, tail, world):
    counts = []
    for rank in range(world):
        loader = hr.loader(store, 13, rank=rank, world_size=world, tail=tail)
        counts.append(sum(1 for _ in loader))
        assert counts[-1] == len(loader)
    assert len(set(counts)) == 1


def test_leaving_a_pass_early_begins_the_next_epoch_and_loading_goes_on(store):
    loader = hr.loader(store, 10, seed=2)
    for batch in loader:
        first = batch.indices.tolist()
        break
    state = loader.state_dict()
    assert next(iter(loader)).epoch == 1
    loader.load_state_dict(state)
    batch = next(iter(loader))
    assert batch.epoch == 0
    assert batch.position == 10
    assert batch.indices.tolist() != first


def test_an_iterator_ends_when_a_new_one_is_made(store):
    loader = hr.loader(store, 10)
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="new one was made"):
        next(old)


def test_an_iterator_that_nobody_used_is_no_epoch_that_was_left(store):
    """Lightning calls iter() three times before it takes the first batch."""
    loader, expected = hr.loader(store, 10, seed=2), hr.loader(store, 10, seed=2)
    iter(loader), iter(loader)
    batches = iter(loader)
    assert [next(batches).indices.tolist() for _ in range(3)] == [
        batch.indices.tolist() for _, batch in zip(range(3), expected, strict=False)
    ]
    resumed = hr.loader(store, 10, seed=2)
    resumed.load_state_dict(loader.state_dict())
    iter(resumed), iter(resumed)
    first = next(iter(resumed))
    assert (first.epoch, first.position) == (0, 30)


def test_set_epoch_ends_the_pass_under_way(store):
    loader = hr.loader(store, 10, seed=2)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(0)
    assert (loader.epoch, loader.position) == (0, 0)
    with pytest.raises(RuntimeError, match="set_epoch was called"):
        next(batches)
    assert delivered(loader) == delivered(hr.loader(store, 10, seed=2))


def test_set_epoch_chooses_the_epoch(store):
    loader = hr.loader(store, 10, seed=2)
    loader.set_epoch(4)
    assert next(iter(loader)).epoch == 4
    assert delivered(hr.loader(store, 10, seed=2)) != loader.order.indices(4, 0, SAMPLES).tolist()


def test_a_state_after_the_last_batch_begins_the_next_epoch(store):
    loader = hr.loader(store, 100)
    for _ in loader:
        state = loader.state_dict()
    other = hr.loader(store, 100)
    other.load_state_dict(state)
    assert (other.epoch, other.position) == (1, 0)
    assert len(json.dumps(state)) < 300


def test_a_state_of_other_data_order_or_seed_is_refused(store, photos):
    state = hr.loader(store, 10, seed=2).state_dict()
    with pytest.raises(StateMismatch, match="data"):
        hr.loader(photos[0], 10, seed=2).load_state_dict(state)
    with pytest.raises(StateMismatch, match="seed"):
        hr.loader(store, 10, seed=3).load_state_dict(state)
    with pytest.raises(StateMismatch, match="order"):
        hr.loader(store, 10, order="blocked", seed=2).load_state_dict(state)
    with pytest.raises(OrderError, match="fields"):
        hr.loader(store, 10, seed=2).load_state_dict({**state, "extra": 1})


def test_bytes_outlive_their_batch_and_memory_is_recycled(store):
    loader = hr.loader(store, 64)
    kept = []
    for batch in loader:
        kept.append((int(batch.indices[0]), batch[0]))
    del batch
    gc.collect()
    for index, view in kept:
        assert bytes(view) == content(index)
    kept.clear()
    gc.collect()
    before = loader._reader.mapped_bytes
    for _ in range(20):
        for _ in loader:
            pass
    assert loader._reader.mapped_bytes <= before + (4 << 20)


def test_a_batch_is_read_only_and_has_a_dense_copy(store):
    batch = next(iter(hr.loader(store, 20)))
    with pytest.raises(ValueError, match="read-only"):
        batch.data[0] = 1
    assert batch[0].readonly
    data, starts = batch.dense()
    for i in range(len(batch)):
        assert data[starts[i] : starts[i + 1]].tobytes() == bytes(batch[i])
    assert len(list(batch)) == 20
    assert repr(batch).startswith("Batch(20 samples")


def test_a_forked_child_reads_on_its_own(store):
    loader = hr.loader(store, 32, seed=4)
    iterator = iter(loader)
    next(iterator)
    expected = delivered(hr.loader(store, 32, seed=4))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(delivered(hr.loader(store, 32, seed=4)), pipe)
            loader.load_state_dict(hr.loader(store, 32, seed=4).state_dict())
            status = 0 if delivered(loader) == expected else 2
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pickle.load(pipe) == expected
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == len(loader) - 1


def test_a_folder_is_loaded_in_place(photos):
    folder, files = photos
    with hr.open(folder) as store:
        loader = hr.loader(store, 32, seed=1)
        for batch in loader:
            for i, index in enumerate(batch.indices):
                assert bytes(batch[i]) == files[store.names[int(index)]]
        assert loader.stats.samples == SAMPLES
        assert loader.stats.opened_files == SAMPLES


def test_wrong_arguments_are_refused_with_the_value(store):
    with pytest.raises(ValueError, match="'fast'"):
        hr.loader(store, 8, order="fast")
    with pytest.raises(ValueError, match="queue_depth is 0"):
        hr.loader(store, 8, queue_depth=0)
    with pytest.raises(ValueError, match="unknown options"):
        hr.loader(store, 8, qdepth=3)
    with pytest.raises(ValueError, match="give both or neither"):
        hr.loader(store, 8, rank=1)
    with pytest.raises(ValueError, match="batch_size"):
        hr.loader(store, 0)
    with pytest.raises(ValueError, match="no part 'jpg'"):
        hr.loader(store, 8, parts=["jpg"])
    with pytest.raises(SampleNotFound):
        store.read(SAMPLES)


def test_rank_and_world_size_come_from_the_launcher(store, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = hr.loader(store, 8)
    assert (loader.slices.rank, loader.slices.world_size, loader.slices.tail) == (2, 3, "pad")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RankError, match="RANK='3'"):
        next(iter(loader))


def test_options_come_from_the_environment_too(store, monkeypatch):
    monkeypatch.setenv("HEADRACE_QUEUE_DEPTH", "8")
    monkeypatch.setenv("HEADRACE_VERIFY", "false")
    options = hr.loader(store, 8, queue_depth=9).options
    assert (options.queue_depth, options.verify) == (9, False)
    monkeypatch.setenv("HEADRACE_VERIFY", "perhaps")
    with pytest.raises(ValueError, match="HEADRACE_VERIFY is 'perhaps'"):
        hr.loader(store, 8)


def test_nothing_is_remarked_where_no_sample_comes_twice(store, caplog):
    """One rank's last batch is smaller by default: nothing is padded."""
    assert sum(len(batch) for batch in hr.loader(store, 7)) == len(store)
    assert len(store) % 7
    assert caplog.text == ""
