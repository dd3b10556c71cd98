"""Samples: some at random that stand for the data set, their formats, and how one core decodes them.

Images are decoded to RGB and scaled to 224 x 224, which is what most training on images does first;
random crops, flips and normalising come on top. JPEG, PNG and WebP are decoded by `headrace.Images`,
too. npy and npz are loaded by numpy. What nothing here can decode is delivered as bytes, and
`Decode.why` says so.
"""

from __future__ import annotations

import io
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace import _native
from headrace.insight.doctor.findings import Decode
from headrace.plane.images import Images
from headrace.store.sources.contents import family_of

if TYPE_CHECKING:
    from collections.abc import Sequence

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
class SamplePool:
    """Samples at random.

    Attributes:
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

_MAGICS: Final = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp"),
    (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"P6", "ppm"), (b"P5", "ppm"),
    (b"\x93NUMPY", "npy"), (b"PK\x03\x04", "npz"),
)  # fmt: skip


def format_of_bytes(head: bytes) -> str:
    """By a sample's first bytes; `bytes` where they say nothing."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _MAGICS if head.startswith(magic)), "bytes")


# -- decoding ----------------------------------------------------------------------------------------

SIDE: Final = 224
_NATIVE: Final = frozenset({"jpeg", "png", "webp"})
_PIXELS_MAX: Final = 100_000_000


_Stage = Callable[[bytes, Any], Any]
"""Given a sample's bytes, and what the stage before made of them."""


def measure_decoding(
    samples: Sequence[bytes], seconds: float, stop: Callable[[], bool] = lambda: False
) -> Decode | None:
    """Decode samples, round and round, for so long; None without samples.

    Processor time of this thread is taken: other processes that want the core do not count.
    """
    if not samples:
        return None
    name = Counter(format_of_bytes(data[:16]) for data in samples).most_common(1)[0][0]
    samples = [data for data in samples if format_of_bytes(data[:16]) == name]
    pixels: list[int] = []
    refused: list[str] = []
    decoder, stages = _decoder_of(name, pixels, refused)
    if not stages:
        mean_bytes = sum(map(len, samples)) / len(samples)
        return Decode(format=name, decoder="", out_bytes=mean_bytes, why=decoder)
    cpu_s, out_bytes, good, failed, first_failed = np.zeros(len(stages)), 0.0, 0, 0, ""
    begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a data set's oddities are counted, not printed
        for data in itertools.cycle(samples):
            times, decoded = [time.thread_time()], None
            try:
                for stage in stages:
                    decoded = stage(data, decoded)
                    times.append(time.thread_time())
            except Exception as e:  # noqa: BLE001 - decoders raise what they like
                failed += 1
                first_failed = first_failed or f"{type(e).__name__}: {e}"
            else:
                good += 1
                cpu_s += np.diff(times)
                out_bytes += getattr(decoded, "nbytes", 0)
            if time.monotonic() > begun_s + seconds or stop():
                break
    got = (time.thread_time() - begun_cpu_s) / max(1e-9, time.monotonic() - begun_s)
    full_s, *scaled_s = (cpu_s / max(1, good)).tolist()
    by_key = dict(zip(("scaled", "native", "draft"), scaled_s, strict=False)) if good else {}
    return Decode(
        format=name, decoder=decoder, samples=good + failed, failed=failed, first_failed=first_failed,
        got=min(1.0, got), full_s=full_s, sample_s=full_s + by_key.get("scaled", 0.0),
        draft_s=by_key.get("draft"), native_s=None if refused else by_key.get("native"),
        side=SIDE if scaled_s else 0,
        out_bytes=3.0 * SIDE * SIDE if scaled_s else out_bytes / max(1, good),
        pixels=sum(pixels) / max(1, len(pixels)),
    )  # fmt: skip


def _decoder_of(name: str, pixels: list[int], refused: list[str]) -> tuple[str, list[_Stage]]:
    """What decodes a format, and its stages: to RGB, then to `SIDE`; without stages, why.

    Fills `pixels` of each image, and `refused` with why headrace's own decoders do not decode one.
    """
    if name in ("npy", "npz"):
        return "numpy", [_load_numpy]
    if family_of(name) != "image":
        return "the samples are no images, npy or npz: decoding is not looked at", []
    try:
        import PIL  # noqa: F401
    except ImportError:
        if name == "jpeg" and (version := version_of("simplejpeg")):
            import simplejpeg

            return f"simplejpeg {version}", [lambda data, _: simplejpeg.decode_jpeg(data)]
        return "Pillow is not installed, so decoding is not looked at (pip install pillow)", []

    return f"Pillow {version_of('pillow')}".strip(), _image_stages(name, pixels, refused)


def _image_stages(name: str, pixels: list[int], refused: list[str]) -> list[_Stage]:
    from PIL import Image

    def opened(data: bytes) -> Any:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > _PIXELS_MAX:
            raise ValueError(f"{image.width} x {image.height} pixels")
        return image

    def full(data: bytes, _: Any) -> Any:
        image = opened(data)
        pixels.append(image.width * image.height)
        return image.convert("RGB")

    def scaled(_: bytes, image: Any) -> Any:
        return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))

    def drafted(data: bytes, _: Any) -> Any:
        image = opened(data)
        image.draft("RGB", (SIDE, SIDE))
        return scaled(data, image.convert("RGB"))

    recipe = Images(size=SIDE).recipe()

    def native(data: bytes, decoded: Any) -> Any:
        try:
            _native.decode_picture(recipe, data, 0, 0, len(pixels))  # a crop of its own each time
        except ValueError as e:
            refused.append(str(e))
        return decoded

    stages: list[_Stage] = [full, scaled]
    if name in _NATIVE:
        stages.append(native)
    if name == "jpeg":
        stages.append(drafted)
    return stages


def _load_numpy(data: bytes, _: Any) -> SimpleNamespace:
    loaded = np.load(io.BytesIO(data), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return SimpleNamespace(nbytes=loaded.nbytes)
    with loaded:
        return SimpleNamespace(nbytes=sum(loaded[key].nbytes for key in loaded.files))


def version_of(package: str) -> str:
    """Of what is installed; nothing is imported; '' where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
