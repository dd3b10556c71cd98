"""Trains a small network on files with PyTorch, or waits as an accelerator would; a way of loading is named.

    python -m benchmarks.programs.paper_torch JSON

Ways: `torch` (knows nothing of headrace), `prisma`, `dropin`, `store`. Models: `lenet`, `alexnet` (really
trained, on the processors), `accelerator` (steps of fixed time, kept by absolute deadlines). A sample's first
12 KiB are its pixels: decoding is left out. Before each epoch, `begin` is printed and a line of the
input awaited; `end` likewise after the last; then a line of JSON.
"""

import contextlib
import json
import os
import random
import sys
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.programs.prisma_stage import Server, read_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

SIDE = 64
PIXELS = 3 * SIDE * SIDE


def tensors(data, *_):
    head = data[:PIXELS]
    pixels = np.frombuffer(bytes(head).ljust(PIXELS, b"\0"), np.uint8).reshape(3, SIDE, SIDE)
    return torch.from_numpy(pixels.copy()), int.from_bytes(data[:8], "little"), len(data)


class Files(Dataset):
    def __init__(self, paths, read=read_file):
        self.paths, self.read = paths, read

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return tensors(self.read(self.paths[index]))


class Shuffled(Sampler):
    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


def lenet():
    return nn.Sequential(
        nn.AvgPool2d(2), nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip


def alexnet():
    return nn.Sequential(
        nn.Conv2d(3, 24, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 64, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(),
        nn.Conv2d(96, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


class Network:
    def __init__(self, make):
        torch.manual_seed(1)
        self.network = make()
        self.optimiser = torch.optim.SGD(self.network.parameters(), 0.01)
        self.loss = 0.0

    def step(self, pixels, stamps, *, training):
        with contextlib.nullcontext() if training else torch.no_grad():
            loss = nn.functional.cross_entropy(self.network(pixels.float() / 255), stamps % 10)
        if training:
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            self.loss = float(loss)


class Accelerator:
    def __init__(self, step_s):
        self.step_s, self.due, self.loss = step_s, 0.0, None

    def step(self, _pixels, _stamps, *, training):
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1000))
        whole = self.step_s if training else self.step_s / 3
        now = time.perf_counter()
        self.due = max(self.due, now) + whole
        time.sleep(max(0.0, self.due - now))


def simulated(spec, folder):
    """Of what reads in this process by headrace; the other ways are slowed by the shim."""
    if spec["simulate"] and spec["way"] == "dropin":
        from headrace.testing import simulated_files

        return simulated_files(spec["simulate"], folder)
    return contextlib.nullcontext()


def loaders(spec, train, valid):
    """Of training and of validation, and what is told which epoch it is."""
    way, workers, batch = spec["way"], spec["workers"], spec["batch"]
    if way == "store":
        from headrace.torch import DataLoader as Stored

        options = {"ram_bytes": spec["ram_bytes"], "simulate": spec["simulate"]}
        return *(
            Stored(spec["stores"][k], batch, shuffle=k == 0, seed=1, decode=tensors, **options)
            for k in (0, 1)
        ), None  # fmt: skip
    kind, read = DataLoader, read_file
    if way == "dropin":
        import headrace.torch

        kind = headrace.torch.DataLoader
    elif way == "prisma":
        given = []
        for epoch in range(spec["epochs"]):
            sampler = Shuffled(len(train))
            sampler.set_epoch(epoch)
            given += [train[k] for k in sampler]
        read = Server(given, spec["warm_up_s"], spec["socket"]).read
    sampler = DistributedSampler(train) if dist.is_initialized() else Shuffled(len(train))
    more = {"num_workers": workers, "persistent_workers": workers > 0}
    return (
        kind(Files(train, read), batch, sampler=sampler, **more),
        kind(Files(valid), batch, **more),
        sampler,
    )


def wait(word):
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(word, os.getpid(), flush=True)
        sys.stdin.readline()
    if dist.is_initialized():
        dist.barrier()


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)  # the other core is for loading
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    train, valid = (open(path).read().split("\n") for path in spec["lists"])
    networks = {"lenet": lenet, "alexnet": alexnet}
    model = (
        Network(networks[spec["model"]])
        if spec["model"] in networks
        else Accelerator(spec["step_s"])
    )
    seen = {"train_s": [], "valid_s": [], "bytes": 0, "samples": 0, "stamps": 0, "crc": 0}
    with simulated(spec, os.path.commonpath(train)):
        training, validation, sampler = loaders(spec, train, valid)
        for epoch in range(spec["epochs"]):
            if sampler is not None:
                sampler.set_epoch(epoch)
            wait("begin")
            for name, loader in (("train_s", training), ("valid_s", validation)):
                began = time.perf_counter()
                for one in loader:
                    pixels, stamps, sizes = one[0] if spec["way"] == "store" else one
                    model.step(pixels, stamps, training=name == "train_s")
                    seen["bytes"] += int(sizes.sum())
                    seen["samples"] += len(sizes)
                    seen["stamps"] += int(stamps.sum())
                    seen["crc"] = zlib.crc32(stamps.numpy().tobytes(), seen["crc"])
                seen[name].append(time.perf_counter() - began)
        wait("end")
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(seen | {"loss": model.loss}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
