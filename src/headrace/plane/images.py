"""Images: what pictures become on their way into a batch, and the batch that delivers them.

`Images` is a frozen value that prints, compares and pickles; the stage `decode` (`plane/decoding.py`) does what
it says. Which crop, flips and augmentations (`plane/augment.py`) a picture gets is a function of (seed, epoch,
index): the same on any number of ranks and threads, and after any resume.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from headrace import _native
from headrace.plane.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from headrace.plane.augment import MixedLabels

TOO_LARGE: Final = " of max_pixels"
"""How reasons end, the native decoders' and Pillow's, of pictures that are too large."""

_EXTENSIONS: Final = ("jpg", "jpeg", "png", "webp", "img", "image", "bmp", "gif", "tif", "tiff")
"""Parts of a sample that may be its picture, by their names."""

_DTYPES: Final = {
    "uint8": np.uint8,
    "float16": np.float16,
    "bfloat16": np.uint16,  # its bits: numpy has no such type
    "float32": np.float32,
}

_BOUNDS: Final = {
    "operations": (1, 16), "magnitude": (0, 30), "grey": (0, 1), "blur": (0, 1), "erase": (0, 1),
    "mixup": (0, 100), "cutmix": (0, 100), "mask_fill": (0, 255),
}  # fmt: skip
"""Of fields that are one number. What is not here, native code checks."""

_PAIRS: Final = {"blur_sigma": 1 << 14, "erase_scale": 1, "erase_ratio": sys.float_info.max}
"""Of fields that are a low and a high number, which are positive: the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What pictures become. Each argument is explained in the documentation, "Pictures and tokens".

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
    """Of red, green and blue, of values from 0 to 1."""

    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Likewise; ImageNet's are (0.485, 0.456, 0.406) and (0.229, 0.224, 0.225)."""

    layout: Literal["nchw", "nhwc"] = "nchw"
    """Planes of red, green and blue, or three values a pixel (channels last)."""

    orient: bool = False
    """Turn pictures upright as their EXIF data say. Pillow and torchvision do not unless they are told."""

    background: tuple[int, int, int] | None = None
    """Red, green and blue of what shines through transparent pixels; None: transparency is left out, as
    Pillow's `convert("RGB")` does."""

    keep: Literal["decoded"] | None = None
    """`decoded`: pictures are reduced until their short side has `keep_short` pixels, and are cut from that; it
    is kept in this process's memory, where later epochs begin; with `plane="node"` in the node daemon's,
    decoded once for all processes of the node. What does not fit is decoded anew, to the same pixels. A crop of
    a small part is less sharp than one of the original."""

    keep_short: int | None = None
    """Pixels of the short side; None: 8/7 of the larger side of the output (256 for 224)."""

    keep_bytes: int | None = None
    """Memory for pictures that this process keeps; None: half of what is available, and 2 GiB less than all of
    it. With `plane="node"` it keeps none."""

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

    blur: float = 0.0
    """Probability of a Gaussian blur, as torchvision's GaussianBlur has it, in RandomApply."""

    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Bounds of its standard deviation in pixels of the output."""

    blur_kernel: int | None = None
    """Pixels of a side of its kernel, odd; None: a tenth of the larger side of the output (23 for 224)."""

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

    mask: str | None = None
    """Which part is the picture's mask, a PNG of one channel, at most 8 bits and the picture's size, upright:
    `batch.masks` has its numbers (of a palette: the indices) after the same crop, flips, padding and affine
    steps, by nearest neighbour as Pillow has it."""

    mask_fill: int = 0
    """What masks are padded with, 0 to 255."""

    boxes: str | Callable[[int, Mapping[str, memoryview]], ArrayLike] | None = None
    """A picture's boxes, which follow likewise into `batch.boxes`: an array of shape (boxes, 4 or more), left,
    top, right and bottom in pixels of the upright picture, and whatever goes with each. The part that holds it
    as `.npy`, or as COCO's list of annotations, whose category becomes a fifth column; or a function of the
    sample's index and of its parts' bytes by name."""

    empty_boxes: Literal["drop", "keep"] = "drop"
    """What becomes of boxes of which nothing is left within the output."""

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            self._expect(name, low <= getattr(self, name) <= high, f"{low} to {high}")
        for name, most in _PAIRS.items():
            low, high = getattr(self, name)
            self._expect(name, 0 < low <= high <= most, f"0 < low <= high <= {most:g}")
        self._expect("keep", self.keep in (None, "decoded"), "'decoded' or None")
        self._expect("keep_bytes", self.keep_bytes is None or self.keep_bytes >= 1, "at least 1")
        self._expect("empty_boxes", self.empty_boxes in ("drop", "keep"), "'drop' or 'keep'")
        strong = len(self.jitter) == 4 and all(0 <= each <= 100 for each in self.jitter)
        strengths = "brightness, contrast, saturation (0 and more) and hue (0 to 0.5)"
        self._expect("jitter", strong and self.jitter[3] <= 0.5, strengths)
        least = min(self.planes[1:])
        room = 0 if self.crop == "random" else least
        self._expect("padding", 0 <= self.padding <= room, f"0 to {room} with crop={self.crop!r}")
        kernel, widest = self._blur_kernel, 2 * least - 1
        if self.blur and not (kernel % 2 == 1 and 1 <= kernel <= widest):
            raise ValueError(f"blur_kernel is {kernel}, expected an odd number, 1 to {widest}")
        if self.mixup and self.dtype == "bfloat16":
            raise ValueError(
                "dtype is 'bfloat16', expected another one: numpy cannot blend it for mixup"
            )
        if self.dtype == "uint8" and (self.mean != (0, 0, 0) or self.std != (1, 1, 1)):
            raise ValueError("mean and std are given and dtype is 'uint8': give a float dtype")
        if self.keep is None and (self.keep_short, self.keep_bytes) != (None, None):
            raise ValueError("keep_short or keep_bytes is given without keep='decoded'")
        other = "mixup and cutmix" if self.mixup or self.cutmix else self.keep and "keep='decoded'"
        if other and (self.mask is not None or self.boxes is not None):
            raise ValueError(f"masks and boxes do not go with {other}: leave one of them out")
        self.recipe()

    def _expect(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one sample's pixels."""
        _, height, width = self.planes
        return (3, height, width) if self.layout == "nchw" else (height, width, 3)

    @property
    def is_random(self) -> bool:
        """Whether a picture may become something else with another seed or epoch."""
        drawn = (self.flip, self.flip_vertical, self.padding, self.augment, *self.jitter)
        shares = (self.grey, self.blur, self.erase, self.mixup, self.cutmix)
        return self.crop == "random" or any(drawn + shares)

    @property
    def planes(self) -> tuple[int, int, int]:
        """The same as planes: 3, height and width."""
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        return 3, height, width

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Of the arrays; uint16 for bfloat16's bits."""
        return np.dtype(_DTYPES[self.dtype])

    def recipe(self) -> _native.PictureRecipe:
        """The same for native code, which takes its fields by name; here is what they leave open."""
        _, height, width = self.planes
        noise = self.erase_value == "random"
        return _native.PictureRecipe.make(
            self,
            height=height,
            width=width,
            flip=0.5 if self.flip is True else self.flip,
            flip_vertical=0.5 if self.flip_vertical is True else self.flip_vertical,
            short_side=self._usual_short if self.short is None else self.short,
            keep_short=0 if self.keep is None else self._kept_short,
            background=-1 if self.background is None else self._packed("background", "big"),
            blur_kernel=self._blur_kernel,
            erase_value=-1 if noise else self._packed("erase_value", "little"),
        )

    def _packed(self, name: str, order: Literal["big", "little"]) -> int:
        colour = getattr(self, name)
        fits = len(colour) == 3 and all(0 <= level <= 255 for level in colour)
        self._expect(name, fits, "three levels of 0 to 255")
        return int.from_bytes(bytes(colour), order)

    def kept(self, part_names: Sequence[str]) -> Images:
        """What is done to a picture of `keep="decoded"` once: the same for all recipes that may share it."""
        return kept_images(
            keep_short=self._kept_short, filter=self.filter, exact=self.exact, orient=self.orient,
            background=self.background, max_pixels=self.max_pixels,
            part=part_names[self.part_of(part_names)],
        )  # fmt: skip

    @property
    def _usual_short(self) -> int:
        return round(max(self.planes[1:]) * 8 / 7)

    @property
    def _kept_short(self) -> int:
        return max(1, self._usual_short if self.keep_short is None else self.keep_short)

    @property
    def _blur_kernel(self) -> int:
        return self.blur_kernel or max(self.planes[1:]) // 20 * 2 + 1

    def steps(
        self, seed: int, epoch: int, indices: NDArray[np.int64]
    ) -> NDArray[np.float64] | None:
        """Draw what is done to pictures after they were cut, resized and flipped.

        Returns:
            float64, shape (pictures, steps, 7): see native/pixels/augment.h; None: nothing ever is.
        """
        return self.recipe().steps(seed, epoch, np.ascontiguousarray(indices, np.int64))

    def part_of(self, names: Sequence[str]) -> int:
        """Which of a sample's parts is its picture, by its number.

        Raises:
            ValueError: none of them, or several may be; or there is no part for masks or boxes.
        """
        others = [self.mask, self.boxes if isinstance(self.boxes, str) else None]
        for what, wanted in zip(("part", "mask", "boxes"), (self.part, *others), strict=True):
            if wanted is not None and wanted not in names:
                raise ValueError(f"{what} is {wanted!r}, and the samples have {list(names)}")
        if self.part is not None:
            return list(names).index(self.part)
        left = [i for i, name in enumerate(names) if name not in others]
        if len(left) == 1:
            return left[0]
        known = [i for i in left if names[i].lower().rpartition(".")[2] in _EXTENSIONS]
        if len(known) != 1:
            raise ValueError(
                f"the samples have the parts {list(names)}: say Images(part=...), which is the picture"
            )
        return known[0]


