"""One changed import, the same batches: bit for bit, in order, with the same random numbers."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

import headrace.torch
from headrace.torch import DataLoader

from .dropin_compare import epochs, same, seed
from .dropin_corpus import CASES, WORKER_CASES, Everything, Nested, everything

pytestmark = [
    pytest.mark.usefixtures("always_ahead"),
    pytest.mark.filterwarnings(
        "ignore:Sparse invariant checks:UserWarning",  # where torch unpickles a sparse tensor
        "ignore:This DataLoader will create:UserWarning",
    ),
]


def assert_identical(case, **options):
    ours, our_randomness = epochs(DataLoader, case, **options)
    theirs, their_randomness = epochs(torch_data.DataLoader, case, **options)
    assert sum(map(len, theirs)) > 0
    assert [len(epoch) for epoch in ours] == [len(epoch) for epoch in theirs]
    for our, their in zip(ours, theirs, strict=True):
        for i, (a, b) in enumerate(zip(our, their, strict=True)):
            assert same(a, b), f"batch {i}: {a} is not {b}"
    assert our_randomness == their_randomness


@pytest.mark.parametrize("name", CASES)
def test_in_this_process_batches_are_torchs(name):
    assert_identical(CASES[name], count=3)


@pytest.mark.parametrize("name", [*CASES, *WORKER_CASES])
def test_with_workers_batches_are_torchs(name):
    assert_identical({**CASES, **WORKER_CASES}[name], num_workers=2)


MATRIX = [
    (context, workers) for context in ("fork", "spawn", "forkserver") for workers in (1, 2, 4)
]


@pytest.mark.parametrize(
    ("context", "workers"),
    [("fork", 1), ("fork", 4), ("spawn", 1), pytest.param("spawn", 2, marks=pytest.mark.slow)],
)
def test_however_many_workers_are_started_however(context, workers):
    assert_identical(
        lambda: (Everything(), {"batch_size": 5, "shuffle": True, "collate_fn": everything}),
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("context", "workers"), MATRIX)
@pytest.mark.parametrize("name", [*CASES, *WORKER_CASES])
def test_every_case_is_torchs_with_every_way_to_start_workers(name, context, workers):
    assert_identical(
        {**CASES, **WORKER_CASES}[name], num_workers=workers, multiprocessing_context=context
    )


def test_out_of_order_batches_are_the_same_batches():
    def case():
        return Nested(40), {"batch_size": 2, "collate_fn": labels, "in_order": False}

    ours, _ = epochs(DataLoader, case, num_workers=2)
    theirs, _ = epochs(torch_data.DataLoader, case, num_workers=2)
    assert sorted(map(tuple, ours[0])) == sorted(map(tuple, theirs[0]))


def labels(samples):
    return [sample["label"] for sample in samples]


def test_tensors_may_be_written_and_do_not_share():
    loader = DataLoader(Everything(), 4, num_workers=1, collate_fn=everything)
    for batch in loader:
        for tensor in tensors_in(batch):
            if tensor.numel() and not tensor.requires_grad and tensor.layout is torch.strided:
                before = [other.clone() for other in tensors_in(batch)]
                shares = [same_memory(tensor, other) for other in tensors_in(batch)]
                tensor.add_(1) if tensor.dtype is not torch.bool else tensor.logical_not_()
                for other, old, shared in zip(tensors_in(batch), before, shares, strict=True):
                    assert shared or torch.equal(other.to_dense(), old.to_dense())


def tensors_in(batch):
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)


def same_memory(a, b):
    if b.layout is not torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Views(Nested):
    """Tensors over one storage: the whole, a part, the whole again, and one that torch has to send."""

    def __init__(self, order):
        super().__init__(40)
        self.order = order

    def __getitem__(self, i):
        whole = torch.arange(5000.0) + i
        views = {"whole": whole, "part": whole[10:20], "table": whole.view(50, 100)}
        views["grad"] = whole.detach()[:9].requires_grad_()
        return {name: views[name] for name in self.order} | {"swapped": np.arange(900, dtype=">i4")}


@pytest.mark.parametrize(
    "order", [("whole", "part", "table"), ("part", "whole"), ("whole", "grad")]
)
def test_tensors_over_one_storage_keep_their_bytes_and_share_as_in_torch(order):
    def changed(loader_class):
        batches = []
        for batch in loader_class(Views(order), 2, num_workers=1, collate_fn=list):
            for sample in batch if "grad" in order else ():
                sample["grad"] = sample["grad"].detach().clone()
            for sample in batch:
                sample["whole"] += 1
            batches.append([{k: v.tolist() for k, v in one.items()} for one in batch])
            assert batch[0]["swapped"].dtype.isnative
        return batches

    assert changed(DataLoader) == changed(torch_data.DataLoader)


def test_batches_that_are_kept_stay_as_they_were():
    """More than the shared memory holds: the rest travels torch's own way."""
    seed()
    loader = DataLoader(Everything(), 4, num_workers=2, collate_fn=everything, memory_bytes=4 << 20)
    kept = [batch for _ in range(6) for batch in loader]
    seed()
    theirs = torch_data.DataLoader(Everything(), 4, num_workers=2, collate_fn=everything)
    assert all(map(same, kept, [batch for _ in range(6) for batch in theirs]))


