"""Trains a small network on images with PyTorch DDP (gloo), and resumes exactly.

    train_ddp.py CHECKPOINTS LOG [--epochs 1] [--pace 0.0]

An ordinary script: what is headrace's are the store, the loader and the two lines with `run`. `seen` counts the
samples that the model has learned from, for the test.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.torch import StoreLoader

SIDE = 16


def without_compiler() -> None:
    """DDP and optimizers ask torch's compiler for a setting or two, and import all of it for that.

    That is six seconds of CPU for each of the eight ranks: a test has not got them.
    """
    compiler = types.ModuleType("torch._dynamo")
    compiler.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # type: ignore[attr-defined]
    compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    compiler.graph_break = lambda: None  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = torch._dynamo = compiler


def decode(data: bytes) -> torch.Tensor:
    """An image as float32, shape (3, SIDE, SIDE)."""
    with Image.open(io.BytesIO(data)) as image:
        small = image.convert("RGBA").resize((SIDE, SIDE)).convert("RGB")
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float().div(255)


class Seen(nn.Module):
    """How often each sample was seen by this rank."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(samples, dtype=torch.int64))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.0)
    given = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    without_compiler()
    rank = dist.get_rank()
    given.log.mkdir(parents=True, exist_ok=True)
    log = (given.log / f"rank-{rank}.{hr.cluster.restarts()}.{os.getpid()}").open("w")

    with hr.open(os.environ["HEADRACE_STORE"]) as store, StoreLoader(
        store, 2, shuffle=True, seed=3, decode=decode_with_index, threads=1, collate_fn=collate,
        tail="exact",
    ) as loader:  # fmt: skip
        network = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, len(store.classes)))
        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = Seen(len(store))
        run = hr.cluster.resume(
            given.checkpoints,
            save_every=3,
            loader=loader,
            model=model,
            optimizer=optimizer,
            seen=seen,
        )
        while loader.epoch < given.epochs:
            for images, labels, indices in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.counts[indices] += 1
                log.write(json.dumps([0, run.steps + 1, indices.tolist()]) + "\n")
                log.flush()
                time.sleep(given.pace)
                if run.step():
                    return
        run.save()
        hr.checkpoint.wait()
        figures = store.objects.figures()
        print(
            f"rank {rank} ends at step {run.steps}, loss {loss.item():.4f}, {figures}", flush=True
        )
    dist.destroy_process_group()


def decode_with_index(data: bytes, sample: object) -> tuple[torch.Tensor, int]:
    """The image and which sample it is."""
    return decode(data), sample.index  # type: ignore[attr-defined]


def collate(items: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A list of ((image, index), label) as three tensors."""
    images = torch.stack([image for (image, _), _ in items])
    labels = torch.tensor([label for _, label in items])
    return images, labels, torch.tensor([index for (_, index), _ in items])


if __name__ == "__main__":
    main()
