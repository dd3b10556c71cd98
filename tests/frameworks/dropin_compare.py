"""Comparing batches bit for bit, and running a loader from a known beginning."""

# ruff: noqa: NPY002 - users draw from the global generators
from __future__ import annotations

import random

import numpy as np
import torch


def same(a, b):
    """Whether two batches are equal to the last bit, in type, shape, layout and content."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.strides == b.strides
            and a.flags.writeable == b.flags.writeable
            and (a.tolist() == b.tolist() if a.dtype.hasobject else a.tobytes() == b.tobytes())
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_tensor(a, b):
    if a.layout is not torch.strided:
        return same_tensor(a.to_dense(), b.to_dense())
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.requires_grad == b.requires_grad
        and a.is_conj() == b.is_conj()
        and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        and bytes_of(a) == bytes_of(b)
    )


def bytes_of(tensor):
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def seed(value=11):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def randomness():
    """What the generators of this process would draw next."""
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    return drawn


def epochs(loader_class, case, count=2, **options):
    """The batches of some epochs from a known beginning, and the generators' state afterwards."""
    seed()
    dataset, arguments = case()
    loader = loader_class(dataset, **{**arguments, **options})
    batches = [list(loader) for _ in range(count)]
    return batches, randomness()
