"""Augmentations: what is drawn for each picture beside its crop and flips, as steps that native code takes.

The operators are Pillow's and the distributions torchvision's; native/pixels/augment.cc does the work. Random
numbers come from (seed, epoch, index) alone: number k of a picture is always used for the same thing, so whole
batches are drawn at once.
"""

from __future__ import annotations

import random
from enum import IntEnum
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.order.hash import GOLDEN, Purpose, derive_key, mix64_array, order_hash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.plane.images import Images

VALUES: Final = 7
"""Numbers of a step: the operator and its six."""

LEVELS: Final = 30
"""Magnitudes are 0 to 30, as torchvision's 31 bins."""

TRIES: Final = 10
"""Rectangles that are drawn until one fits."""


class Op(IntEnum):
    """What a step does; the numbers of native/pixels/augment.h."""

    BRIGHTNESS = 1
    CONTRAST = 2
    COLOUR = 3
    HUE = 4
    SHARPNESS = 5
    POSTERIZE = 6
    SOLARIZE = 7
    AUTOCONTRAST = 8
    EQUALIZE = 9
    AFFINE = 10
    ERASE = 11
    AFFINE_BILINEAR = 12
    BLUR = 13


# -- the operators of RandAugment and TrivialAugmentWide, by torchvision's names -------------------------

_FACTORS: Final = {
    "Brightness": Op.BRIGHTNESS,
    "Color": Op.COLOUR,
    "Contrast": Op.CONTRAST,
    "Sharpness": Op.SHARPNESS,
}
_PLAIN: Final = {
    "Posterize": Op.POSTERIZE,
    "Solarize": Op.SOLARIZE,
    "AutoContrast": Op.AUTOCONTRAST,
    "Equalize": Op.EQUALIZE,
}
_AFFINE: Final = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")

OPERATORS: Final = ("Identity", *_AFFINE, *_FACTORS, *_PLAIN)
"""In torchvision's order."""


def operator(
    name: str, magnitudes: NDArray[np.float64], width: int, height: int
) -> NDArray[np.float64]:
    """Return the steps of an operator at each of some magnitudes: float64, shape (n, 7).

    It is one of `OPERATORS`, or `Invert`, which AutoAugment has. Magnitudes, shape (n,), have torchvision's
    units and signs: a share that is added to 1, a slope, pixels, degrees counter-clockwise, bits that are
    left, or a level. Width and height are the output's.
    """
    steps = np.zeros((len(magnitudes), VALUES))
    if name in _FACTORS:
        steps[:, 0], steps[:, 1] = _FACTORS[name], 1 + magnitudes
    elif name in _PLAIN:
        steps[:, 0], steps[:, 1] = _PLAIN[name], magnitudes
    elif name == "Invert":
        steps[:, 0] = Op.SOLARIZE  # from black on
    elif name in _AFFINE:
        steps[:] = (Op.AFFINE, 1, 0, 0, 0, 1, 0)
        if name == "Rotate":
            angles = -np.radians(magnitudes % 360)
            cos, sin = np.round(np.cos(angles), 15), np.round(np.sin(angles), 15)
            x, y = width / 2, height / 2
            parts = (cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y)
            steps[:, 1:] = np.stack(parts, -1)
        elif name.startswith("Shear"):
            steps[:, 2 if name == "ShearX" else 4] = magnitudes
        else:
            steps[:, 3 if name == "TranslateX" else 6] = -np.trunc(magnitudes)
    return steps


