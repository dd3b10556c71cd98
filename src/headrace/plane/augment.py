"""Augmentations: the steps that native code takes by number, and batches that are mixed whole.

Which steps a picture gets is drawn in native/pixels/steps.cc, from (seed, epoch, index) alone, and done in
native/pixels/augment.cc. MixUp and CutMix need all pictures of a batch, and are drawn for it here.
"""

from __future__ import annotations

import random
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace import _native
from headrace.order.hash import Purpose, derive_key, order_hash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.plane.images import Images


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
    if one.dtype != np.float16:
        _native.blend_pictures(one, other, lam)
    else:
        a, b = one.astype(np.float32), other.astype(np.float32)
        one[...], other[...] = a * lam + b * (1 - lam), b * lam + a * (1 - lam)