def kept_images(**done: Any) -> Images:
    """`Images.kept` of what is `done` to a picture, all that a node daemon is told: the output is nobody's."""
    return Images(size=1, keep="decoded", **done)


class ImageBatch(Batch):
    """Pictures that are delivered together, decoded; with their bytes, unless pictures are kept decoded.

    Attributes:
        pixels: (samples, ...), each of `Images.shape` and `Images.numpy_dtype`; the buffer is this batch's
            alone.
        mixed: both labels of each picture and their shares, where `mixup` or `cutmix` mixed them; or None.
        masks: uint8, shape (samples, height, width), where `mask` is given; or None.
        boxes: of each sample float32, shape (boxes, 4 or more), where `boxes` is given: left, top, right and
            bottom in pixels of the output; or None.
        kept_part: the part whose bytes are not here, since pictures are kept decoded; or None.
        recycled: they lie in a buffer of the decode stage, which it uses again when this batch is gone; else,
            where samples were left out, in a copy.
    """

    __slots__ = ("boxes", "kept_part", "masks", "mixed", "pixels", "recycled")

    pixels: NDArray[Any]
    mixed: MixedLabels | None
    masks: NDArray[np.uint8] | None
    boxes: list[NDArray[np.float32]] | None
    recycled: bool
    kept_part: str | None

    def __getitem__(self, i: int | tuple[int, str]) -> memoryview:
        """Return the bytes of the i-th sample, as `Batch` does.

        Raises:
            ValueError: they are a picture's that is kept decoded, and not what the store has.
        """
        part = i[1] if isinstance(i, tuple) else self.part_names[0]
        named = isinstance(i, tuple) or len(self.part_names) == 1
        if named and part == self.kept_part:
            sample = i[0] if isinstance(i, tuple) else i
            raise ValueError(
                f"the bytes of sample {self.indices[sample]} are not here: its picture is kept decoded "
                "(keep='decoded'). Leave keep out, or read them with store.read."
            )
        return super().__getitem__(i)

    def __repr__(self) -> str:
        return f"ImageBatch({len(self)} samples, pixels {self.pixels.shape}, epoch {self.epoch})"
