"""Images: pictures become pixels on their way into a batch, without the interpreter.

`Images` says what pictures become; it is a frozen value that prints, compares and pickles. `Decoding` is the
stage `decode`: native threads (`native/pixels`) decode each picture straight into its place in the batch's
recycled buffer, only the region that its crop needs, resize it once and augment it. Which crop, flips and
augmentations (`plane/augment.py`) a picture gets is a function of (seed, epoch, index): the same on any number
of ranks and threads, and after any resume.

What the native decoders refuse is given to Pillow, where it is installed; that is counted and said once. A
picture that nobody can decode is an error that names its sample, or is left out, as `on_error` says. Its place
in the buffer never shows what was there before.
"""

from __future__ import annotations

import io
import logging
import os
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from headrace import _native
from headrace.errors import DecodeError, HeadraceError
from headrace.plane import augment
from headrace.plane.batch import Batch, Skipped
from headrace.plane.stage import StageStats

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.plane.batch import OnError
    from headrace.plane.stage import PendingReads

log = logging.getLogger("headrace")

BATCHES_DECODED_AHEAD: Final = 2
"""Beside the one that is asked for next: threads never wait for the consumer's next request."""

THREADS_MAX: Final = 1024

RETAIN_ALL: Final = (1 << 64) - 1
"""`kRetainAll` of native/core/arena.h."""

_EXTENSIONS: Final = ("jpg", "jpeg", "png", "webp", "img", "image", "bmp", "gif", "tif", "tiff")
"""Parts of a sample that may be its picture, by their names."""

_POLL_S: Final = 0.004
"""How often a wait for pixels looks whether further batches were read, to have them decoded."""

