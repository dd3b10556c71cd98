"""Comparison: headrace beside torch's own DataLoader, over the same images.

Twice: training, where each loader feeds the same steps of the same network with the same decode
function, and delivery alone, where nothing is decoded and the loaders' own cost is what is left.
Everything is in the page cache, for every loader: the demo has just written or read it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils import data as torch_data

from headrace import api
from headrace.demo.images import SEED
from headrace.demo.training import IMAGE_PIXELS, decode, make_model, normalized, training_threads
from headrace.torch import StoreLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace.demo.images import DemoOptions, PackedImages


@dataclass(frozen=True, slots=True)
class LoaderPass:
    """One loader's pass."""

    work: str
    """`training` or `delivery`."""

    loader: str
    samples: int
    seconds: float
    first_s: float
    """Seconds to the first batch, start of workers included."""
    stall_s: float
    """Seconds that the consumer waited for batches, the first one included."""

    @property
    def samples_per_s(self) -> float:
        """Samples by seconds."""
        return self.samples / self.seconds


class _Files(torch_data.Dataset[Any]):
    """What a PyTorch user writes today: a list of files, opened one by one."""

    def __init__(self, paths: list[str], labels: list[int], *, decoded: bool) -> None:
        self._paths = paths
        self._labels = labels
        self._decoded = decoded

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        data = Path(self._paths[index]).read_bytes()
        return (decode(data) if self._decoded else data), self._labels[index]


def _open_and_read(paths: list[str], options: DemoOptions) -> Iterator[list[bytes]]:
    """The least that Python can do: no loader at all."""
    order = torch.randperm(len(paths)).tolist()
    for start in range(0, len(order), options.batch_size):
        yield [Path(paths[i]).read_bytes() for i in order[start : start + options.batch_size]]


def compare(
    packed: PackedImages, options: DemoOptions, progress: Callable[[str], None] = lambda _what: None
) -> list[LoaderPass]:
    """Measure each loader once; the first pass of each kind is headrace's."""
    with api.open(packed.train) as store:
        paths = [str(packed.source / name) for name in store.names]
        assert store.labels is not None
        labels = [int(label) for label in store.labels]

    def headrace(function: Any) -> Iterable[Any]:
        return StoreLoader(packed.train, options.batch_size, seed=SEED, decode=function)

    def torch_loader(workers: int, *, decoded: bool) -> Iterable[Any]:
        return torch_data.DataLoader(
            _Files(paths, labels, decoded=decoded), options.batch_size, shuffle=True,
            num_workers=workers, collate_fn=None if decoded else list,
        )  # fmt: skip

    training: dict[str, Callable[[], Iterable[Any]]] = {
        "headrace, threads": lambda: headrace(decode),
        "torch, 0 workers": lambda: torch_loader(0, decoded=True),
        "torch, 2 workers": lambda: torch_loader(2, decoded=True),
    }
    delivery: dict[str, Callable[[], Iterable[Any]]] = {
        "headrace": lambda: headrace(None),
        "open and read": lambda: _open_and_read(paths, options),
        "torch, 0 workers": lambda: torch_loader(0, decoded=False),
        "torch, 2 workers": lambda: torch_loader(2, decoded=False),
    }
    passes = []
    threads = torch.get_num_threads()
    torch.set_num_threads(training_threads())
    try:
        for name, make in training.items():
            progress(f"training: {name}")
            steps = -(-options.compare_samples // options.batch_size)
            train = _train_step(len(packed.classes), options.batch_size)
            passes.append(_measure("training", name, make(), steps, train))
        for name, make in delivery.items():
            progress(f"delivery: {name}")
            passes.append(_measure("delivery", name, make()))
    finally:
        torch.set_num_threads(threads)
    return passes


def _train_step(classes: int, batch_size: int) -> Callable[[Any], None]:
    model = make_model(classes, SEED)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        images, labels = batch
        loss = functional.cross_entropy(model(normalized(images)), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    # The first step of a process makes kernels and buffers: no loader should pay for that.
    size = (batch_size, 3, IMAGE_PIXELS, IMAGE_PIXELS)
    step((torch.zeros(size, dtype=torch.uint8), torch.zeros(batch_size, dtype=torch.int64)))
    return step


def _measure(
    work: str,
    name: str,
    batches: Iterable[Any],
    steps: int | None = None,
    train: Callable[[Any], None] | None = None,
) -> LoaderPass:
    samples, stall_s, first_s = 0, 0.0, 0.0
    started = asked_at = time.perf_counter()
    for batch in islice(batches, steps):
        got_at = time.perf_counter()
        stall_s += got_at - asked_at
        first_s = first_s or got_at - started
        if train is not None:
            train(batch)
        samples += len(batch if train is None else batch[1])
        asked_at = time.perf_counter()
    return LoaderPass(work, name, samples, asked_at - started, first_s, stall_s)
