"""Windows of tokens as tensors: the same memory, the same order, and ranks that share one sequence."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import headrace as hr
from frameworks.test_torch_ranks import joined
from headrace.torch import TokenDataLoader

LENGTH = 32


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 900, n).astype(np.uint16) for n in rng.integers(1, 120, 200)]
    hr.pack([document.tobytes() for document in documents], tmp_path / "a.hr")
    return tmp_path / "a.hr"


@pytest.mark.parametrize("pack", ["cut", "best-fit"])
def test_tensors_are_the_batches_and_share_their_memory(store, pack):
    options = {"stored": "uint16", "seed": 4, "pack": pack}
    with TokenDataLoader(store, LENGTH, 4, **options) as loader:
        expected = iter(hr.tokens(store, LENGTH, 4, dtype="int64", **options))
        for batch in loader:
            other = next(expected)
            assert batch.tokens.dtype == torch.int64
            assert batch.tokens.data_ptr() == batch.batch.tokens.ctypes.data
            assert batch.targets.data_ptr() == batch.inputs.data_ptr() + 8
            for name in ("inputs", "targets", "documents", "positions", "loss_mask", "cu_seqlens"):
                assert (getattr(batch, name).numpy() == getattr(other, name)).all(), name
            assert batch.max_seqlen == other.max_seqlen
        assert next(expected, None) is None
        assert len(loader) == -(-loader.order.samples // 4)


def test_joined_processes_share_the_windows_and_resume_alone(store, monkeypatch):
    options = {"stored": "uint16", "seed": 4, "tail": "exact"}
    with TokenDataLoader(store, LENGTH, 8, **options) as alone:
        sequence = [w for batch in alone for w in batch.batch.indices.tolist()]
    parts = []
    for rank in range(2):
        loader = TokenDataLoader(store, LENGTH, 4, **options)
        joined(monkeypatch, rank, 2)  # after the loader was made, as scripts do it
        batches = iter(loader)
        parts.append([next(batches).batch.indices.tolist() for _ in range(5)])
        state = loader.state_dict()
        assert dist.get_rank() == rank
        monkeypatch.undo()
    before = [w for two in zip(*parts, strict=True) for one in two for w in one]
    with TokenDataLoader(store, LENGTH, 3, **options) as rest:
        rest.load_state_dict(state)
        assert before + [w for batch in rest for w in batch.batch.indices.tolist()] == sequence


class Windows(torch.utils.data.IterableDataset):
    """What a user makes of a loader that ought to be iterated as it is."""

    def __init__(self, make):
        self.make, self.loader = make, make(0, 1)

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        loader = self.make(worker.id, worker.num_workers) if self.make.own else self.loader
        return (torch.from_numpy(batch.indices.copy()) for batch in loader)


@pytest.mark.parametrize("stated", [False, True])
def test_several_workers_do_not_deliver_the_same_windows_in_silence(store, stated):
    def make(rank, world_size):
        ranks = {"rank": rank, "world_size": world_size} if stated or make.own else {}
        return hr.tokens(store, LENGTH, 4, stored="uint16", tail="exact", **ranks)

    make.own = False
    with pytest.raises(hr.errors.RankError, match=r"worker . of 2 of torch's DataLoader"):
        list(torch.utils.data.DataLoader(Windows(make), batch_size=None, num_workers=2))
    one = torch.utils.data.DataLoader(Windows(make), batch_size=None, num_workers=1)
    whole = torch.cat(list(one)).sort().values
    make.own = True
    own = torch.utils.data.DataLoader(Windows(make), batch_size=None, num_workers=2)
    assert torch.equal(torch.cat(list(own)).sort().values, whole)
