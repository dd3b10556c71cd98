"""Adopting: a headrace loader in the place of one that somebody else made.

Libraries that divide data among processes take a user's loader apart and build one of torch's own
class. `adopt` builds it again as a headrace `DataLoader`, of the same parts: data set, sampler, workers.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils import data as torch_data

from headrace.frameworks.torch.dataloader import DataLoader

__all__ = ["adopt"]


def adopt(loader: Any) -> Any:
    """Return a loader like this one that loads through headrace.

    Args:
        loader: a `torch.utils.data.DataLoader`, which is left as it is; or what Accelerate's `prepare`
            or `skip_first_batches` returned, whose inner loader is replaced.

    Returns:
        A headrace `DataLoader` of the same parts; or the object that was given, if Accelerate made it.

    Raises:
        TypeError: it is no loader of torch's.
    """
    if isinstance(vars(loader).get("base_dataloader"), torch_data.DataLoader):
        loader.base_dataloader = adopt(loader.base_dataloader)
        loader.dl_state_dict = loader.base_dataloader.state_dict()
        return loader
    if not isinstance(loader, torch_data.DataLoader):
        raise TypeError(f"loader is a {type(loader).__name__}, expected a torch DataLoader")
    if isinstance(loader, DataLoader):
        return loader
    return DataLoader(**_arguments(loader))


def _arguments(loader: torch_data.DataLoader[Any]) -> dict[str, Any]:
    """The arguments that a loader was made with, from its attributes."""
    names = inspect.signature(torch_data.DataLoader.__init__).parameters
    arguments = {name: getattr(loader, name) for name in names if name not in {"self", "shuffle"}}
    if isinstance(loader.dataset, torch_data.IterableDataset):
        arguments |= {"sampler": None, "batch_sampler": None}
    elif loader.batch_sampler is not None:
        arguments |= {"batch_size": 1, "sampler": None, "drop_last": False}
    if loader.num_workers == 0:
        arguments["prefetch_factor"] = None
    return arguments
