"""The data as a torch user reads it, and a model that learns nothing from it."""

from __future__ import annotations

import torch


class Files(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.paths = sorted(str(path) for path in folder.rglob("*.txt"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:  # noqa: PTH123 - as users write it
            return number(file.read()), 0


def number(data):
    return torch.tensor(int(bytes(data)))


def as_dict(samples):
    """Batches as Hugging Face's Trainer takes them."""
    return {"number": torch.stack([sample[0] for sample in samples])}


class Model(torch.nn.Module):
    """Keeps which samples it was trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.numbers = []

    def forward(self, number):
        self.numbers += number.tolist()
        return {"loss": self.layer(number.float()[:, None]).mean()}