_DTYPES: Final = {
    "uint8": np.uint8,
    "float16": np.float16,
    "bfloat16": np.uint16,  # its bits: numpy has no such type
    "float32": np.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What pictures become.

    Results are those of Pillow 13's `crop` and `resize` (within one level of 255, hardly ever not equal). JPEGs
    of which three times the output and more is needed on each side are decoded at 1/2, 1/4 or 1/8 of their
    size, which is faster and differs by a few levels; `exact` turns that off.

    Raises:
        ValueError: a value is out of bounds, or two contradict each other.
    """

    size: int | tuple[int, int] = 224
    """Of the output in pixels: one side, or (height, width)."""

    crop: Literal["random", "center", "stretch"] = "random"
    """`random`: a region of random area and aspect, as torchvision's RandomResizedCrop. `center`: the short
    side is resized to `short`, then the middle is cut out. `stretch`: the whole picture."""

    short: int | None = None
    """Of `center`: pixels of the short side; None: 8/7 of the larger side of the output (256 for 224)."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Of `random`: bounds of the region's share of the area."""

    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Of `random`: bounds of the region's width by its height."""

    flip: bool | float = False
    """Mirror left and right, with this probability; True: one half."""

    flip_vertical: bool | float = False
    """Mirror top and bottom, likewise."""

    filter: Literal["box", "bilinear", "hamming", "bicubic", "lanczos"] = "bilinear"
    """Pillow's, with antialiasing."""

    dtype: Literal["uint8", "float16", "bfloat16", "float32"] = "uint8"
    """Of the pixels. All but uint8 hold (value / 255 - mean) / std."""

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    layout: Literal["nchw", "nhwc"] = "nchw"
    """Planes of red, green and blue, or three values a pixel (channels last)."""

    orient: bool = False
    """Turn pictures upright as their EXIF data say. Pillow and torchvision do not unless they are told."""

    background: tuple[int, int, int] | None = None
    """Red, green and blue of what shines through transparent pixels; None: transparency is left out, as
    Pillow's `convert("RGB")` does."""

    keep: Literal["decoded"] | None = None
    """`decoded`: pictures are reduced until their short side has `keep_short` pixels, and are cut from that; it
    is kept in this process's memory, where later epochs begin. What does not fit is decoded anew, to the same
    pixels. A crop of a small part is less sharp than one of the original."""

    keep_short: int | None = None
    """Pixels of the short side; None: 8/7 of the larger side of the output (256 for 224)."""

    keep_bytes: int | None = None
    """Memory for pictures that are kept; None: half of what is available, and 2 GiB less than all of it."""

    padding: int = 0
    """Pixels of black around the resized picture, out of which the output is cut at random, as torchvision's
    RandomCrop(size, padding=4); not with `crop="random"`."""

    augment: Literal["randaugment", "trivialaugment"] | None = None
    """torchvision's RandAugment or TrivialAugmentWide: Pillow's operators, nearest neighbour, black outside."""

    operations: int = 2
    """Of `randaugment`: operators for each picture."""

    magnitude: int = 9
    """Of `randaugment`: how strong they are, 0 to 30."""

    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """torchvision's ColorJitter(brightness, contrast, saturation, hue): the first three multiply by 1 - x to
    1 + x, hue (at most 0.5) turns by as much of the circle; in an order drawn for each picture."""

    grey: float = 0.0
    """Probability that colours are left out, as Pillow's `convert("L")` does."""

    erase: float = 0.0
    """Probability that a rectangle is erased, as torchvision's RandomErasing does; before `mean` and `std`."""

    erase_scale: tuple[float, float] = (0.02, 0.33)
    """Bounds of the rectangle's share of the area."""

    erase_ratio: tuple[float, float] = (0.3, 3.3)
    """Bounds of its height by its width."""

    erase_value: tuple[int, int, int] | Literal["random"] = (0, 0, 0)
    """Red, green and blue that it gets; `random`: noise."""

    mixup: float = 0.0
    """MixUp of whole batches, with shares from Beta(mixup, mixup): `batch.mixed` has both labels. 0: none."""

    cutmix: float = 0.0
    """CutMix likewise; with both, one of them is chosen for each batch."""

    exact: bool = False
    """Decode JPEGs at their full size always."""

    max_pixels: int = 89_478_485
    """Pictures with more are refused before memory is taken for them; Pillow's own bound for warnings."""

    part: str | None = None
    """Which part of a sample is its picture; None: the only one, or the one whose name says so."""

    def __post_init__(self) -> None:
        self.recipe()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one sample's pixels."""
        height, width = self._height_width
        return (3, height, width) if self.layout == "nchw" else (height, width, 3)

    @property
    def is_random(self) -> bool:
        """Whether a picture may become something else with another seed or epoch."""
        drawn = (self.crop == "random", self.flip, self.flip_vertical, self.mixup, self.cutmix)
        return any(drawn) or augment.has_steps(self)

    @property
    def planes(self) -> tuple[int, int, int]:
        """The same as planes: 3, height and width."""
        return (3, *self._height_width)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Of the arrays; uint16 for bfloat16's bits."""
        return np.dtype(_DTYPES[self.dtype])

    @property
    def _height_width(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def recipe(self) -> _native.PictureRecipe:
        """The same for native code."""
        if self.layout not in ("nchw", "nhwc"):
            raise ValueError(f"layout is {self.layout!r}, expected 'nchw' or 'nhwc'")
        if self.dtype == "uint8" and (self.mean != (0, 0, 0) or self.std != (1, 1, 1)):
            raise ValueError("mean and std are given and dtype is 'uint8': give a float dtype")
        if self.keep not in (None, "decoded"):
            raise ValueError(f"keep is {self.keep!r}, expected 'decoded' or None")
        if self.keep is None and (self.keep_short, self.keep_bytes) != (None, None):
            raise ValueError("keep_short or keep_bytes is given without keep='decoded'")
        if self.keep_bytes is not None and self.keep_bytes < 1:
            raise ValueError(f"keep_bytes is {self.keep_bytes}, expected at least 1")
        augment.check(self)
        height, width = self._height_width
        usual_short = round(max(height, width) * 8 / 7)
        keep_short = usual_short if self.keep_short is None else self.keep_short
        return _native.PictureRecipe.make(
            height=height,
            width=width,
            crop=self.crop,
            short_side=usual_short if self.short is None else self.short,
            keep_short=0 if self.keep is None else max(1, keep_short),
            area=self.scale,
            aspect=self.ratio,
            flip=_probability(self.flip),
            flip_vertical=_probability(self.flip_vertical),
            filter=self.filter,
            dtype=self.dtype,
            planar=self.layout == "nchw",
            scaled=not self.exact,
            orient=self.orient,
            background=-1 if self.background is None else _packed(self.background),
            max_pixels=self.max_pixels,
            mean=self.mean,
            std=self.std,
        )

    def steps(
        self, seed: int, epoch: int, indices: NDArray[np.int64]
    ) -> NDArray[np.float64] | None:
        """Draw what is done to pictures after they were cut, resized and flipped.

        Returns:
            float64, shape (pictures, steps, 7): see native/pixels/augment.h; None: nothing ever is.
        """
        return augment.steps(self, seed, epoch, indices)

    def part_of(self, names: Sequence[str]) -> int:
        """Which of a sample's parts is its picture, by its number.

        Raises:
            ValueError: none of them, or several may be.
        """
        if self.part is not None:
            if self.part not in names:
                raise ValueError(f"part is {self.part!r}, and the samples have {list(names)}")
            return list(names).index(self.part)
        if len(names) == 1:
            return 0
        known = [
            i for i, name in enumerate(names) if name.lower().rpartition(".")[2] in _EXTENSIONS
        ]
        if len(known) != 1:
            raise ValueError(
                f"the samples have the parts {list(names)}: say Images(part=...), which is the picture"
            )
        return known[0]


def _packed(colour: tuple[int, int, int]) -> int:
    if len(colour) != 3 or not all(0 <= level <= 255 for level in colour):
        raise ValueError(f"background is {colour}, expected three levels of 0 to 255")
    return colour[0] << 16 | colour[1] << 8 | colour[2]


def _probability(flip: bool | float) -> float:
    return 0.5 if flip is True else float(flip)


class ImageBatch(Batch):
    """Pictures that are delivered together, decoded; with the bytes that they were decoded from.

    Attributes:
        pixels: (samples, ...), each of `Images.shape` and `Images.numpy_dtype`; the buffer is this batch's
            alone.
        mixed: both labels of each picture and their shares, where `mixup` or `cutmix` mixed them; or None.
        recycled: they lie in a buffer of the decode stage, which it uses again when this batch is gone; else,
            where samples were left out, in a copy.
    """

    __slots__ = ("mixed", "pixels", "recycled")

    pixels: NDArray[Any]
    mixed: augment.MixedLabels | None
    recycled: bool

    def __repr__(self) -> str:
        return f"ImageBatch({len(self)} samples, pixels {self.pixels.shape}, epoch {self.epoch})"


class Decoded(NamedTuple):
    """A batch that was read, and its pixels."""

    native: _native.Batch
    job: _native.DecodeJob


class PendingPixels:
    """A batch that is being read, or decoded."""

    def __init__(self, stage: Decoding, epoch: int, reads: PendingReads | _native.Batch) -> None:
        self._stage = stage
        self._epoch = epoch
        self._reads = reads
        self._decoded: Decoded | None = None
        self._error: HeadraceError | None = None

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        return self._decoded is not None and self._decoded.job.done

    def begin(self) -> bool:
        """Have it decoded if it was read; returns whether it is being decoded.

        An error waits for its turn: batches before it are delivered first.
        """
        reads = self._reads
        if self._decoded is None and self._error is None:
            if not isinstance(reads, _native.Batch) and not reads.done:
                return False
            try:
                self._submit()
            except HeadraceError as e:
                self._error = e
        return self._decoded is not None

    def _submit(self) -> Decoded:
        native = self._reads if isinstance(self._reads, _native.Batch) else self._reads.take()
        self._decoded = Decoded(native, self._stage.submit(native, self._epoch))
        return self._decoded

    def take(self, behind: Iterable[PendingPixels] = ()) -> Decoded:
        """Wait for the pixels.

        Args:
            behind: further batches; some are begun with while this one is waited for.

        Raises:
            VolumeTimeout: it was not read within the deadline.
        """
        if self._error is not None:
            raise self._error
        decoded = self._decoded or self._submit()
        while True:
            for pending in islice(behind, BATCHES_DECODED_AHEAD):
                if not pending.begin():
                    break
            if decoded.job.wait(_POLL_S):
                return decoded


class Decoding:
    """The stage `decode`: threads that decode the batches of one pipeline.

    Args:
        images: what pictures become.
        seed: of what is drawn for them.
        part_names: the parts that are read.
        threads: that decode; None: as many as this process has processors.

    Attributes:
        fallbacks: pictures that Pillow decoded, because the native decoders refused them.
        seed: of the crops and flips of batches that are submitted from now on.
        keeps_buffers: give no buffer back to the system while a pool lives, so that they may be page-locked;
            set before the first batch.
    """

    name = "decode"

    def __init__(
        self, images: Images, seed: int, part_names: Sequence[str], threads: int | None = None
    ) -> None:
        if threads is not None and not 1 <= threads <= THREADS_MAX:
            raise ValueError(f"decode_threads is {threads}, expected 1 to {THREADS_MAX}")
        self.images = images
        self.fallbacks = 0
        self.seed = seed
        self.keeps_buffers = False
        self._part = images.part_of(part_names)
        self._recipe = images.recipe()
        self._threads = threads or len(os.sched_getaffinity(0))
        self._pool: _native.DecodePool | None = None
        self._pid = 0

    # -- the stage, for whoever watches or tunes it ------------------------------------------------

    def stats(self) -> StageStats:
        """What its threads did in this process."""
        pool = self._own_pool
        return StageStats(name=self.name, **({} if pool is None else pool.stats()))

    def knobs(self) -> Mapping[str, int]:
        """Threads that decode."""
        return {"decode_threads": self._threads}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set the number of threads; it holds for pools that are made anew, too.

        Raises:
            ValueError: it is not positive.
        """
        threads = knobs.get("decode_threads", self._threads)
        if threads < 1:
            raise ValueError(f"decode_threads is {threads}, expected at least 1")
        self._threads = min(threads, THREADS_MAX)
        if (pool := self._own_pool) is not None:
            pool.turn(self._threads)

    @property
    def mapped_bytes(self) -> int:
        """Memory that pixels take, those of delivered batches included."""
        pool = self._own_pool
        return 0 if pool is None else pool.mapped_bytes

    @property
    def kept(self) -> tuple[int, int]:
        """How many pictures this process keeps decoded, and their bytes."""
        pool = self._own_pool
        return (0, 0) if pool is None else pool.kept

    @property
    def pool(self) -> object:
        """What owns the buffers in this process: they are mapped as long as it is kept; None before any."""
        return self._own_pool

    @property
    def _own_pool(self) -> _native.DecodePool | None:
        """Of this process: over a fork, threads are not inherited."""
        return self._pool if self._pid == os.getpid() else None

    # -- decoding ----------------------------------------------------------------------------------

    def submit(self, native: _native.Batch, epoch: int) -> _native.DecodeJob:
        """Have a batch decoded that was read; returns at once."""
        pool = self._own_pool
        if pool is None:
            free = (BATCHES_DECODED_AHEAD + 2) * native.samples * self._recipe.output_bytes
            if self.keeps_buffers:
                free = RETAIN_ALL
            self._pool = pool = _native.DecodePool(self._threads, free, self._keep_bytes())
            self._pid = os.getpid()
        steps = self.images.steps(self.seed, epoch, native.indices)
        return pool.submit(self._recipe, self.seed, epoch, native, self._part, steps)

    def _keep_bytes(self) -> int:
        if self.images.keep is None or self.images.keep_bytes is not None:
            return self.images.keep_bytes or 0
        from headrace.machine.host import available_memory
        from headrace.plane.tiers import memory_quota

        return memory_quota(
            "auto", far=False, data_bytes=1 << 60, available_bytes=available_memory()
        )

    def pending(self, reads: PendingReads | _native.Batch, epoch: int) -> PendingPixels:
        """A batch that will be decoded once it was read."""
        return PendingPixels(self, epoch, reads)

    def ahead_of(
        self, natives: Generator[_native.Batch, None, None], epoch: int
    ) -> Generator[Decoded, None, None]:
        """Decode batches that were read, some of them ahead, and yield them in order."""
        waiting: deque[PendingPixels] = deque()
        try:
            for native in natives:
                waiting.append(self.pending(native, epoch))
                waiting[-1].begin()
                if len(waiting) > BATCHES_DECODED_AHEAD:
                    yield waiting.popleft().take()
            while waiting:
                yield waiting.popleft().take()
        finally:
            natives.close()

    def close(self) -> None:
        """End its threads; the stage can be used again. Pixels that were taken stay valid."""
        self._pool = None

    def batch(
        self,
        decoded: Decoded,
        part_names: Sequence[str],
        names: Sequence[str],
        on_error: OnError,
        skipped: list[Skipped],
        *,
        epoch: int,
        position: int,
        keep: NDArray[np.bool_] | None,
    ) -> ImageBatch:
        """Make the batch that is delivered.

        Args:
            decoded: what was read and decoded.
            part_names: the parts that were read.
            names: the store's names, for errors.
            on_error: what to do with a picture that cannot be decoded.
            skipped: takes what is left out.
            epoch: the epoch.
            position: the global position of the first sample.
            keep: bool, shape (samples,): which samples were read; None: all.

        Raises:
            DecodeError: a picture cannot be decoded and `on_error` is `raise`; names the sample.
        """
        native, job = decoded
        for sample, reason in job.failures:
            if keep is not None and not keep[sample]:
                continue
            try:
                self._replace(native, job, sample, reason)
            except Exception as e:
                index = int(native.indices[sample])
                error = DecodeError(
                    f"sample {index} ({names[index]!r}) is no picture that can be decoded: {reason}; "
                    f"Pillow: {e}.",
                    index=index,
                    name=names[index],
                    next_step="Take it out of the data, or give on_error='skip'.",
                )
                if on_error == "raise":
                    raise error from e
                keep = np.ones(native.samples, np.bool_) if keep is None else keep
                keep[sample] = False
                skipped.append(Skipped(index, names[index], str(error)))
        batch = ImageBatch(native, part_names, epoch=epoch, position=position, keep=keep)
        pixels = job.pixels.view(self.images.numpy_dtype).reshape(-1, *self.images.shape)
        batch.pixels = pixels if keep is None else pixels[keep]
        batch.recycled = keep is None
        batch.mixed = None
        if self.images.mixup or self.images.cutmix:
            batch.mixed = augment.mix(
                self.images, batch.pixels, batch.labels, batch.indices,
                seed=self.seed, epoch=epoch,
            )  # fmt: skip
        return batch

    def _replace(
        self, native: _native.Batch, job: _native.DecodeJob, sample: int, reason: str
    ) -> None:
        """Decode with Pillow what the native decoders refused."""
        slot = sample * native.parts + self._part
        start = int(native.offsets[slot])
        encoded = native.data[start : start + int(native.lengths[slot])]
        job.replace(sample, _by_pillow(encoded.tobytes(), self.images))
        self.fallbacks += 1
        if self.fallbacks == 1:
            log.warning(
                "Pillow decodes what headrace's own decoders do not, sample %d first (%s); "
                "the loader's decoding.fallbacks counts them",
                int(native.indices[sample]), reason,
            )  # fmt: skip


def _by_pillow(encoded: bytes, images: Images) -> NDArray[np.uint8]:
    """Decode a picture.

    Returns:
        uint8, shape (height, width, 3).

    Raises:
        OSError, ValueError: Pillow cannot decode it, or the picture is too large.
    """
    from PIL import Image, ImageOps  # for rare pictures only: its import takes a while

    with Image.open(io.BytesIO(encoded)) as picture:
        if picture.width * picture.height > images.max_pixels:
            raise ValueError(f"{picture.width} x {picture.height} pixels are more than max_pixels")
        upright = ImageOps.exif_transpose(picture) if images.orient else picture
        if images.background is not None and upright.has_transparency_data:
            behind = Image.new("RGBA", upright.size, (*images.background, 255))
            upright = Image.alpha_composite(behind, upright.convert("RGBA"))
        return np.ascontiguousarray(np.asarray(upright.convert("RGB"), np.uint8))
