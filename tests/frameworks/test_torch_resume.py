"""Stop and resume: the rest of an epoch is what it would have been, whoever delivers it."""

# ruff: noqa: NPY002 - users draw from the global generators
from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

from headrace.errors import StateMismatch
from headrace.torch import DataLoader

from .dropin_compare import same, seed
from .dropin_corpus import CASES, WORKER_CASES, Nested, StatefulStream, Stream, generator

pytestmark = [
    pytest.mark.usefixtures("always_ahead"),
    # Where torch unpickles a sparse tensor, once a process.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

MAP_STYLE = [name for name in CASES if "iterable" not in name]
ITERABLE = [name for name in CASES if "iterable" in name]


def fresh(case, **options):
    """A loader in a process whose generators stand anywhere."""
    dataset, arguments = case()
    seed(np.random.default_rng().integers(1 << 30).item())
    return DataLoader(dataset, **{**arguments, **options})


def stopped(case, after, **options):
    """The state after some batches, and the rest of this epoch and of the next."""
    seed()
    dataset, arguments = case()
    loader = DataLoader(dataset, **{**arguments, **options})
    batches = iter(loader)
    for _ in range(after):
        next(batches)
    state = loader.state_dict()
    randomness = random.getstate(), np.random.get_state(), torch.get_rng_state()
    rest = list(batches)
    return state, randomness, rest, list(loader)


def restore(randomness):
    random.setstate(randomness[0])
    np.random.set_state(randomness[1])
    torch.set_rng_state(randomness[2])


def length(case, **options):
    dataset, arguments = case()
    seed()
    return len(list(DataLoader(dataset, **{**arguments, **options})))


def assert_resumes(case, after, **options):
    state, randomness, rest, following = stopped(case, after, **options)
    resumed = fresh(case, **options)
    resumed.load_state_dict(state)
    restore(randomness)  # as a training script's own checkpoint does
    assert same(list(resumed), rest)
    assert same(list(resumed), following)


# Fickle's position depends on random numbers that its data set draws from, too: only workers, which
# have their own, keep the two apart.
@pytest.mark.parametrize("name", [n for n in [*MAP_STYLE, *ITERABLE] if n != "fickle"])
def test_in_this_process_every_batch_is_a_place_to_stop(name):
    for after in range(length(CASES[name]) + 1):
        assert_resumes(CASES[name], after)


@pytest.mark.parametrize(
    "name", ["shuffled", "generator", "fickle", "eager", "files", "iterable", "persistent", "deep"]
)
def test_workers_go_on_with_their_own_random_numbers(name):
    case = {**CASES, **WORKER_CASES}[name]
    for after in (0, 1, 3):
        assert_resumes(case, after, num_workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", [*CASES, *WORKER_CASES])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_every_case_resumes_at_every_batch_with_workers(name, workers):
    case = {**CASES, **WORKER_CASES}[name]
    # Each worker drops its own last batch: with workers there are fewer.
    for after in range(length(case, num_workers=workers) + 1 if name in CASES else 4):
        assert_resumes(case, after, num_workers=workers)


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("shuffled", 0, 2), ("shuffled", 2, 0), ("weighted", 1, 2), ("fickle", 2, 1)],
)
def test_with_other_worker_counts_the_remaining_samples_come_in_order(name, before, after):
    state, randomness, rest, _ = stopped(CASES[name], 2, num_workers=before)
    resumed = fresh(CASES[name], num_workers=after)
    resumed.load_state_dict(state)
    if name == "fickle":
        restore(randomness)
    assert labels(resumed)[: len(rest)] == labels(rest)


def test_every_batch_is_a_place_to_stop_with_workers():
    """An iterable data set's, too: in the slow test above."""
    for after in range(length(CASES["files"]) + 1):
        assert_resumes(CASES["files"], after, num_workers=2)


def indices(batches):
    return [i.tolist() for batch in batches for i in batch]


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (1, 2)])
def test_every_batch_is_a_place_to_go_on_with_other_workers(before, after):
    """The samples of a data set that draws no random numbers are all that there is."""
    case = lambda: (  # noqa: E731
        torch_data.TensorDataset(torch.arange(23)),
        {"batch_size": 3, "shuffle": True, "generator": generator(6)},
    )
    for stop in range(8):
        state, _, rest, following = stopped(case, stop, num_workers=before)
        resumed = fresh(case, num_workers=after)
        resumed.load_state_dict(state)
        assert indices(resumed) == indices(rest), stop
        assert indices(resumed) == indices(following), stop


