"""Train a small network with PyTorch DDP on every node of a job; stop and start it at any time.

    headrace launch --stage photos/ --ranks-per-node 2 examples/train_ddp.py --epochs 2

The folder has one subfolder per class. It goes on with the very next batch after a requeue, a time limit or a
node's death (from its last checkpoint then), because the loader's state is saved beside the model's.
Needs `pip install 'headrace[torch]'`.
"""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.torch import StoreLoader

SIDE = 32


def decode(data: bytes) -> torch.Tensor:
    """Return an image as float32, shape (3, SIDE, SIDE)."""
    with Image.open(io.BytesIO(data)) as image:
        small = image.convert("RGBA").resize((SIDE, SIDE))
    white = Image.new("RGBA", small.size, "white")
    pixels = np.array(Image.alpha_composite(white, small).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div(255)


def main() -> None:
    """Train, and print each epoch's last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="photos/", help="where nothing is staged")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    with (
        hr.open(os.environ.get("HEADRACE_STORE", options.data)) as store,
        StoreLoader(store, options.batch_size, shuffle=True, seed=7, decode=decode) as loader,
    ):
        assert store.classes is not None
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(8 * (SIDE // 2) ** 2, len(store.classes)),
        ).to(device)  # fmt: skip
        model = DistributedDataParallel(network)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        run = hr.cluster.resume(
            options.checkpoints, save_every=100, loader=loader, model=model, optimizer=optimizer
        )
        while (epoch := loader.epoch) < options.epochs:
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if run.step():
                    return
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}, step {run.steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
