"""Samplers: how far ahead their indices may be drawn without anyone being able to tell.

Torch draws a batch's indices when the batch is asked for. Whoever draws earlier must know that the
sampler neither takes random numbers that others take too, nor looks at what may change meanwhile.
That is known of torch's own samplers, by exact type, and of nothing else.
"""

from __future__ import annotations

from typing import Any

from torch.utils import data as torch_data
from torch.utils.data.distributed import DistributedSampler

__all__ = ["batches_drawable"]

ALL = 1 << 62
"""Every batch of the epoch."""

# These draw all their random numbers before they give the first index.
_DRAWS_AT_ONCE = (
    torch_data.SequentialSampler,
    torch_data.SubsetRandomSampler,
    torch_data.WeightedRandomSampler,
    DistributedSampler,
    # A fixed order, given as it is.
    list,
    tuple,
    range,
)


def batches_drawable(batch_sampler: Any) -> int:
    """Return how many batches of an epoch may be drawn before their time; 0: none.

    Once the first batch was drawn in its time, that is: with it the random numbers are.
    """
    if type(batch_sampler) is not torch_data.BatchSampler:
        return 0
    sampler = batch_sampler.sampler
    if type(sampler) in _DRAWS_AT_ONCE:
        return ALL
    if type(sampler) is not torch_data.RandomSampler:
        return 0
    if sampler.generator is None:
        return ALL  # it has a generator of its own, which nobody sees
    if sampler.replacement or sampler.num_samples > len(sampler.data_source):
        return 0
    # It draws from the user's generator once more when it is exhausted: that has to wait.
    return int((sampler.num_samples - 1) // batch_sampler.batch_size)