def test_arguments_are_torchs_in_their_places_with_their_defaults():
    ours = inspect.signature(DataLoader.__init__).parameters
    theirs = inspect.signature(torch_data.DataLoader.__init__).parameters
    for name, argument in theirs.items():
        assert (ours[name].kind, ours[name].default) == (argument.kind, argument.default)
    positional = [n for n, a in theirs.items() if a.kind is a.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    own = ["decode", "memory_bytes", "newer", "snapshot_every_n_steps"]
    assert sorted(set(ours) - set(theirs)) == own


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"batch_size": 0},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"multiprocessing_context": "fork"},
        {"multiprocessing_context": "no such", "num_workers": 1},
        {"dept": 3},
    ],
)
def test_wrong_arguments_are_refused_as_torch_refuses_them(wrong):
    with pytest.raises((ValueError, TypeError)) as theirs:
        torch_data.DataLoader(Nested(), **wrong)
    with pytest.raises(theirs.type) as ours:
        DataLoader(Nested(), **wrong)
    assert str(ours.value) == str(theirs.value)


def test_it_is_torchs_loader_and_may_be_derived_from_copied_and_pickled():
    class Mine(DataLoader):
        pass

    loader = Mine(Nested(), 4, shuffle=True)
    assert isinstance(loader, torch_data.DataLoader)
    again = pickle.loads(pickle.dumps(DataLoader(Nested(), 4, num_workers=1)))
    assert type(again) is DataLoader
    assert [len(batch["label"]) for batch in again] == [4, 4, 4, 4, 4, 3]
    with pytest.raises(ValueError, match="should not be set after Mine is initialized"):
        loader.batch_size = 3


class SetsItsOwn(DataLoader):
    """Attributes of its own under names that this loader has, too, before and after it is made."""

    def __init__(self, *args, **options):
        self.decode, self.pictures = str.upper, ["a"]
        super().__init__(*args, **options)
        self.stats = {"mean": 0.5}
        self.epochs_begun = self._progress = self._context = "mine"

    def own(self):
        return self.decode("a"), self.pictures, self.stats, self.epochs_begun, self._progress


class DefinesItsOwn(DataLoader):
    """The same by its class."""

    @property
    def stats(self):
        return {"mean": 0.5}

    @property
    def pictures(self):
        return ["a"]

    def decode(self, text):
        return text.upper()

    def own(self):
        return self.decode("a"), self.pictures, self.stats


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [SetsItsOwn, DefinesItsOwn])
def test_subclasses_may_have_attributes_of_names_that_this_one_has_too(kind, workers, monkeypatch):
    monkeypatch.setenv("HEADRACE_VERDICT", "1")
    loader = kind(Nested(), 4, num_workers=workers)
    before = loader.own()
    for _ in range(2):
        assert sum(len(batch["label"]) for batch in loader) == 23
    assert loader.own() == before
    assert "waiting:" in loader.explain()
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert sum(len(batch["label"]) for batch in copy.copy(loader)) == 23


