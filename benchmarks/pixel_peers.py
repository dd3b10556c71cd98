"""What the pixel benchmark compares with: one epoch of each, shuffled, batches of 64, uint8.

Each is written as its documentation shows it, with as many threads as headrace gets: a random crop of 8 to
100 % of the area, resized to 224, half of them flipped. What is not installed is left out, and said
(benchmarks/requirements-pixels.txt).
"""

from __future__ import annotations

import importlib.util
import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Epoch = Callable[[list[str], int], Iterator[int]]
    """Paths and threads; gives the number of pictures of each batch."""

BATCH = 64


def box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A random crop as torchvision draws it: left, top, right, bottom."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
            return int(left), int(top), int(left) + w, int(top) + h
    return 0, 0, width, height


class PillowFolder:
    """A map-style data set, as people write it."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        import torch
        from PIL import Image

        rng = np.random.default_rng(i)
        with Image.open(self.paths[i]) as picture:
            rgb = picture.convert("RGB")
        cut = rgb.crop(box(*rgb.size, rng)).resize((224, 224), Image.Resampling.BILINEAR)
        if rng.random() < 0.5:
            cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(cut).copy()).permute(2, 0, 1), i % 10


def torch_pillow(paths: list[str], threads: int) -> Iterator[int]:
    """A DataLoader of torch; its threads are worker processes."""
    from torch.utils.data import DataLoader

    for images, _ in DataLoader(
        PillowFolder(paths), batch_size=BATCH, shuffle=True, num_workers=threads
    ):
        yield len(images)


def dali(paths: list[str], threads: int) -> Iterator[int]:
    """DALI on the processor, its resize antialiased."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=threads, device_id=None, seed=1)
    def pipeline() -> Any:
        data, labels = fn.readers.file(
            files=paths, labels=list(range(len(paths))), random_shuffle=True, initial_fill=1024
        )
        images = fn.decoders.image_random_crop(data, random_area=[0.08, 1.0], seed=2)
        images = fn.resize(images, size=[224, 224], antialias=True)
        flip = fn.random.coin_flip(probability=0.5)
        chw = fn.crop_mirror_normalize(
            images, mirror=flip, dtype=types.UINT8, output_layout="CHW", mean=[0.0], std=[1.0]
        )
        return chw, labels

    ready = pipeline()
    ready.build()
    for _ in range(len(paths) // BATCH):
        images, _ = ready.run()
        yield len(images)


def tf_data(paths: list[str], threads: int) -> Iterator[int]:
    """tf.data with `resize(antialias=True)`, on a pool of its own."""
    import tensorflow as tf

    def load(path: Any) -> Any:
        data = tf.io.read_file(path)
        jpeg = paths[0].endswith((".jpg", ".jpeg"))
        shape = tf.io.extract_jpeg_shape(data) if jpeg else tf.shape(tf.io.decode_png(data))
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape, tf.zeros((1, 0, 4)), area_range=(0.08, 1.0), use_image_if_no_bounding_boxes=True
        )
        if jpeg:
            window = tf.stack([begin[0], begin[1], size[0], size[1]])
            image = tf.io.decode_and_crop_jpeg(data, window, channels=3)
        else:
            image = tf.slice(tf.io.decode_png(data, channels=3), begin, [size[0], size[1], 3])
        image = tf.image.resize(image, (224, 224), antialias=True)
        return tf.cast(tf.clip_by_value(tf.image.random_flip_left_right(image), 0, 255), tf.uint8)

    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    data = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    data = data.map(load, num_parallel_calls=threads).batch(BATCH).prefetch(2).with_options(options)
    for images in data:
        yield int(images.shape[0])


def opencv(paths: list[str], threads: int) -> Iterator[int]:
    """OpenCV in threads: bilinear, not antialiased."""
    import cv2

    cv2.setNumThreads(0)

    def load(i: int, into: Any) -> None:
        rng = np.random.default_rng(i)
        data = np.fromfile(paths[i], np.uint8)
        image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)
        left, top, right, bottom = box(image.shape[1], image.shape[0], rng)
        cut = cv2.resize(image[top:bottom, left:right], (224, 224), interpolation=cv2.INTER_LINEAR)
        into[...] = (cut[:, ::-1] if rng.random() < 0.5 else cut).transpose(2, 0, 1)

    order = random.Random(1).sample(range(len(paths)), len(paths))
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[tuple[Any, list[Any]]] = deque()
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            batch = np.empty((len(some), 3, 224, 224), np.uint8)
            ahead.append((batch, [pool.submit(load, i, batch[k]) for k, i in enumerate(some)]))
            if len(ahead) > 2:
                yield _finish(*ahead.popleft())
        while ahead:
            yield _finish(*ahead.popleft())


def _finish(batch: Any, pictures: list[Any]) -> int:
    for picture in pictures:
        picture.result()
    return len(batch)


def spdl(paths: list[str], threads: int) -> Iterator[int]:
    """SPDL's pipeline: pictures decoded in threads, cropped and scaled by FFmpeg's filters (bicubic)."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    order = random.Random(1).sample(range(len(paths)), len(paths))

    def load(i: int) -> Any:
        rng = np.random.default_rng(i)
        packets = spdl.io.demux_image(paths[i])
        left, top, right, bottom = box(packets.width, packets.height, rng)
        flip = "hflip," if rng.random() < 0.5 else ""
        text = f"crop={right - left}:{bottom - top}:{left}:{top},{flip}scale=224:224,format=pix_fmts=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=text)

    def join(frames: list[Any]) -> Any:
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    pipeline = (
        PipelineBuilder()
        .add_source(order)
        .pipe(load, concurrency=threads)
        .aggregate(BATCH)
        .pipe(join)
        .add_sink(2)
        .build(num_threads=threads)
    )
    with pipeline.auto_stop():
        for images in pipeline:
            yield len(images)


PEERS: dict[str, tuple[str, Epoch]] = {
    "torch + Pillow": ("torch", torch_pillow),
    "DALI, antialias": ("nvidia.dali", dali),
    "tf.data, antialias": ("tensorflow", tf_data),
    "OpenCV, threads": ("cv2", opencv),
    "SPDL": ("spdl.io", spdl),
}
"""The module that each needs, and its epoch."""


def installed() -> dict[str, Epoch]:
    """The peers that are there, the first of them torch."""
    there = {}
    for name, (module, epoch) in PEERS.items():
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is not None:
            there[name] = epoch
    return there


def missing() -> list[str]:
    """Those that are not."""
    return [name for name in PEERS if name not in installed()]
