"""Pixels to a GPU: are they right, are buffers page-locked, is none overwritten, and how fast is it?

    python benchmarks/device.py [--pictures 4096] [--batch 256] [--size 224] [--threads N] [--device cuda]

Packs made-up photographs (500 x 375 JPEG) into a temporary folder, or takes a store (--store). It checks, and
exits 1 if one fails:

* equal: pixels on the device beside those that the processor makes, uint8 bit for bit, bfloat16 and float32 to
  the last digit, over two epochs
* locked: CUDA says of every buffer that was sent that it is registered
* whole: while copies are slowed down by a busy side stream, each batch still is what the processor made

Then it prints images/s and GB/s of whole epochs with page-locked buffers and without, and of copies alone.
Without CUDA it says so and exits 2.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import leaving_nothing


def photographs(count: int) -> Any:
    """Pictures of smooth noise, 32 different ones."""
    from PIL import Image

    different = []
    for i in range(32):
        noise = np.random.default_rng(i).integers(0, 255, (24, 32, 3), np.uint8)
        out = io.BytesIO()
        Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC).save(
            out, "JPEG", quality=90
        )
        different.append(out.getvalue())
    return ((f"{i:06d}.jpg", different[i % 32], i % 10) for i in range(count))


def loader_over(store: Any, images: Any, options: argparse.Namespace, device: str | None) -> Any:
    """A loader of the same order, here or to the device."""
    from headrace.torch import DataLoader

    return DataLoader(
        store,
        options.batch,
        shuffle=True,
        seed=7,
        decode=images,
        threads=options.threads,
        device=device,
    )


def equal(store: Any, images: Any, options: argparse.Namespace, *, busy: bool = False) -> str:
    """What differs between the device's batches and the processor's; '' if nothing does."""
    import torch

    digit = 0.0 if images.dtype == "uint8" else torch.finfo(getattr(torch, images.dtype)).eps
    with (
        loader_over(store, images, options, None) as here,
        loader_over(store, images, options, options.device) as there,
    ):
        side = there._deliveries.to_device._device._stream  # noqa: SLF001
        ballast = torch.rand(4096, 4096, device=options.device)
        for epoch in range(2):
            kept = []
            for number, (sent, labels) in enumerate(there):
                kept.append((sent.clone(), labels.clone()))
                if busy:  # copies that come next wait behind this
                    with torch.cuda.stream(side):
                        for _ in range(8):
                            ballast = torch.nn.functional.normalize(ballast @ ballast)
                if number == options.check_batches:
                    break
            there.set_epoch(epoch + 1)
            for number, ((pixels, labels), (sent, there_labels)) in enumerate(
                zip(here, kept, strict=False)
            ):
                name = f"{images.dtype}, epoch {epoch}, batch {number}"
                if not torch.equal(labels, there_labels.cpu()):
                    return f"{name}: labels differ"
                apart = (pixels.double() - sent.cpu().double()).abs()
                if (apart > digit * (4 + 2 * pixels.double().abs())).any():
                    return f"{name}: pixels are up to {apart.max().item()} apart"
            here.set_epoch(epoch + 1)
    return ""


def locked(store: Any, images: Any, options: argparse.Namespace) -> str:
    """What is wrong with the page-locking; '' if nothing is."""
    import torch

    from headrace.frameworks.torch.device import ToDevice

    unlocked = []
    send = ToDevice.send

    def seen(self: Any, batch: Any, stage: Any) -> Any:
        transfer = send(self, batch, stage)
        if not torch.from_numpy(batch.pixels).is_pinned():
            unlocked.append(batch.pixels.shape)
        return transfer

    ToDevice.send = seen  # type: ignore[method-assign]
    try:
        with loader_over(store, images, options, options.device) as loader:
            for _ in loader:
                pass
            count = len(loader._deliveries.to_device.locked)  # noqa: SLF001
    finally:
        ToDevice.send = send  # type: ignore[method-assign]
    if unlocked:
        return f"{len(unlocked)} batches were sent from memory that CUDA does not know"
    print(f"  {count} buffers were locked for {len(loader)} batches")
    return "" if count else "no buffer was locked"


def rate(
    store: Any, images: Any, options: argparse.Namespace, *, locks: bool
) -> tuple[float, float]:
    """Images/s and GB/s over the bus of the second epoch; its consumer adds each batch up."""
    import torch

    with loader_over(store, images, options, options.device) as loader:
        loader._deliveries.to_device.locks = locks  # noqa: SLF001
        for _ in loader:
            pass
        torch.cuda.synchronize()
        begun_s, count = time.perf_counter(), 0
        for pixels, _ in loader:
            pixels.sum(dtype=torch.float32)
            count += len(pixels)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun_s
    host = replace(images, dtype="uint8", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return count / seconds, count * int(np.prod(host.shape)) / seconds / 1e9


def copies(images: Any, options: argparse.Namespace) -> None:
    """GB/s of copying one batch of uint8, from pageable and from page-locked memory."""
    import torch

    for kind, pinned in (("pageable", False), ("page-locked", True)):
        host = torch.zeros((options.batch, *images.shape), dtype=torch.uint8, pin_memory=pinned)
        there = torch.empty_like(host, device=options.device)
        for repeat in range(2):  # the first warms up
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            for _ in range(20):
                there.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun_s
            if repeat:
                print(f"  copies alone, {kind}: {20 * host.nbytes / seconds / 1e9:.1f} GB/s")


@leaving_nothing()
def main() -> int:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--store", help="a store of pictures; else some are made up")
    parser.add_argument("--pictures", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check-batches", type=int, default=6)
    options = parser.parse_args()
    import torch

    import headrace as hr

    if not torch.cuda.is_available():
        print("torch finds no CUDA here: nothing was checked or measured")
        return 2
    print(f"{torch.cuda.get_device_name(options.device)}, torch {torch.__version__}")
    failed = 0
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    plain = hr.Images(size=options.size, flip=True)
    half = hr.Images(
        size=options.size, flip=True, dtype="bfloat16", layout="nhwc", mean=mean, std=std
    )
    single = hr.Images(size=options.size, flip=True, dtype="float32", mean=mean, std=std)
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or Path(folder) / "photos.hr"
        if not options.store:
            hr.pack(photographs(options.pictures), store)
        checks = [
            (f"equal, {images.dtype}", equal(store, images, options))
            for images in (plain, half, single)
        ]
        checks += [
            ("locked", locked(store, plain, options)),
            ("whole", equal(store, plain, options, busy=True)),
        ]
        for name, wrong in checks:
            print(f"{name}: {wrong or 'ok'}")
            failed += bool(wrong)
        for images in (plain, half):
            for locks in (True, False, True, False):
                images_per_s, gb_per_s = rate(store, images, options, locks=locks)
                memory = "page-locked" if locks else "pageable"
                print(
                    f"  {images.dtype}, {memory}: {images_per_s:,.0f} images/s, {gb_per_s:.2f} GB/s"
                )
        copies(plain, options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