class Around:
    """An iterator around torch's, which gets what a subclass fetches in the training process."""

    def __init__(self, iterator):
        self.iterator = iterator

    def __iter__(self):
        return self

    def __next__(self):
        return "fetched", next(self.iterator)

    def _reset(self, loader, first_iter=False):
        self.iterator._reset(loader, first_iter)


class FetchesAfterwards(DataLoader):
    """As torch_geometric's loaders over a graph do."""

    def _get_iterator(self):
        return Around(super()._get_iterator())


def test_a_subclass_may_put_an_iterator_of_its_own_around_persistent_workers():
    loader = FetchesAfterwards(Nested(), 4, num_workers=1, persistent_workers=True)
    plain = [batch["label"].tolist() for batch in DataLoader(Nested(), 4)]
    for _ in range(3):
        assert [batch["label"].tolist() for _, batch in loader] == plain
    next(iter(loader))
    assert loader.state_dict()["delivered"] == 1


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_a_copy_of_a_loader_that_was_iterated_over_begins_anew(workers, copied):
    loader = DataLoader(Nested(), 4, num_workers=workers)
    expected = [batch["label"].tolist() for batch in loader]
    rest = iter(loader)
    assert next(rest)["label"].tolist() == expected[0]
    again = copied(loader)
    assert [batch["label"].tolist() for batch in again] == expected
    assert (again.epochs_begun, again.stats.batches) == (1, len(expected))
    assert [batch["label"].tolist() for batch in rest] == expected[1:]
    assert (loader.epochs_begun, loader.stats.batches) == (2, 2 * len(expected))


def test_over_a_store_it_is_the_stores_loader(path):
    dataset = headrace.torch.Dataset(path)
    for over in (path, str(path), dataset.store, dataset):
        assert type(DataLoader(over, batch_size=4)) is headrace.torch.StoreLoader
    through_torch = DataLoader(dataset, 4, sampler=range(len(dataset)), collate_fn=len)
    assert type(through_torch) is DataLoader
    assert sum(through_torch) == len(dataset)

    class Mine(DataLoader):
        pass

    with pytest.raises(TypeError, match=r"derive from headrace\.torch\.StoreLoader"):
        Mine(path)


def test_it_says_what_it_does_and_once_why_it_reads_nothing_ahead(caplog):
    tensors = torch_data.TensorDataset(torch.arange(12))
    loader = DataLoader(tensors, 4, num_workers=1)
    assert "nothing was loaded yet" not in loader.explain()
    with caplog.at_level("INFO", "headrace.torch"):
        assert len(list(loader)) == len(list(loader)) == 3
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        "TensorDataset: nothing is read ahead, because the data set's samples are in memory"
    ]
    assert "samples are in memory" in loader.explain()
    assert (
        "of 3 since these workers began, 3 came through headrace's shared memory"
        in loader.explain()
    )


# In a process of its own: torch's loop makes whoever runs it a worker, for good.
_WORKERS_THAT_ARE_THREADS = """
import threading
from multiprocessing.context import SpawnContext

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from headrace.torch import DataLoader


class ThreadContext(SpawnContext):
    class Process(threading.Thread):
        pid = property(id)


samples = torch.arange(64 * 5000).reshape(64, 5000)
loader = DataLoader(list(samples), 8, num_workers=2, multiprocessing_context=ThreadContext())
theirs = dict(default_collate_fn_map)
for _ in range(2):
    assert torch.equal(torch.cat(list(loader)), samples)
    assert default_collate_fn_map == theirs
"""


def test_workers_that_are_threads_as_monai_has_them_leave_the_programs_collate_alone():
    subprocess.run([sys.executable, "-c", _WORKERS_THAT_ARE_THREADS], check=True)
