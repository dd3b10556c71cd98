"""Data sets and samplers that fail; spawned workers import this."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch.utils import data as torch_data


class Numbers:
    def __init__(self, length=20):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return torch.full((3000,), i)


class Raising(Numbers):
    """Raises in the middle."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __getitem__(self, i):
        if i == 9:
            raise self.error
        return super().__getitem__(i)


class RaisingInit(torch_data.IterableDataset):
    def __iter__(self):
        raise LookupError("no iterator")


class Dying(Numbers):
    """Kills its worker."""

    def __getitem__(self, i):
        if i == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class Slow(Numbers):
    def __getitem__(self, i):
        time.sleep(30)
        return i


class Unpicklable(Numbers):
    def __init__(self):
        super().__init__()
        self.hidden = lambda: None


class Megabytes(Numbers):
    """A sample is a megabyte."""

    def __getitem__(self, i):
        return torch.full((1 << 20,), i % 256, dtype=torch.uint8)


class Inline(Numbers):
    """A sample travels in the message itself."""

    def __getitem__(self, i):
        return i.to_bytes(4, "little") * 600


class BadBatch:
    """A batch that cannot be pickled."""

    def __init__(self, samples):
        self.samples = samples

    def __reduce__(self):
        raise TypeError("a batch that stays where it is")


class RaisingSampler:
    def __init__(self, after):
        self.after = after

    def __iter__(self):
        yield from range(self.after)
        raise ValueError("the sampler is broken")


def keep(samples):
    return samples


class Files(Numbers):
    """Each sample is a file, which begins with the sample's index."""

    def __init__(self, folder, length, raises_at=None):
        super().__init__(length)
        self.samples = [(str(Path(folder) / f"{i:04}.bin"), 0) for i in range(length)]
        self.raises_at = raises_at

    @staticmethod
    def content(i):
        return i.to_bytes(4, "little") * (500 + 300 * (i % 7))

    @classmethod
    def write(cls, folder, length):
        for i in range(length):
            (Path(folder) / f"{i:04}.bin").write_bytes(cls.content(i))
        time.sleep(0.03)  # younger than a clock tick, a file may still change unseen

    def __getitem__(self, i):
        with open(self.samples[i][0], "rb") as file:  # noqa: PTH123 - as users write it
            data = file.read()
        if i == self.raises_at:
            raise ArithmeticError("in the middle")
        return i, data


class DyingFiles(Files):
    """Kills its worker while files are read ahead."""

    def __getitem__(self, i):
        if i == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class UnpicklableFiles(Files):
    def __init__(self, folder, length):
        super().__init__(folder, length)
        self.hidden = lambda: None


class Short:
    """A sampler that says it has more than it gives."""

    def __init__(self, indices, says):
        self.indices = indices
        self.says = says

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return self.says
