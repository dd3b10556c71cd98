"""What the scripts of this folder share: their arguments, loaders by name, and a record of what they consumed.

The scripts themselves are written as a user of each framework writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import uuid
from pathlib import Path

LOADERS = ("loader", "store", "drop-in", "torch", "drop-in sharded", "torch sharded")


def arguments(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, help="a folder with files/ and packed.hr")
    parser.add_argument("out", type=Path, help="where each process leaves what it consumed")
    parser.add_argument("--loaders", nargs="+", default=["loader"], choices=LOADERS)
    parser.add_argument("--batch-size", type=int, default=15)
    parser.add_argument("--tail", choices=("pad", "drop", "exact"))
    parser.add_argument("--workers", type=int, default=0, help="of loaders that have some")
    parser.add_argument("--hook", action="store_true", help="make the loader in a framework's hook")
    parser.add_argument("--prepare", action="store_true", help="hand the loader to the framework")
    parser.add_argument("--early", action="store_true", help="make it before ranks are known")
    return parser.parse_args(words)


def loader_named(name, args, collate_fn=None):
    """A loader as a user makes one: nobody says a rank, except torch's own sampler where it is asked for."""
    if name == "loader":
        import headrace as hr

        return hr.loader(args.data / "packed.hr", args.batch_size, seed=7, tail=args.tail)
    from torch_data import Files, number

    if name == "store":
        from headrace.torch import StoreLoader

        return StoreLoader(
            args.data / "packed.hr", args.batch_size, shuffle=True, seed=7, tail=args.tail,
            decode=number, collate_fn=collate_fn, num_workers=args.workers,
        )  # fmt: skip
    import torch
    from torch.utils.data.distributed import DistributedSampler

    if name.startswith("torch"):
        from torch.utils.data import DataLoader
    else:
        from headrace.torch import DataLoader
    files = Files(args.data / "files")
    sharded = name.endswith("sharded")
    return DataLoader(
        files, args.batch_size, shuffle=None if sharded else True,
        sampler=DistributedSampler(files, seed=7) if sharded else None,
        generator=torch.Generator().manual_seed(7), collate_fn=collate_fn, num_workers=args.workers,
    )  # fmt: skip


def numbers_of(batch):
    """The samples of a batch: each says in its bytes which one it is."""
    if isinstance(batch, dict):
        return batch["number"].tolist()
    if isinstance(batch, (list, tuple)):
        return batch[0].tolist()
    return [int(bytes(batch[i])) for i in range(len(batch))]


def record(args, name, numbers):
    """Leave what this process consumed; the judge counts over all of them."""
    path = args.out / f"{name}-{os.getpid()}-{uuid.uuid4().hex}.json"
    path.write_text(json.dumps(list(numbers)))


def consume(args, name, loader=None):
    """An epoch of a loader, one step after the other."""
    numbers = []
    for batch in loader_named(name, args) if loader is None else loader:
        numbers += numbers_of(batch)
    record(args, name, numbers)