def _magnitudes(
    images: Images, name: str, levels: NDArray[np.float64], signs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of an operator at levels of 0 to 1, as torchvision's two policies span them."""
    wide = images.augment == "trivialaugment"
    _, height, width = images.planes
    if name == "Posterize":
        return 8 - np.rint(levels * (6 if wide else 4))
    if name == "Solarize":
        return 255 * (1 - levels)
    if name.startswith("Shear"):
        top = 0.99 if wide else 0.3
    elif name.startswith("Translate"):
        top = 32 if wide else 150 / 331 * (width if name == "TranslateX" else height)
    elif name == "Rotate":
        top = 135 if wide else 30
    else:
        top = 0.99 if wide else 0.9
    return levels * top * signs


# -- drawing ---------------------------------------------------------------------------------------


class _Numbers:
    """The random numbers of some pictures, in their order."""

    def __init__(self, seed: int, epoch: int, indices: NDArray[np.int64]) -> None:
        key = np.uint64(derive_key(seed, Purpose.AUGMENTATIONS, epoch))
        self._keys = mix64_array((indices.astype(np.uint64) ^ key) + np.uint64(GOLDEN))[:, None]
        self._next = 1

    def take(self, count: int) -> NDArray[np.float64]:
        """The next numbers of each, in [0, 1): shape (count, pictures)."""
        counters = np.arange(self._next, self._next + count, dtype=np.uint64) * np.uint64(GOLDEN)
        self._next += count
        words = mix64_array(self._keys + counters) >> np.uint64(11)
        return (words.astype(np.float64) * 2.0**-53).T

    def below(self, bound: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Whole numbers in [0, bound)."""
        bounds = np.asarray(bound, np.int64)
        whole = (self.take(1)[0] * bounds).astype(np.int64)
        return np.asarray(np.minimum(whole, bounds - 1), np.int64)


def has_steps(images: Images) -> bool:
    """Whether anything is done to pictures after they were cut, resized and flipped."""
    given = (images.padding, images.augment, *images.jitter, images.grey, images.blur, images.erase)
    return any(given)


def steps(
    images: Images, seed: int, epoch: int, indices: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """Draw the steps of some pictures; see `Images.steps`."""
    if not has_steps(images):
        return None
    numbers, columns = _Numbers(seed, epoch, indices), []
    _, height, width = images.planes
    if images.padding:
        shift = operator("Identity", np.zeros(len(indices)), width, height)
        shift[:] = (Op.AFFINE, 1, 0, 0, 0, 1, 0)
        for value in (3, 6):
            shift[:, value] = numbers.below(2 * images.padding + 1) - images.padding
        columns.append(shift)
    operators = {None: 0, "randaugment": images.operations, "trivialaugment": 1}[images.augment]
    columns += [_policy(images, numbers) for _ in range(operators)]
    columns += _jitter(images, numbers)
    if images.grey:
        step = np.zeros((len(indices), VALUES))
        step[:, 0] = np.where(numbers.take(1)[0] < images.grey, Op.COLOUR, 0)  # by a factor of 0
        columns.append(step)
    if images.blur:
        columns.append(_blur(images, numbers))
    if images.erase:
        columns.append(_rectangles(images, numbers, len(indices)))
    return np.ascontiguousarray(np.stack(columns, 1))


def _policy(images: Images, numbers: _Numbers) -> NDArray[np.float64]:
    _, height, width = images.planes
    chosen = numbers.below(len(OPERATORS))
    levels = numbers.below(LEVELS + 1) / LEVELS
    if images.augment == "randaugment":
        levels[:] = images.magnitude / LEVELS
    signs = np.where(numbers.take(1)[0] < 0.5, -1.0, 1.0)
    step = np.zeros((len(chosen), VALUES))
    for i, name in enumerate(OPERATORS):
        at = chosen == i
        magnitudes = _magnitudes(images, name, levels[at], signs[at])
        step[at] = operator(name, magnitudes, width, height)
    return step


def _blur_kernel(images: Images) -> int:
    return images.blur_kernel or max(images.planes[1:]) // 20 * 2 + 1


def _blur(images: Images, numbers: _Numbers) -> NDArray[np.float64]:
    (wanted, share), (low, high) = numbers.take(2), images.blur_sigma
    step = np.zeros((len(share), VALUES))
    step[:, 0] = np.where(wanted < images.blur, Op.BLUR, 0)
    step[:, 1:3], step[:, 3:5] = _blur_kernel(images), (low + share * (high - low))[:, None]
    return step


def _jitter(images: Images, numbers: _Numbers) -> list[NDArray[np.float64]]:
    drawn = []
    for op, strength in zip(
        (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOUR, Op.HUE), images.jitter, strict=True
    ):
        (share,) = numbers.take(1)
        low = -strength if op is Op.HUE else max(0.0, 1 - strength)
        factors = low + share * ((strength if op is Op.HUE else 1 + strength) - low)
        if strength:
            step = np.zeros((len(share), VALUES))
            step[:, 0], step[:, 1] = op, np.trunc(factors * 255) if op is Op.HUE else factors
            drawn.append(step)
    if not drawn:
        return []
    orders = np.array(list(permutations(range(len(drawn)))))
    places = orders[numbers.below(len(orders))]
    together = np.take_along_axis(np.stack(drawn, 1), places[:, :, None], 1)
    return list(together.transpose(1, 0, 2))


def _rectangles(images: Images, numbers: _Numbers, pictures: int) -> NDArray[np.float64]:
    """Of ten random areas and ratios the first that leaves something of the picture."""
    _, height, width = images.planes
    colour = images.erase_value
    packed = -1 if colour == "random" else colour[0] | colour[1] << 8 | colour[2] << 16
    step = np.zeros((pictures, VALUES))
    wanted = numbers.take(1)[0] < images.erase
    noise = numbers.take(1)[0] * 2.0**52
    logs = np.log(images.erase_ratio)
    for _ in range(TRIES):
        area, ratio = numbers.take(2)
        area = height * width * (images.erase_scale[0] + area * np.ptp(images.erase_scale))
        ratio = np.exp(logs[0] + ratio * (logs[1] - logs[0]))
        rows, columns = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (rows < height) & (columns < width)
        top, left = (
            numbers.below(np.maximum(side - part + 1, 1).astype(np.int64))
            for side, part in ((height, rows), (width, columns))
        )
        at = wanted & fits
        values = np.stack((left, top, columns, rows, np.full(pictures, packed), noise), -1)
        step[at, 0], step[at, 1:] = Op.ERASE, values[at]
        wanted &= ~fits
    return step


# -- whole batches ---------------------------------------------------------------------------------


class MixedLabels(NamedTuple):
    """What a batch shows that MixUp or CutMix mixed: a loss is `lam * loss(a) + (1 - lam) * loss(b)`."""

    labels_a: Any
    """Of the pictures themselves, int64 of shape (samples,), as an array or a torch tensor."""
    labels_b: Any
    """Of the pictures that were mixed into them."""
    lam: float
    """The pictures' own share."""


def mix(
    images: Images,
    pixels: NDArray[Any],
    labels: NDArray[np.int64],
    indices: NDArray[np.int64],
    *,
    seed: int,
    epoch: int,
) -> MixedLabels:
    """Mix the pictures of a batch in place, the first with the last and so on, as timm does.

    The indices, seed and epoch alone decide how, and which of `mixup` and `cutmix` where both are positive.
    """
    numbers = random.Random(derive_key(seed, Purpose.MIXES, epoch, order_hash(0, indices)))  # noqa: S311
    cut = numbers.random() < 0.5 if images.mixup and images.cutmix else bool(images.cutmix)
    alpha = images.cutmix if cut else images.mixup
    lam = numbers.betavariate(alpha, alpha)
    half = len(pixels) // 2
    if cut:
        _, height, width = images.planes
        sides = [round(side * (1 - lam) ** 0.5) for side in (height, width)]
        middles = [int(numbers.random() * side) for side in (height, width)]
        rows, columns = (
            slice(max(0, at - part // 2), min(side, at - part // 2 + part))
            for at, part, side in zip(middles, sides, (height, width), strict=True)
        )
        box = (..., rows, columns) if images.layout == "nchw" else (..., rows, columns, slice(None))
        one, other = pixels[:half][box], pixels[::-1][:half][box]
        kept = one.copy()
        one[...], other[...] = other, kept
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        lam = 1 - area / (height * width)
    else:
        lam = round(lam * 256) / 256  # 8-bit pixels are blended in whole numbers
        for one, other in zip(pixels[:half], pixels[::-1], strict=False):
            _blend(one, other, lam)
    return MixedLabels(labels, labels[::-1].copy(), lam)


def _blend(one: NDArray[Any], other: NDArray[Any], lam: float) -> None:
    """Give each of two pictures a share `lam` of itself, rounded to the nearest, and the rest of the other."""
    if one.dtype == np.uint8:
        share, rest = np.uint16(round(lam * 256)), np.uint16(256 - round(lam * 256))
        a, b = one.astype(np.uint16), other.astype(np.uint16)
        for to, x, y in ((one, a, b), (other, b, a)):
            # Both shares of 255 and the half that is added fit 16 bits.
            to[...] = (x * share + y * rest + np.uint16(128)) >> np.uint16(8)
    else:
        a, b = one.astype(np.float32), other.astype(np.float32)
        one[...], other[...] = a * lam + b * (1 - lam), b * lam + a * (1 - lam)


def expect(fits: bool, what: str, given: Any, expected: str) -> None:
    """Raise ValueError, which says what is wrong with a field of `Images`, unless it fits."""
    if not fits:
        raise ValueError(f"{what} is {given!r}, expected {expected}")


def check(images: Images) -> None:
    """See that what `Images` says of augmentations can be drawn.

    Raises:
        ValueError: it cannot.
    """
    height, width = images.planes[1:]
    policies = (None, "randaugment", "trivialaugment")
    expect(images.augment in policies, "augment", images.augment, f"one of {policies}")
    expect(1 <= images.operations <= 16, "operations", images.operations, "1 to 16")
    expect(0 <= images.magnitude <= LEVELS, "magnitude", images.magnitude, f"0 to {LEVELS}")
    room = 0 if images.crop == "random" else min(height, width)
    expect(
        0 <= images.padding <= room, "padding", images.padding,
        f"0 to {room} with crop={images.crop!r}",
    )  # fmt: skip
    jitter = images.jitter
    expect(
        len(jitter) == 4 and all(0 <= strength <= 100 for strength in jitter) and jitter[3] <= 0.5,
        "jitter", jitter, "brightness, contrast, saturation (0 and more) and hue (0 to 0.5)",
    )  # fmt: skip
    for name in ("grey", "blur", "erase"):
        expect(0 <= getattr(images, name) <= 1, name, getattr(images, name), "a probability")
    for name in ("mixup", "cutmix"):
        expect(0 <= getattr(images, name) <= 100, name, getattr(images, name), "an alpha, 0 to 100")
    expect(
        not images.mixup or images.dtype != "bfloat16", "dtype", images.dtype,
        "another one with mixup: numpy cannot blend it",
    )  # fmt: skip
    if images.blur:
        kernel, most = _blur_kernel(images), 2 * min(height, width) - 1
        fits = kernel % 2 == 1 and 1 <= kernel <= most
        expect(fits, "blur_kernel", kernel, f"an odd number, 1 to {most}")
    low, high = images.blur_sigma
    expect(0 < low <= high <= 1 << 14, "blur_sigma", images.blur_sigma, "0 < low <= high <= 16384")
    low, high = images.erase_scale
    expect(0 < low <= high <= 1, "erase_scale", images.erase_scale, "0 < low <= high <= 1")
    low, high = images.erase_ratio
    expect(0 < low <= high < np.inf, "erase_ratio", images.erase_ratio, "0 < low <= high")
    colour = images.erase_value
    expect(
        colour == "random" or (len(colour) == 3 and all(0 <= level <= 255 for level in colour)),
        "erase_value", colour, "three levels of 0 to 255, or 'random'",
    )  # fmt: skip
