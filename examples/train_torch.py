"""Train a small network on a folder of images with PyTorch: one import makes it a headrace program.

    python examples/train_torch.py photos/ --epochs 2 --workers 2

The script is an ordinary one: its own data set class opens files with Pillow, its augmentation draws
from torch's random numbers in the workers. The line that names headrace is the only one that does;
with torch's `from torch.utils.data import DataLoader` in its place the losses are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from headrace.torch import DataLoader

SIDE = 32


class ImageFolder(Dataset):
    """Images in a folder per class, as torchvision reads them."""

    def __init__(self, root: Path) -> None:
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        self.samples = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*.*"))
        ]

    def __len__(self) -> int:
        """Return how many images there are."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image as float32, shape (3, SIDE, SIDE), half of them mirrored, and its class."""
        path, label = self.samples[index]
        with Image.open(path) as image:
            small = image.convert("RGBA").resize((SIDE, SIDE))
        white = Image.new("RGBA", small.size, "white")  # what is transparent shows it
        pixels = np.array(Image.alpha_composite(white, small).convert("RGB"))
        tensor = torch.from_numpy(pixels).permute(2, 0, 1).float().div(255)
        if torch.rand(()) < 0.5:
            tensor = tensor.flip(2)
        return tensor, label


def network(classes: int) -> nn.Module:
    """Return two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 4) ** 2, classes),
    )


def main() -> None:
    """Train, and print each epoch's mean loss and accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="folder with a folder of PNG files per class")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums in one order: losses can be compared to the last digit
    dataset = ImageFolder(options.root)
    loader = DataLoader(
        dataset, options.batch_size, shuffle=True, num_workers=options.workers, drop_last=True
    )
    model = network(len(dataset.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(options.epochs):
        losses, hits = [], 0
        for images, labels in loader:
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            hits += int((scores.argmax(1) == labels).sum())
        mean, accuracy = sum(losses) / len(losses), hits / (len(losses) * options.batch_size)
        print(f"epoch {epoch}: loss {mean!r}, accuracy {accuracy:.3f}, {len(losses)} batches")


if __name__ == "__main__":
    main()
