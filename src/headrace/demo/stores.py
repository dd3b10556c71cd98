"""Stores: the demo's images, packed into one store to train on and one of held-out images."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import api
from headrace.demo.images import choose, list_images, samples
from headrace.demo.options import NOTE
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.demo.images import ImageFile
    from headrace.demo.options import DemoOptions

__all__ = ["PackedImages", "pack_images"]

_RECORD = "images.json"


@dataclass(frozen=True, slots=True)
class PackedImages:
    """Two stores and what is in them."""

    train: Path
    held_out: Path
    source: Path
    classes: list[str]
    train_samples: int
    held_out_samples: int
    nbytes: int
    left_out: dict[str, int]
    seconds: float
    reused: bool


def pack_images(
    options: DemoOptions,
    tell: Callable[[int, int], None] = lambda _done, _of: None,
) -> PackedImages:
    """Pack the images, or find them packed.

    Args:
        options: which images, and where to.
        tell: called with (samples packed, samples).

    Raises:
        SourceError: the folder has too few images.
    """
    started = time.perf_counter()
    files = list_images(options.source)
    options.out.mkdir(parents=True, exist_ok=True)
    digest = _digest(files, options)
    record = options.out / _RECORD
    found = _packed_before(record, digest, started)
    if found is not None:
        return found
    record.unlink(missing_ok=True)
    choice = choose(files, options)
    train = [image for image in choice.images if not image.held_out]
    held_out = [image for image in choice.images if image.held_out]
    stores = options.out / "train.hr", options.out / "held-out.hr"
    done = 0
    for store, images in zip(stores, (train, held_out), strict=True):
        if store.exists():
            shutil.rmtree(store)  # ours, by the name and place
        before = done
        api.pack(
            samples(images, choice.classes),
            store,
            resume=False,
            progress=lambda n, *_, before=before: tell(before + n, len(choice.images)),
        )
        done += len(images)
    packed = PackedImages(
        *stores, options.source, choice.classes, len(train), len(held_out),
        sum(image.size_bytes for image in choice.images), choice.left_out,
        time.perf_counter() - started, reused=False,
    )  # fmt: skip
    paths = {name: str(getattr(packed, name)) for name in ("train", "held_out", "source")}
    record.write_bytes(NOTE.encode({"digest": digest, **asdict(packed), **paths}, indent=2))
    return packed


def _digest(files: list[ImageFile], options: DemoOptions) -> str:
    """Names, sizes and times of all files, and the options that choose among them."""
    chosen = options.pixels_limit, options.images_max, options.class_images_min
    digest = blake2b(repr(chosen).encode(), digest_size=16)
    for file in files:
        digest.update(repr((file.name, file.size_bytes, file.mtime_ns)).encode())
    return digest.hexdigest()


def _packed_before(record: Path, digest: str, started: float) -> PackedImages | None:
    try:
        saved = NOTE.decode(record.read_bytes(), str(record)).plain()
        if saved.pop("digest") != digest:
            return None
        for name in ("train", "held_out", "source"):
            saved[name] = Path(saved[name])
        packed = PackedImages(**{**saved, "reused": True, "seconds": 0.0})
        for path in (packed.train, packed.held_out):
            api.open(path).close()
    except (OSError, ValueError, TypeError, KeyError, HeadraceError):
        return None  # whatever it is, it can be packed again
    return PackedImages(**{**asdict(packed), "seconds": time.perf_counter() - started})
