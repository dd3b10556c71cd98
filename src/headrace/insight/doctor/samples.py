"""Samples: some at random that stand for the data set, their formats, and how one core decodes them.

Images are decoded to RGB and scaled to 224 x 224, which is what most training on images does first;
random crops, flips and normalising come on top. npy and npz are loaded by numpy. What nothing here can
decode is delivered as bytes, and `Decode.why` says so.
"""

from __future__ import annotations

import io
import itertools
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.insight.doctor.findings import Decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

POOL_MAX: Final = 2000
"""Samples that stand for all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A sample's bytes, or as many bytes as one would have, in a file."""

    path: str
    offset: int
    length: int


@dataclass(slots=True)
class Pool:
    """Samples at random.

    Attributes:
        pieces: in random order.
        whole_files: each is a file of its own, which is opened to be read.
        unopened: more files at random that nothing was asked about yet: opening them is news to the system.
        store: an open store whose samples lie in objects or another host's volumes; read by index.
        true_samples: whether the pieces are samples, and can be decoded; else they are blocks.
    """

    pieces: list[Piece] = field(default_factory=list)
    whole_files: bool = False
    unopened: list[str] = field(default_factory=list)
    store: Any = None
    true_samples: bool = True

    @property
    def mean_bytes(self) -> float:
        """Of a piece."""
        return sum(p.length for p in self.pieces) / max(1, len(self.pieces))

    def close(self) -> None:
        """Close the store, if there is one."""
        if self.store is not None:
            self.store.close()


def quantiles(sizes: NDArray[np.int64]) -> dict[str, Any]:
    """How sizes are spread, under the names that `DataSet` has for it."""
    p10, p50, p90 = (float(x) for x in np.percentile(sizes, (10, 50, 90)))
    return {
        "size_p10": p10, "size_p50": p50, "size_p90": p90, "size_max": float(sizes.max()),
        "size_mean": float(sizes.mean()),
    }  # fmt: skip


# -- formats -----------------------------------------------------------------------------------------

_SUFFIXES: Final = {
    ".jpg": "jpeg", ".jpeg": "jpeg", ".jpe": "jpeg", ".jfif": "jpeg", ".png": "png", ".gif": "gif",
    ".webp": "webp", ".bmp": "bmp", ".tif": "tiff", ".tiff": "tiff", ".ppm": "ppm", ".pgm": "ppm",
    ".npy": "npy", ".npz": "npz",
    ".tar": "tar", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".mds": "mds", ".array_record": "array_record",
    ".arrayrecord": "array_record", ".h5": "hdf5", ".hdf5": "hdf5",
    ".txt": "text", ".json": "text", ".jsonl": "text", ".csv": "text", ".xml": "text", ".md": "text",
    ".wav": "audio", ".flac": "audio", ".mp3": "audio", ".ogg": "audio",
    ".mp4": "video", ".avi": "video", ".mkv": "video", ".webm": "video",
    ".pt": "torch", ".pth": "torch",
}  # fmt: skip

_IMAGES: Final = frozenset({"jpeg", "png", "gif", "webp", "bmp", "tiff", "ppm"})

_MAGICS: Final = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp"),
    (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"P6", "ppm"), (b"P5", "ppm"),
    (b"\x93NUMPY", "npy"), (b"PK\x03\x04", "npz"),
)  # fmt: skip


def format_of(name: str) -> str:
    """By a name's end: `jpeg`, `tar`, ...; `bytes` where it says nothing."""
    lower = name.lower()
    dot = lower.rfind(".")
    found = _SUFFIXES.get(lower[dot:]) if dot >= 0 else None
    if found is None and ".tfrecord" in lower:  # train.tfrecord-00001-of-00100
        return "tfrecord"
    return found or "bytes"


