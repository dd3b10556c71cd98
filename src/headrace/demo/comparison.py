"""Comparison: headrace beside torch's own DataLoader, over the same images.

Three times: training, where each loader feeds the same steps of the same network; decoded images alone;
and files alone, where nothing is decoded and the loaders' own cost is what is left.
Everything is in the page cache, for every loader: the demo has just written or read it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import data as torch_data

from headrace import api
from headrace.demo.images import SEED
from headrace.demo.training import (
    IMAGE_PIXELS,
    IMAGES,
    decode,
    make_model,
    take_step,
    training_threads,
)
from headrace.torch import StoreLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace.demo.images import DemoOptions, PackedImages


@dataclass(frozen=True, slots=True)
class LoaderPass:
    """One loader's pass."""

    work: str
    """`training`, `decoding` or `delivery`."""
    loader: str
    samples: int
    seconds: float
    first_s: float
    """Seconds to the first batch, start of workers included."""
    stall_s: float
    """Seconds that the consumer waited for batches, the first one included."""
    samples_per_s: float


class _Files(torch_data.Dataset[Any]):
    """What a PyTorch user writes today: a list of files, opened one by one."""

    def __init__(self, samples: list[tuple[str, int]], *, decoded: bool) -> None:
        self._samples = samples
        self._decoded = decoded

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self._samples[index]
        data = Path(path).read_bytes()
        return (decode(data) if self._decoded else data), label


def compare(
    packed: PackedImages, options: DemoOptions, progress: Callable[[str], None] = lambda _what: None
) -> list[LoaderPass]:
    """Measure each loader once; the first pass of each kind is headrace's."""
    batch_size = options.batch_size
    with api.open(packed.train) as store:
        paths = [str(packed.source / name) for name in store.names]
        assert store.labels is not None
        samples = list(zip(paths, map(int, store.labels), strict=True))

    def headrace(function: Any) -> Iterable[Any]:
        return StoreLoader(packed.train, batch_size, seed=SEED, decode=function)

    def torch_loader(workers: int, *, decoded: bool) -> Iterable[Any]:
        return torch_data.DataLoader(
            _Files(samples, decoded=decoded), batch_size, shuffle=True,
            num_workers=workers, collate_fn=None if decoded else list,
        )  # fmt: skip

    def open_and_read() -> Iterator[list[bytes]]:
        """The least that Python can do: no loader at all."""
        order = torch.randperm(len(paths)).tolist()
        for at in range(0, len(order), batch_size):
            yield [Path(paths[i]).read_bytes() for i in order[at : at + batch_size]]

    loaders: list[tuple[str, str, Callable[[], Iterable[Any]]]] = [
        *(
            (work, name, make)
            for work in ("training", "decoding")
            for name, make in (
                ("headrace, Images", lambda: headrace(IMAGES)),
                ("headrace, PIL in threads", lambda: headrace(decode)),
                ("torch, 0 workers", lambda: torch_loader(0, decoded=True)),
                ("torch, 2 workers", lambda: torch_loader(2, decoded=True)),
            )
        ),
        ("delivery", "headrace", lambda: headrace(None)),
        ("delivery", "open and read", open_and_read),
        ("delivery", "torch, 0 workers", lambda: torch_loader(0, decoded=False)),
        ("delivery", "torch, 2 workers", lambda: torch_loader(2, decoded=False)),
    ]
    steps = -(-options.compare_samples // batch_size)
    passes = []
    threads = torch.get_num_threads()
    torch.set_num_threads(training_threads())
    try:
        for work, name, make in loaders:
            progress(f"{work}: {name}")
            step = _train_step(len(packed.classes), batch_size) if work == "training" else None
            batches = make() if work == "delivery" else islice(make(), steps)
            passes.append(_measure(work, name, batches, step))
    finally:
        torch.set_num_threads(threads)
    return passes


def _train_step(classes: int, batch_size: int) -> Callable[[Any], object]:
    model = make_model(classes, SEED)
    optimizer = torch.optim.AdamW(model.parameters())
    # The first step of a process makes kernels and buffers: no loader should pay for that.
    size = (batch_size, 3, IMAGE_PIXELS, IMAGE_PIXELS)
    nothing = torch.zeros(size, dtype=torch.uint8), torch.zeros(batch_size, dtype=torch.int64)
    take_step(model, optimizer, *nothing)
    return lambda batch: take_step(model, optimizer, *batch)


def _measure(
    work: str, name: str, batches: Iterable[Any], train: Callable[[Any], object] | None
) -> LoaderPass:
    samples, stall_s, first_s = 0, 0.0, 0.0
    started = asked_at = time.perf_counter()
    for batch in batches:
        got_at = time.perf_counter()
        stall_s += got_at - asked_at
        first_s = first_s or got_at - started
        if train is not None:
            train(batch)
        samples += len(batch if work == "delivery" else batch[1])
        asked_at = time.perf_counter()
    seconds = asked_at - started
    return LoaderPass(work, name, samples, seconds, first_s, stall_s, samples / seconds)
