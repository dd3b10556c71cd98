"""Ranks that only torch.distributed knows: each sample comes once over all of them."""

import json
import logging
import os
import subprocess
import sys

import pytest

import headrace as hr
from headrace.errors import RankError

torch = pytest.importorskip("torch")

SAMPLES = 60

SPAWNED = """
import json, sys
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, IterableDataset

import headrace as hr


class Samples(IterableDataset):
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield from batch.indices.tolist()


def train(rank, store, folder):
    loader = hr.loader(store, 8, tail="exact")
    before = len(loader)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    seen = [i for batch in loader for i in batch.indices.tolist()]
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({"seen": seen, "steps": [before, len(loader)], "shown": repr(loader),
                   "explained": str(hr.explain(loader))}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, tuple(sys.argv[1:]), nprocs=2)
"""


@pytest.fixture
def store(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    for i in range(SAMPLES):
        (files / f"{i:03}.txt").write_text(f"sample {i}")
    hr.pack(files, tmp_path / "store.hr")
    return tmp_path / "store.hr"


def test_spawned_processes_share_the_samples(store, tmp_path):
    (tmp_path / "train.py").write_text(SPAWNED)
    subprocess.run(
        [sys.executable, tmp_path / "train.py", store, tmp_path], check=True, timeout=240,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    )  # fmt: skip
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == list(range(SAMPLES))
    assert [rank["steps"] for rank in ranks] == [[8, 4], [8, 4]]
    assert "rank 1 of 2 by torch.distributed" in ranks[1]["shown"]
    assert "rank 1 of 2 by torch.distributed" in ranks[1]["explained"]


def joined(monkeypatch, rank, world_size):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)


def test_an_epoch_that_began_as_another_rank_is_refused(store, monkeypatch):
    loader = hr.loader(store, 8)
    assert sum(len(batch) for batch in loader) == SAMPLES
    joined(monkeypatch, 1, 2)
    with pytest.raises(RankError, match=r"began as rank 0 of 1; now .* rank 1 of 2"):
        next(iter(loader))
    assert sum(len(batch) for batch in hr.loader(store, 10)) == SAMPLES // 2


def test_a_length_that_was_another_and_samples_that_come_twice_are_said_once(
    store, monkeypatch, caplog
):
    loader = hr.loader(store, 8)
    assert len(loader) == 8
    joined(monkeypatch, 0, 2)
    with caplog.at_level(logging.WARNING, "headrace"):
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == 32
    length, padded = [record.getMessage() for record in caplog.records]
    assert "len(loader) was 8" in length
    assert "it is 4" in length
    assert "4 samples come twice" in padded
    assert "tail='exact'" in padded
    caplog.clear()
    for tail in ("pad", "exact", "drop"):
        list(hr.loader(store, 8, tail=tail))
    assert not caplog.records  # asked for


@pytest.mark.parametrize("saved_at", [3, 4])
def test_a_state_is_loaded_before_the_rank_is_known(store, monkeypatch, saved_at):
    first = hr.loader(store, 8, tail="exact", rank=0, world_size=2)
    batches = iter(first)
    for _ in range(saved_at):
        next(batches)
    monkeypatch.setenv("LOCAL_RANK", "0")
    loader = hr.loader(store, 8, tail="exact")
    loader.load_state_dict(first.state_dict())
    with pytest.raises(RankError, match="LOCAL_RANK='0'"):
        next(iter(loader))
    joined(monkeypatch, 0, 2)
    assert len(list(loader)) == (1 if saved_at == 3 else 4)


class OwnLoader(torch.utils.data.IterableDataset):
    """Over a loader of the training process, or over one that each worker makes for itself."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        loader = self.loader if isinstance(self.loader, hr.Loader) else hr.loader(self.loader, 8)
        for batch in loader:
            yield batch.indices.tolist()


def in_a_worker(loader, context):
    batches = torch.utils.data.DataLoader(
        OwnLoader(loader), batch_size=None, num_workers=1, multiprocessing_context=context
    )
    return [i for indices in batches for i in indices]


def test_a_worker_works_for_the_rank_of_its_parent(store, monkeypatch):
    joined(monkeypatch, 1, 2)
    own = [i for batch in hr.loader(store, 8, tail="exact") for i in batch.indices.tolist()]
    assert len(own) == SAMPLES // 2
    assert in_a_worker(hr.loader(store, 8, tail="exact"), "fork") == own


def test_a_spawned_worker_that_cannot_know_its_rank_refuses(store):
    """Its parent may be one of several that only torch.distributed knows, and nothing tells the worker."""
    with pytest.raises(RankError, match="nobody tells it which rank it works for"):
        in_a_worker(str(store), "spawn")
