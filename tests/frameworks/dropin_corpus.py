"""Data sets, samplers and loaders as users write them; spawned workers import this."""

# ruff: noqa: NPY002 - users draw from the global generators
from __future__ import annotations

import atexit
import collections
import functools
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils.data.distributed import DistributedSampler

Point = collections.namedtuple("Point", ["x", "y"])  # noqa: PYI024 - as users write it


class Nested:
    """Every kind of thing that a batch may be made of, drawn from all generators."""

    def __init__(self, length=23):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return {
            "point": Point(torch.full((3,), float(i)), np.full((2, 3), i, np.int16)),
            "random": (torch.rand(2), random.random(), np.random.rand(3)),
            "label": i,
            "name": f"n{i}",
            "half": torch.full((2, 2), i, dtype=torch.bfloat16),
        }


class Large:
    """Tensors, arrays and bytes that travel in shared memory."""

    def __init__(self, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        noise = torch.randint(0, 255, (60, 70), dtype=torch.uint8)
        return noise, torch.randn(40, 50) + i, np.random.rand(30, 40) * i, i


class Odd:
    """What is not an ordinary tensor or array; for a collate function that keeps it."""

    def __init__(self):
        self.table = torch.arange(4000.0).reshape(40, 100)

    def __len__(self):
        return 11

    def __getitem__(self, i):
        big = torch.arange(5000.0) + i
        return {
            "view": self.table[i],
            "transposed": (torch.arange(6000.0).reshape(60, 100) * i).t(),
            "sliced": big[10:4000:3],
            "twice": (big, big),
            "scalar": torch.tensor(i),
            "empty": torch.empty(0, 3),
            "sparse": torch.eye(5).to_sparse(),
            "grad": torch.full((2000,), float(i), requires_grad=True),
            "conj": torch.full((3,), 1j * i).conj(),
            "bool": torch.ones(3000, dtype=torch.bool),
            "fortran": np.asfortranarray(np.full((50, 40), i)),
            "frozen": frozen(np.full((50, 40), i)),
            "objects": np.array([{"i": i}, "text"], dtype=object),
            "dates": np.full(300, i).astype("datetime64[s]"),
            "record": np.array([(i, i / 2)] * 200, dtype=[("a", "i4"), ("b", "f8")]),
            "big": bytes([i]) * 150_000,
            "array": bytearray([i]) * 9000,
            "none": None,
        }


@functools.cache
def folder():
    """A folder of small files, there until the process ends."""
    made = Path(tempfile.mkdtemp(prefix="headrace-corpus-"))
    maker = os.getpid()
    atexit.register(lambda: os.getpid() == maker and shutil.rmtree(made, ignore_errors=True))
    for i in range(26):
        (made / f"{i:02}.bin").write_bytes(bytes([i]) * (700 + 300 * i))
    time.sleep(0.03)  # younger than a clock tick, a file may still change unseen
    return made


class Cropped:
    """Files, named in `samples` as torchvision's folders do, cropped at random."""

    def __init__(self):
        self.samples = [(str(path), i % 3) for i, path in enumerate(sorted(folder().iterdir()))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        path, label = self.samples[i]
        with open(path, "rb") as file:  # noqa: PTH123 - as users write it
            data = file.read()
        begin = random.randrange(100)
        crop = torch.frombuffer(bytearray(data[begin : begin + 500]), dtype=torch.uint8)
        return crop.float() * torch.rand(()), label


class Unlisted:
    """Two files for each sample, in no attribute that anybody knows."""

    def __init__(self):
        self.where = folder()

    def __len__(self):
        return 25

    def __getitem__(self, i):
        first = (self.where / f"{i:02}.bin").read_bytes()
        with (self.where / f"{i + 1:02}.bin").open("rb") as file:
            file.seek(int(torch.randint(50, ())))
            second = file.read(40)
        return first[:3], second, np.random.rand()


def frozen(array):
    array.flags.writeable = False
    return array


class Batched:
    """Fetches whole batches; what it is given must be a plain list."""

    def __len__(self):
        return 19

    def __getitem__(self, i):
        return torch.tensor([i, i])

    def __getitems__(self, indices):
        assert type(indices) is list
        return [torch.tensor([i, len(indices)]) for i in indices]


class Stream(torch_data.IterableDataset):
    """Divides itself among workers; shuffles with the worker's own random numbers."""

    def __init__(self, length=29):
        self.length = length

    def __iter__(self):
        info = torch_data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(worker, self.length, workers):
            yield i, torch.rand(2), random.random()


class StatefulStream(torch_data.IterableDataset):
    """An iterable that knows where it stands, as torchdata has it."""

    def __init__(self):
        self.at = 0
        self.restored = False

    def __iter__(self):
        info = torch_data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at < 40:
            i, self.at = self.at, self.at + 1
            if i % workers == worker:
                yield i, torch.rand(1).item(), self.restored
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.restored = True


class Fickle(torch_data.Sampler):
    """Draws from all generators when asked for the next index, skips, repeats and stops early."""

    def __init__(self, length):
        self.length = length
        self.own = random.Random(5)

    def __iter__(self):
        for _ in range(self.length):
            yield self.own.randrange(self.length)
            if random.random() < 0.3:
                yield int(torch.randint(self.length, ()))
            if np.random.rand() > 0.95:
                return


class Eager(torch_data.Sampler):
    """Draws everything when it is asked for its iterator, and counts epochs itself."""

    def __init__(self, length):
        self.length = length
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(self.length).tolist())

    def __len__(self):
        return self.length


def keep(samples):
    return samples


def columns(samples):
    """A collate function that draws random numbers and calls torch's."""
    return {"batch": torch_data.default_collate([s["label"] for s in samples]), "r": torch.rand(1)}


def reseed(worker_id):
    """A worker_init_fn as users write it."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed + worker_id)


def weights(n):
    return torch.arange(1.0, n + 1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


# Each case makes (data set, arguments of the loader) anew: samplers and generators have state.
CASES = {
    "plain": lambda: (Nested(), {"batch_size": 4}),
    "shuffled": lambda: (Nested(), {"batch_size": 4, "shuffle": True}),
    "generator": lambda: (
        Nested(),
        {"batch_size": 5, "shuffle": True, "generator": generator(3), "drop_last": True},
    ),
    "large": lambda: (Large(), {"batch_size": 3, "shuffle": True}),
    "odd": lambda: (Odd(), {"batch_size": 2, "collate_fn": keep}),
    "unbatched": lambda: (Nested(), {"batch_size": None}),
    "getitems": lambda: (Batched(), {"batch_size": 4, "shuffle": True}),
    "batch sampler": lambda: (Batched(), {"batch_sampler": [[3, 1], [2], [5, 5, 0]]}),
    "weighted": lambda: (
        Nested(),
        {"batch_size": 4, "sampler": torch_data.WeightedRandomSampler(weights(23), 30)},
    ),
    "subset sampler": lambda: (
        Nested(),
        {"batch_size": 4, "sampler": torch_data.SubsetRandomSampler([9, 3, 4, 4, 1, 0, 2])},
    ),
    "with replacement": lambda: (
        Nested(),
        {
            "batch_size": 4,
            "sampler": torch_data.RandomSampler(
                range(23), replacement=True, num_samples=50, generator=generator(8)
            ),
        },
    ),
    "distributed": lambda: (
        Nested(),
        {"batch_size": 3, "sampler": DistributedSampler(range(23), num_replicas=2, rank=1, seed=4)},
    ),
    "fickle": lambda: (Nested(), {"batch_size": 3, "sampler": Fickle(23)}),
    "eager": lambda: (Nested(), {"batch_size": 3, "sampler": Eager(23)}),
    "collate": lambda: (Nested(), {"batch_size": 4, "shuffle": True, "collate_fn": columns}),
    "concat": lambda: (
        torch_data.ConcatDataset([Nested(5), torch_data.Subset(Nested(), [3, 1, 22, 9])]),
        {"batch_size": 2, "shuffle": True},
    ),
    "subset": lambda: (
        torch_data.Subset(Nested(), [7, 3, 21, 0, 5]),
        {"batch_size": 2, "shuffle": True},
    ),
    "tensors": lambda: (
        torch_data.TensorDataset(torch.arange(165.0).reshape(33, 5), torch.arange(33)),
        {"batch_size": 8, "shuffle": True},
    ),
    "files": lambda: (Cropped(), {"batch_size": 3, "shuffle": True}),
    "files, learned": lambda: (Unlisted(), {"batch_size": 4, "collate_fn": keep}),
    "files, weighted": lambda: (
        Cropped(),
        {"batch_size": 4, "sampler": torch_data.WeightedRandomSampler(weights(26), 30)},
    ),
    "files, distributed": lambda: (
        Cropped(),
        {"batch_size": 3, "sampler": DistributedSampler(range(26), num_replicas=2, rank=0, seed=4)},
    ),
    "iterable": lambda: (Stream(), {"batch_size": 4}),
    "iterable, drop last": lambda: (Stream(), {"batch_size": 4, "drop_last": True}),
    "iterable, unbatched": lambda: (Stream(9), {"batch_size": None}),
}

WORKER_CASES = {
    "worker_init_fn": lambda: (Nested(), {"batch_size": 4, "worker_init_fn": reseed}),
    "persistent": lambda: (
        Nested(),
        {"batch_size": 4, "shuffle": True, "persistent_workers": True},
    ),
    "persistent, iterable": lambda: (Stream(), {"batch_size": 4, "persistent_workers": True}),
    "deep": lambda: (Nested(), {"batch_size": 1, "shuffle": True, "prefetch_factor": 7}),
}


class Everything:
    """Several data sets in one, so that one start of workers compares many kinds of samples."""

    def __init__(self):
        self.kinds = [Nested(9), Large(5), Odd(), torch_data.Subset(Nested(), [4, 2])]
        self.places = [(k, i) for k, kind in enumerate(self.kinds) for i in range(len(kind))]

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        kind, i = self.places[index]
        return kind, self.kinds[kind][i]


def everything(samples):
    """Collate what can be collated, keep the rest."""
    kinds = collections.defaultdict(list)
    for kind, sample in samples:
        kinds[kind].append(sample)
    return {
        kind: torch_data.default_collate(found) if kind != 2 else found
        for kind, found in kinds.items()
    }
