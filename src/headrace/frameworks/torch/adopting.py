"""Adopting: a headrace loader in the place of one that somebody else made.

Libraries that divide data among processes take a user's loader apart and build one of torch's own
class. `adopt` builds it again as a headrace `DataLoader`, of the same parts: data set, sampler, workers.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from typing import Any

from torch.utils import data as torch_data

from headrace.frameworks.torch.dataloader import DataLoader

__all__ = ["adopt", "keep_through_accelerate"]

log = logging.getLogger("headrace.torch")


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


def keep_through_accelerate() -> None:
    """Let Accelerate's `prepare` return headrace's loaders where it was given one.

    It builds a loader of torch's own class from the parts of the one it is given, and would drop ours,
    with its state, without a word. Loaders of other classes are left to it.
    """
    theirs: Any = sys.modules.get("accelerate.accelerator")
    prepare = getattr(theirs, "prepare_data_loader", None)
    if prepare is None:
        log.warning(
            "Accelerate builds a loader of torch's own class from this one, without its state_dict(): "
            "call headrace.torch.adopt(...) on what prepare returns"
        )
        return
    if getattr(prepare, "_keeps_headrace", False):
        return

    @functools.wraps(prepare)
    def kept(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(dataloader, *args, **kwargs)
        return adopt(prepared) if isinstance(dataloader, DataLoader) else prepared

    kept._keeps_headrace = True  # type: ignore[attr-defined] # noqa: SLF001
    theirs.prepare_data_loader = kept


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
    if hasattr(loader, "snapshot_every_n_steps"):  # torchdata's
        arguments["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
    return arguments
