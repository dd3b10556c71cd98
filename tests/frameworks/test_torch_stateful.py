"""Data sets and samplers that have a state of their own are put where they stood, whoever holds it."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.utils import data as torch_data
from torch.utils.data._utils import worker as torch_worker

from headrace.errors import StateMismatch
from headrace.frameworks.torch.dropin.iterators import InWorkers
from headrace.torch import DataLoader

from .stateful_corpus import (
    Counting,
    InDataset,
    InIterator,
    IteratorsState,
    NoState,
    Own,
    Remaining,
    Resetting,
    Unpicklable,
    refuse,
)

ITERABLE = [InDataset, InIterator, Own]
DATA = [*ITERABLE, Counting]


def listed(batches):
    return [batch.tolist() for batch in batches]


def epoch_of(loader):
    """The batches of an epoch, and the state before, between and after them."""
    batches, states = [], []
    iterator = iter(loader)
    while True:
        states.append(copy.deepcopy(loader.state_dict()))
        try:
            batches.append(next(iterator).tolist())
        except StopIteration:
            return batches, [*states, copy.deepcopy(loader.state_dict())]


def assert_resumes(make, stops=None, epochs=2, **options):
    """Resumed at every batch of every epoch, what comes is what would have come."""

    def new():
        return DataLoader(make(), 2, generator=torch.Generator().manual_seed(3), **options)

    loader = new()
    before = loader.state_dict()
    batches, states = zip(*(epoch_of(loader) for _ in range(epochs)), strict=True)
    following = listed(loader)
    places = [
        (epoch, step, states[epoch][step])
        for epoch in range(epochs)
        for step in range(len(states[epoch]))
    ]
    assert json.loads(json.dumps(places)) == [list(place) for place in places]
    for epoch, step, state in places if stops is None else [places[stop] for stop in stops]:
        resumed = new()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        rest = listed(resumed) if step <= len(batches[epoch]) else batches[epoch][step:]
        assert rest == batches[epoch][step:], (epoch, step)
        assert listed(resumed) == (*batches, following)[epoch + 1], (epoch, step)
    begun = new()
    begun.load_state_dict(before)
    assert listed(begun) == batches[0]


@pytest.mark.parametrize("make", DATA)
def test_in_this_process_every_batch_is_a_place_to_stop(make):
    assert_resumes(make)


# Two epochs of six batches, the states before, between and after them: eight places each.
@pytest.mark.parametrize(
    ("make", "workers", "persistent", "stops"),
    [
        (InDataset, 2, True, (3, 11)),
        (InIterator, 2, False, (3,)),
        (Own, 1, True, (7, 10)),
        (Counting, 2, True, (1, 7)),
    ],
)
def test_workers_go_on_where_their_data_sets_stood(make, workers, persistent, stops):
    assert_resumes(make, stops, num_workers=workers, persistent_workers=persistent)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make", DATA)
def test_every_batch_is_a_place_to_stop_with_workers(make, workers, persistent, steps):
    assert_resumes(
        make, num_workers=workers, persistent_workers=persistent, snapshot_every_n_steps=steps
    )


class Waits(InDataset):
    """Worker 1 makes its second batch when the consumer knows that worker 0 has ended."""

    def __init__(self, ended):
        super().__init__(11)
        self.ended = ended

    def __iter__(self):
        for sample in super().__iter__():
            if int(sample[0]) == 5:
                assert self.ended.wait(60)
            yield sample


def test_a_workers_last_batch_that_waits_for_its_turn_is_not_lost(monkeypatch):
    ended, receive = torch.multiprocessing.Event(), InWorkers._get_data

    def received(self):
        idx, data = receive(self)
        if isinstance(data, torch_worker._IterableDatasetStopIteration):
            ended.set()
        return idx, data

    monkeypatch.setattr(InWorkers, "_get_data", received)
    batches = iter(loader := DataLoader(Waits(ended), 2, num_workers=2))
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    rest = listed(batches)
    assert [[i for i, _ in batch] for batch in rest] == [[8, 10], [9]]
    resumed = DataLoader(Waits(ended), 2, num_workers=2)
    resumed.load_state_dict(state)
    assert listed(resumed) == rest


@pytest.mark.parametrize("steps", [None, 4])
def test_what_lies_between_two_snapshots_is_done_again(steps):
    loader = DataLoader(InDataset(40), 2, num_workers=2, snapshot_every_n_steps=steps)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    state = loader.state_dict()
    workers = state["_snapshot"]["_worker_snapshots"]
    replayed = {name: len(worker["replay"]) for name, worker in workers.items()}
    assert replayed == {"worker_0": 0 if steps else 4, "worker_1": 1 if steps else 3}
    rest = listed(batches)
    resumed = DataLoader(InDataset(40), 2, num_workers=2, snapshot_every_n_steps=steps)
    resumed.load_state_dict(state)
    assert listed(resumed) == rest
    assert sorted(i for batch in rest for i, _ in batch) == sorted(
        {*range(40)} - {*range(0, 16, 2)} - {*range(1, 13, 2)}
    )


def test_a_number_of_steps_below_zero_is_refused():
    with pytest.raises(ValueError, match="snapshot_every_n_steps is -1"):
        DataLoader(InDataset(), snapshot_every_n_steps=-1)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (NoState, ZeroDivisionError, "no state today"),
        (Unpicklable, TypeError, "a lock cannot be pickled"),
    ],
)
def test_a_state_that_cannot_be_had_is_the_users_error(make, error, match):
    with pytest.raises(error, match=match):
        list(DataLoader(make(), 2, num_workers=1))


def test_a_worker_that_cannot_begin_says_so_when_the_epoch_begins():
    loader = DataLoader(Counting(), 2, num_workers=2, worker_init_fn=refuse)
    with pytest.raises(LookupError, match=r"worker \d has no data"):
        iter(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Resetting, Remaining, IteratorsState])
def test_samplers_go_on_where_they_stood(make, workers):
    data = torch_data.TensorDataset(torch.arange(11))
    for after in range(1, 7, 1 if workers == 0 else 5):
        loader = DataLoader(data, 2, sampler=make(), num_workers=workers)
        batches = iter(loader)
        first = [next(batches)[0].tolist() for _ in range(after)]
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = DataLoader(data, 2, sampler=make(), num_workers=workers)
        resumed.load_state_dict(state)
        rest = [batch.tolist() for (batch,) in resumed]
        assert rest == [batch.tolist() for (batch,) in batches]
        following = [batch.tolist() for (batch,) in resumed]
        for epoch in (first + rest, following):
            assert sorted(i for batch in epoch for i in batch) == list(range(11)), after


def test_samplers_go_on_where_they_stood_without_batches():
    data = torch_data.TensorDataset(torch.arange(11))
    loader = DataLoader(data, None, sampler=IteratorsState(), num_workers=1)
    batches = iter(loader)
    next(batches)
    resumed = DataLoader(data, None, sampler=IteratorsState(), num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    assert [int(i) for (i,) in resumed] == [int(i) for (i,) in batches]


@pytest.mark.parametrize("make", [Resetting, Remaining])
def test_after_an_epoch_samplers_begin_the_next(make):
    data = torch_data.TensorDataset(torch.arange(11))
    loader = DataLoader(data, 2, sampler=make())
    epoch = [batch.tolist() for (batch,) in loader]
    resumed = DataLoader(data, 2, sampler=make())
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for (batch,) in resumed] == epoch


def test_states_of_other_data_and_other_workers_are_refused():
    stateful = DataLoader(InDataset(), 2)
    next(iter(stateful))
    state = stateful.state_dict()
    with pytest.raises(StateMismatch, match="num_workers=0, here it is 2"):
        DataLoader(InDataset(), 2, num_workers=2).load_state_dict(state)
    other = DataLoader(torch_data.ChainDataset([]), 2)
    other.load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"state has one of a data set.*ChainDataset"):
        iter(other)
    with pytest.raises(StateMismatch, match="torchdata's StatefulDataLoader"):
        stateful.load_state_dict({"_num_yielded": 3, "dataset_state": None})


def test_an_empty_state_is_none():
    loader = DataLoader(Counting(), 2)
    next(iter(loader))
    loader.load_state_dict({})
    assert len(list(loader)) == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_sets_the_generators_when_it_is_loaded_does_not_change_the_order(workers):
    loader = DataLoader(Seeding(), 2, shuffle=True, num_workers=workers)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = listed(batches)
    resumed = DataLoader(Seeding(), 2, shuffle=True, num_workers=workers)
    resumed.load_state_dict(state)
    assert [[i for i, _ in batch] for batch in listed(resumed)] == [
        [i for i, _ in batch] for batch in rest
    ]


class Seeding(Counting):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        torch.manual_seed(state["given"])


@pytest.mark.parametrize("workers", [0, 1])
def test_states_of_the_first_format_are_read(workers):
    loader = DataLoader(InDataset(), 2, num_workers=workers)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    names = ("delivered", "randomness", "replay")
    state["workers"] = [
        {**{name: worker[name] for name in names}, "dataset": worker["dataset_state"]}
        for worker in state.pop("_snapshot")["_worker_snapshots"].values()
    ]
    if not workers:
        state["dataset"] = state.pop("dataset_state")
        del state["fetcher_state"]
    del state["sampler"]
    state["format"] = "headrace.torch.DataLoader/1"
    resumed = DataLoader(InDataset(), 2, num_workers=workers)
    resumed.load_state_dict(state)
    assert listed(resumed) == listed(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_accelerate_keeps_the_loader_and_its_state(workers):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(InDataset(), 2, num_workers=workers))
    assert type(prepared.base_dataloader) is DataLoader
    batches = iter(prepared)
    next(batches)
    state = prepared.state_dict()
    rest = listed(batches)
    resumed = accelerator.prepare(DataLoader(InDataset(), 2, num_workers=workers))
    resumed.load_state_dict(state)
    assert listed(resumed) == rest
    theirs = accelerator.prepare(torch_data.DataLoader(Counting(), 2))
    assert type(theirs.base_dataloader) is torch_data.DataLoader


@pytest.mark.parametrize(
    ("workers", "options"), [(0, {}), (1, {}), (1, {"persistent_workers": True})]
)
def test_after_an_epoch_that_went_on_hugging_faces_streams_give_whole_ones(workers, options):
    """They begin each one where they were put, unless somebody calls their `set_epoch`."""
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": list(range(12))})

    def loader():
        stream = whole.to_iterable_dataset(num_shards=2)
        return DataLoader(stream, 3, num_workers=workers, **options)

    def numbers(batches):
        return [x for batch in batches for x in batch["x"].tolist()]

    for stop in (1, 3, 4):
        first = loader()
        batches = iter(first)
        for _ in range(stop):
            next(batches)
        if stop == 4:
            assert list(batches) == []
        resumed = loader()
        resumed.load_state_dict(first.state_dict())
        del batches, first
        if stop < 4:
            assert numbers(resumed) == list(range(3 * stop, 12))
        for _ in range(2):
            assert numbers(resumed) == list(range(12))