def test_stopping_twice_is_stopping_once():
    state, _, rest, _ = stopped(CASES["shuffled"], 1, num_workers=2)
    second = fresh(CASES["shuffled"], num_workers=2)
    second.load_state_dict(state)
    assert same(second.state_dict(), state)
    batches = iter(second)
    assert same(next(batches), rest[0])
    state = second.state_dict()
    third = fresh(CASES["shuffled"], num_workers=2)
    third.load_state_dict(state)
    assert same(list(third), rest[1:])


def test_the_state_after_an_epoch_begins_the_next():
    for options in ({}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}):
        seed()
        loader = DataLoader(Nested(), 4, shuffle=True, **options)
        list(loader)
        state = loader.state_dict()
        following = list(loader)
        resumed = DataLoader(Nested(), 4, shuffle=True, **options)
        resumed.load_state_dict(state)
        seed(1)
        assert same(list(resumed), following)


def test_the_state_before_an_epoch_begins_it():
    seed()
    loader = DataLoader(Nested(), 4, shuffle=True, generator=torch.Generator().manual_seed(2))
    state = loader.state_dict()
    expected = labels(loader)
    resumed = DataLoader(Nested(), 4, shuffle=True, generator=torch.Generator().manual_seed(9))
    resumed.load_state_dict(state)
    assert labels(resumed) == expected


def test_marks_are_far_apart_when_batches_are_fast_and_replayed_exactly(monkeypatch):
    from headrace.frameworks.torch.dropin import workers as dropin_workers

    for interval in (0.0, 1e9):
        monkeypatch.setattr(dropin_workers, "MARK_INTERVAL_S", interval)
        state, randomness, rest, following = stopped(CASES["shuffled"], 4, num_workers=2)
        replayed = [len(one["replay"]) for one in state["_snapshot"]["_worker_snapshots"].values()]
        assert replayed == ([0, 0] if interval == 0 else [2, 2])
        resumed = fresh(CASES["shuffled"], num_workers=2)
        resumed.load_state_dict(state)
        restore(randomness)
        assert same(list(resumed), rest)
        assert same(list(resumed), following)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_that_knows_where_it_stands_is_told_so(workers, monkeypatch):
    from headrace.frameworks.torch.dropin import workers as dropin_workers

    monkeypatch.setattr(dropin_workers, "MARK_INTERVAL_S", 0.0)
    case = lambda: (StatefulStream(), {"batch_size": 5})  # noqa: E731
    state, randomness, rest, _ = stopped(case, 3, num_workers=workers)
    resumed = fresh(case, num_workers=workers)
    resumed.load_state_dict(state)
    restore(randomness)
    found = list(resumed)
    assert [same(a[:2], b[:2]) for a, b in zip(found, rest, strict=True)] == [True] * len(rest)
    assert all(restored.all() for _, _, restored in found)


def test_without_workers_the_state_is_of_plain_values():
    loader = DataLoader(Nested(), 4, shuffle=True, generator=torch.Generator().manual_seed(2))
    next(iter(loader))
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 60_000


def test_the_main_process_keeps_its_random_numbers_when_workers_resume():
    state, *_ = stopped(CASES["shuffled"], 2, num_workers=1)
    resumed = fresh(CASES["shuffled"], num_workers=1)
    resumed.load_state_dict(state)
    before = torch.get_rng_state()
    iterator = iter(resumed)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(iterator)) == 4


def test_states_that_do_not_fit_are_refused():
    map_style, iterable = DataLoader(Nested(), 4), DataLoader(Stream(), 4)
    damaged = {"_snapshot": {"_worker_snapshots": {"worker_0": 3}}}
    for state in ({"format": "torch"}, {**map_style.state_dict(), **damaged}):
        with pytest.raises(StateMismatch):
            map_style.load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"state is of map-style.*loader's is iterable"):
        iterable.load_state_dict(map_style.state_dict())
    next(iter(iterable))
    with pytest.raises(StateMismatch, match="num_workers=0, here it is 2"):
        DataLoader(Stream(), 4, num_workers=2).load_state_dict(iterable.state_dict())
    shuffled = DataLoader(Nested(), 4, shuffle=True, generator=torch.Generator())
    with pytest.raises(StateMismatch, match="1 generators were saved, 0 are here"):
        map_style.load_state_dict(shuffled.state_dict())


class Reshuffling(torch_data.Sampler):
    """Another order each time that it is asked: nobody can draw what was drawn before."""

    def __iter__(self):
        return iter(np.random.default_rng().permutation(23).tolist())