def format_of_bytes(head: bytes) -> str:
    """By a sample's first bytes; `bytes` where they say nothing."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _MAGICS if head.startswith(magic)), "bytes")


def family_of(name: str) -> str:
    """`image`, or the format itself."""
    return "image" if name in _IMAGES else name


# -- decoding ----------------------------------------------------------------------------------------

SIDE: Final = 224
_PIXELS_MAX: Final = 100_000_000


def measure_decoding(
    samples: Sequence[bytes], seconds: float, stop: Callable[[], bool] = lambda: False
) -> Decode | None:
    """Decode samples, round and round, for so long; None without samples."""
    if not samples:
        return None
    formats = Counter(format_of_bytes(data[:16]) for data in samples)
    name = formats.most_common(1)[0][0]
    ours = [data for data in samples if format_of_bytes(data[:16]) == name]
    mean_bytes = sum(map(len, ours)) / len(ours)
    if family_of(name) == "image":
        return _images(name, ours, mean_bytes, seconds, stop)
    if name in ("npy", "npz"):
        return _decode_of(name, "numpy", _time(ours, [_load_numpy], seconds, stop))
    return Decode(
        format=name, decoder="", out_bytes=mean_bytes,
        why="the samples are no images, npy or npz: decoding is not looked at",
    )  # fmt: skip


class _Timed:
    """How decoding went: processor seconds of each stage, of the samples that could be decoded."""

    def __init__(self, stages: int) -> None:
        self.good = self.failed = 0
        self.cpu_s = [0.0] * stages
        self.out_bytes = 0.0
        self.got = 1.0
        self.first_failed = ""

    def mean_s(self, stage: int) -> float:
        """Of one stage, a sample."""
        return self.cpu_s[stage] / max(1, self.good)


def _time(
    samples: Sequence[bytes],
    stages: Sequence[Callable[[Any], Any]],
    seconds: float,
    stop: Callable[[], bool],
) -> _Timed:
    """Put each sample through the stages, each given the bytes and what the one before made of them.

    Processor time of this thread is taken: other processes that want the core do not count.
    """
    timed = _Timed(len(stages))
    begun_s, cpu_s = time.monotonic(), time.thread_time()
    until = begun_s + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a data set's oddities are counted, not printed
        for data in itertools.cycle(samples):
            spent, made = [], None
            try:
                for stage in stages:
                    begun = time.thread_time()
                    made = stage((data, made))
                    spent.append(time.thread_time() - begun)
            except Exception as e:  # noqa: BLE001 - decoders raise what they like
                timed.failed += 1
                timed.first_failed = timed.first_failed or f"{type(e).__name__}: {e}"
            else:
                timed.good += 1
                timed.cpu_s = [a + b for a, b in zip(timed.cpu_s, spent, strict=True)]
                timed.out_bytes += getattr(made, "nbytes", 0)
            if time.monotonic() > until or stop():
                break
    timed.out_bytes /= max(1, timed.good)
    timed.got = min(1.0, (time.thread_time() - cpu_s) / max(1e-9, time.monotonic() - begun_s))
    return timed


def _decode_of(name: str, decoder: str, timed: _Timed, **more: Any) -> Decode:
    total = timed.good + timed.failed
    whole = {"sample_s": timed.mean_s(0), "full_s": timed.mean_s(0), "out_bytes": timed.out_bytes}
    return Decode(
        format=name, decoder=decoder, samples=total, failed=timed.failed,
        first_failed=timed.first_failed, got=timed.got, **{**whole, **more},
    )  # fmt: skip


def _images(
    name: str,
    samples: Sequence[bytes],
    mean_bytes: float,
    seconds: float,
    stop: Callable[[], bool],
) -> Decode:
    try:
        from PIL import Image
    except ImportError:
        return _without_pillow(name, samples, mean_bytes, seconds, stop)
    pixels: list[int] = []

    def opened(data: bytes) -> Any:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > _PIXELS_MAX:
            raise ValueError(f"{image.width} x {image.height} pixels")
        return image

    def full(given: Any) -> Any:
        image = opened(given[0])
        pixels.append(image.width * image.height)
        return image.convert("RGB")

    def scaled(given: Any) -> Any:
        return np.asarray(given[1].resize((SIDE, SIDE), Image.Resampling.BILINEAR))

    def drafted(given: Any) -> Any:
        image = opened(given[0])
        image.draft("RGB", (SIDE, SIDE))
        return scaled((given[0], image.convert("RGB")))

    stages = [full, scaled, drafted] if name == "jpeg" else [full, scaled]
    timed = _time(samples, stages, seconds, stop)
    decoder = f"Pillow {_version('pillow')}".strip()
    return _decode_of(
        name, decoder, timed, sample_s=timed.mean_s(0) + timed.mean_s(1), side=SIDE,
        draft_s=timed.mean_s(2) if len(stages) == 3 and timed.good else None,
        out_bytes=3.0 * SIDE * SIDE, pixels=sum(pixels) / max(1, len(pixels)),
    )  # fmt: skip


def _without_pillow(
    name: str,
    samples: Sequence[bytes],
    mean_bytes: float,
    seconds: float,
    stop: Callable[[], bool],
) -> Decode:
    if name == "jpeg":
        try:
            import simplejpeg
        except ImportError:
            pass
        else:
            timed = _time(samples, [lambda given: simplejpeg.decode_jpeg(given[0])], seconds, stop)
            return _decode_of(name, f"simplejpeg {_version('simplejpeg')}".strip(), timed)
    return Decode(
        format=name, decoder="", out_bytes=mean_bytes,
        why="Pillow is not installed, so decoding is not looked at (pip install pillow)",
    )  # fmt: skip


class _Arrays:
    """All arrays of a file."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def _load_numpy(given: Any) -> _Arrays:
    loaded = np.load(io.BytesIO(given[0]), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return _Arrays(loaded.nbytes)
    with loaded:
        return _Arrays(sum(loaded[key].nbytes for key in loaded.files))


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
