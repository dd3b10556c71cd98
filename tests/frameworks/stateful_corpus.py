"""Data sets and samplers that say where they stand, in the ways that users write them."""

from __future__ import annotations

import random

import torch
from torch.utils import data as torch_data


def share(length):
    """The numbers that are this worker's, or all."""
    info = torch_data.get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return range(worker, length, workers)


class InDataset(torch_data.IterableDataset):
    """The state is the data set's; its iterator is a generator that begins anew unless told otherwise."""

    def __init__(self, length=11):
        self.length = length
        self.position, self.epoch, self.resumed = 0, 0, None

    def __iter__(self):
        self.position, self.resumed = self.resumed or 0, None
        for i in share(self.length)[self.position :]:
            self.position += 1
            yield torch.tensor([i, self.epoch])
        self.position = 0
        self.epoch += 1

    def state_dict(self):
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.resumed, self.epoch = state["position"], state["epoch"]


class _Steps:
    def __init__(self, numbers):
        self.numbers, self.position, self.jump = numbers, 0, random.randrange(1000)

    def __iter__(self):
        return self

    def __next__(self):
        if self.position >= len(self.numbers):
            raise StopIteration
        self.position += 1
        return torch.tensor([self.numbers[self.position - 1], self.jump])

    def state_dict(self):
        return {"position": self.position, "jump": self.jump}

    def load_state_dict(self, state):
        self.position, self.jump = state["position"], state["jump"]


class InIterator(torch_data.IterableDataset):
    """Only the iterator has a state; it draws a random number when it is made."""

    def __init__(self, length=11):
        self.length = length

    def __iter__(self):
        return _Steps(share(self.length))


class Own(torch_data.IterableDataset):
    """Its own iterator, which knows nothing before `iter`, and forgets its place there."""

    def __init__(self, length=11):
        self.length = length
        self.epoch = 0

    def __iter__(self):
        self.numbers, self.position = share(self.length), 0
        self.epoch += 1
        return self

    def __next__(self):
        if self.position >= len(self.numbers):
            raise StopIteration
        self.position += 1
        return torch.tensor([self.numbers[self.position - 1], self.epoch])

    def state_dict(self):
        return {"at": [self.position, len(self.numbers)], "epoch": self.epoch}

    def load_state_dict(self, state):
        assert len(self.numbers) == state["at"][1]
        self.position, self.epoch = state["at"][0], state["epoch"]


class Counting(torch_data.Dataset):
    """A map-style data set that counts what it gave."""

    def __init__(self, length=11):
        self.length, self.given = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.given += 1
        return torch.tensor([i, self.given])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class NoState(Own):
    """Says that it has a state, and raises when it is asked."""

    def state_dict(self):
        raise ZeroDivisionError("no state today")


class Unpicklable(Own):
    """Its state stays where it is."""

    def state_dict(self):
        return {"lock": _Stuck()}


class _Stuck:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("a lock cannot be pickled")


class Resetting(torch_data.Sampler):
    """An order of its own, never the same; stands at the next epoch's beginning after its last index."""

    def __init__(self, length=11):
        self.length, self.order, self.position = length, None, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        if self.order is None:
            self.order = random.SystemRandom().sample(range(self.length), self.length)
        while self.position < self.length:
            self.position += 1
            yield self.order[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state):
        self.order, self.position = state["order"], state["position"]


class Remaining(Resetting):
    """Stays at the epoch's end after its last index, and goes back at the next `iter`."""

    loaded = None

    def __iter__(self):
        if self.order is None:
            self.order = random.SystemRandom().sample(range(self.length), self.length)
        self.position, self.loaded = self.loaded or 0, None
        while self.position < self.length:
            self.position += 1
            yield self.order[self.position - 1]

    def load_state_dict(self, state):
        self.order, self.loaded = state["order"], state["position"]


class IteratorsState(torch_data.Sampler):
    """Only its iterator knows the order."""

    def __init__(self, length=11):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(_Order(self.length))


class _Order:
    def __init__(self, length):
        self.order = random.SystemRandom().sample(range(length), length)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.order:
            raise StopIteration
        return self.order.pop()

    def state_dict(self):
        return {"order": self.order}

    def load_state_dict(self, state):
        self.order = state["order"]


def refuse(worker_id):
    """A worker_init_fn."""
    raise LookupError(f"worker {worker_id} has no data")