class Restless(Stream):
    """Shuffled by a generator that nobody seeds, as webdataset's `shuffle` is unless it is given a seed."""

    def __iter__(self):
        samples = list(super().__iter__())
        np.random.default_rng().shuffle(samples)
        return iter(samples)


OTHERS = {
    "batch size": ((Nested(60), {"batch_size": 4}), (Nested(60), {"batch_size": 8})),
    "fewer batches": ((Nested(60), {"batch_size": 4}), (Nested(9), {"batch_size": 4})),
    "length": ((Nested(), {"shuffle": True}), (Nested(24), {"shuffle": True})),
    "order": ((Nested(), {}), (Nested(), {"sampler": range(22, -1, -1)})),
    "rank": tuple(
        (Nested(), {"sampler": torch_data.DistributedSampler(range(23), 2, rank)})
        for rank in (0, 1)
    ),
    "ranks": tuple(
        (Nested(), {"sampler": torch_data.DistributedSampler(range(23), ranks, 0)})
        for ranks in (4, 2)
    ),
    "sampler": ((Nested(), {"sampler": Reshuffling()}), (Nested(), {"sampler": Reshuffling()})),
    "keys": tuple(
        (dict.fromkeys(keys, 0), {"sampler": keys}) for keys in (list("abcdef"), list("acbdef"))
    ),
    "stream": ((Restless(), {}), (Restless(), {})),
    "shorter stream": ((Stream(), {}), (Stream(3), {})),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", OTHERS)
def test_whoever_would_repeat_samples_and_miss_others_is_refused(name, workers):
    (dataset, options), (other, others) = OTHERS[name]
    loader = DataLoader(dataset, **options, num_workers=workers)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    resumed = DataLoader(other, **others, num_workers=workers)
    resumed.load_state_dict(state)
    with pytest.raises(StateMismatch, match="would repeat samples and miss others"):
        next(iter(resumed))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_one_ranks_state_puts_all_ranks_where_they_stood(kind, workers, monkeypatch):
    """Lightning and Accelerate keep that of rank 0."""

    def loader(rank, **options):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        if kind == "iterable":
            return DataLoader(RanksStream(rank), 3, num_workers=workers, **options)
        sampler = torch_data.DistributedSampler(range(60), 2, rank)
        return DataLoader(range(60), 3, sampler=sampler, num_workers=workers, **options)

    states, rests = [], []
    for rank in (0, 1):
        batches = iter(one := loader(rank))
        for _ in range(4):
            next(batches)
        states.append(one.state_dict())
        rests.append([batch.tolist() for batch in batches])
    for rank, rest in enumerate(rests):
        resumed = loader(rank)
        resumed.load_state_dict(states[0])
        assert [batch.tolist() for batch in resumed] == rest
    unordered = loader(1, in_order=False)
    unordered.load_state_dict(states[0])
    with pytest.raises(StateMismatch, match="the state is of rank 0, this is rank 1"):
        iter(unordered)


class Seeding(torch_data.RandomSampler):
    """Makes its generator when it is first drawn from, as Accelerate's SeedableRandomSampler does."""

    epoch = 0

    def __iter__(self):
        self.generator = torch.Generator().manual_seed(self.epoch)
        yield from super().__iter__()
        self.epoch += 1


def test_a_generator_that_is_made_late_does_no_harm_where_samples_are_the_same():
    loader = DataLoader(Nested(), 4, sampler=Seeding(Nested()))
    list(loader)
    batches = iter(loader)
    next(batches)
    resumed = DataLoader(Nested(), 4, sampler=Seeding(Nested()))
    resumed.sampler.epoch = 0
    resumed.load_state_dict(loader.state_dict())
    assert labels(resumed) == labels(batches)


class RanksStream(torch_data.IterableDataset):
    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        info = torch_data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(self.rank + 2 * worker, 60, 2 * workers))


def test_a_state_that_does_not_say_what_was_drawn_is_followed_as_before():
    loader = DataLoader(Nested(), 4)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    del state["drawn"]
    resumed = DataLoader(Nested(), 4)
    resumed.load_state_dict(state)
    assert labels(resumed) == labels(batches)


def test_a_dataset_that_raised_is_gone_past_as_torch_does():
    loader = DataLoader(Raising(), 2)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(ArithmeticError):
        next(batches)
    state = loader.state_dict()
    assert [batch.tolist() for batch in batches] == [[4, 5]]
    resumed = DataLoader(Raising(), 2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[4, 5]]


class Raising(torch_data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 3:
            raise ArithmeticError("three")
        return i
