"""Augmentations of torchvision's: what they draw, as native code takes it (`headrace.plane.augment`).

Parameters are drawn by the transform's `get_params` or `make_params` where it has one, and for its policies
from their own spaces of magnitudes; always from torch's generator, in torchvision's order. A transform is taken
over on PIL's pictures alone, whose operators native code has; but GaussianBlur on bytes in tensors, too, as
torchvision blurs pictures so, and RandomErasing on tensors, where torch itself erases.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from headrace import _native
from headrace.plane.augment import Op

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLICIES: Final = ("AutoAugment", "RandAugment", "TrivialAugmentWide")

_SOMETIMES: Final = {
    "RandomInvert": (Op.SOLARIZE, None),
    "RandomPosterize": (Op.POSTERIZE, "bits"),
    "RandomSolarize": (Op.SOLARIZE, "threshold"),
    "RandomAdjustSharpness": (Op.SHARPNESS, "sharpness_factor"),
    "RandomAutocontrast": (Op.AUTOCONTRAST, None),
    "RandomEqualize": (Op.EQUALIZE, None),
}
"""One operator with a probability: which, and the attribute that says how strong it is; None: 0."""

NAMES: Final = (
    *_POLICIES, *_SOMETIMES, "ColorJitter", "Grayscale", "RandomGrayscale", "GaussianBlur", "RandomRotation",
    "RandomAffine", "RandomApply", "RandomErasing",
)  # fmt: skip

_FILTERS: Final = {
    "nearest": Op.AFFINE, "nearest-exact": Op.AFFINE, 0: Op.AFFINE,
    "bilinear": Op.AFFINE_BILINEAR, 2: Op.AFFINE_BILINEAR,
}  # fmt: skip

_LIMIT: Final = 1 << 20
"""Of numbers that native code takes."""


def name_of(transform: Any) -> str:
    """Of a class of torchvision's; empty: it is none."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith("torchvision.transforms") else ""


def taken(  # noqa: PLR0911 - a table
    name: str, one: Any, form: str, size: tuple[int, int]
) -> bool:
    """Whether native code does what this transform does to pixels in this form and of this size."""
    if name == "RandomApply":
        inner = [(name_of(each), each) for each in one.transforms]
        return all(
            each != "RandomErasing" and each in NAMES and taken(each, transform, form, size)
            for each, transform in inner
        )
    if name == "GaussianBlur":
        # Both kinds of pictures are blurred alike; torch refuses a larger kernel.
        columns, rows = one.kernel_size
        fits = columns < 2 * size[1] and rows < 2 * size[0]
        return fits and max(one.sigma) < _LIMIT and form in {"pil", "uint8"}
    if form != "pil":
        return False
    if name == "Grayscale":
        return bool(one.num_output_channels == 3)
    if name in _SOMETIMES:
        attribute = _SOMETIMES[name][1]
        strength = 0 if attribute is None else getattr(one, attribute)
        return bool(0 <= strength <= (8 if name == "RandomPosterize" else 256))
    if name in _POLICIES:
        space = getattr(one, "_AUGMENTATION_SPACE", None) or hasattr(one, "_augmentation_space")
        return bool(space) and _moves_alike(one)
    if name == "RandomRotation":
        return not one.expand and one.center is None and _moves_alike(one)
    return name != "RandomAffine" or _moves_alike(one)


def _moves_alike(one: Any) -> bool:
    """Whether it moves pixels by a filter that native code has, with black outside."""
    return _filter_of(one) is not None and _is_black(one.fill)


def _filter_of(one: Any) -> Op | None:
    return _FILTERS.get(getattr(one.interpolation, "value", one.interpolation))


def pads_black(one: Any) -> bool:
    """Whether this transform pads with black."""
    return one.padding_mode == "constant" and _is_black(one.fill)


def _is_black(fill: Any) -> bool:
    values = fill if isinstance(fill, (tuple, list)) else [fill]
    return all(
        value is None or (isinstance(value, (int, float)) and value == 0) for value in values
    )


def padding_of(one: Any) -> int | None:
    """Pixels of padding, where they are as many on all sides; None: they are not."""
    sides = {one.padding} if isinstance(one.padding, (int, type(None))) else set(one.padding)
    return (sides.pop() or 0) if len(sides) == 1 else None


def blank(width: int, height: int) -> torch.Tensor:
    """What has a picture's sizes and no pixels of its own: transforms that draw ask for no more."""
    return torch.empty(1).expand(3, height, width)


def params_of(one: Any, picture: torch.Tensor) -> dict[str, Any] | None:
    """What a transform of v2 draws; None: it is one of v1."""
    make = getattr(one, "make_params", getattr(one, "_get_params", None))  # v2, and v2 before 0.21
    drawn: dict[str, Any] | None = None if make is None else make([picture])
    return drawn


def crop_of(name: str, one: Any, width: int, height: int) -> tuple[int, int, int, int]:
    """Draw where a picture of this size is cut: top, left, height and width; where it is padded, beyond it."""
    padding = (padding_of(one) or 0) if name == "RandomCrop" else 0
    given = params_of(one, blank(width, height))
    if given is not None:
        return given["top"] - padding, given["left"] - padding, given["height"], given["width"]
    padded = blank(width + 2 * padding, height + 2 * padding)
    bounds = (one.size,) if name == "RandomCrop" else (one.scale, one.ratio)
    top, left, rows, columns = one.get_params(padded, *bounds)
    return top - padding, left - padding, rows, columns


def steps_of(name: str, one: Any, width: int, height: int) -> list[list[float]]:  # noqa: PLR0911 - a table
    """Draw what a transform does to a picture of this size."""
    if name == "RandomApply":
        if bool(torch.rand(1) >= one.p if _second(one) else one.p < torch.rand(1)):
            return []
        inner = [(name_of(each), each) for each in one.transforms]
        return [step for each in inner for step in steps_of(*each, width, height)]
    if name == "ColorJitter":
        return _jitter(one, blank(width, height))
    if name in {"Grayscale", "RandomGrayscale"}:
        grey = name == "Grayscale" or bool(torch.rand(1) < one.p)
        return [_step(Op.COLOUR)] if grey else []
    if name in _SOMETIMES:
        op, attribute = _SOMETIMES[name]
        # The one compares in torch's precision, the other in Python's.
        if bool(torch.rand(1) >= one.p) if _second(one) else torch.rand(1).item() >= one.p:
            return []
        return [_step(op, 0.0 if attribute is None else float(getattr(one, attribute)))]
    if name == "GaussianBlur":
        drawn = params_of(one, blank(width, height))
        sigmas = [one.get_params(*one.sigma)] * 2 if drawn is None else drawn["sigma"]
        return [_step(Op.BLUR, *map(float, (*one.kernel_size, *sigmas)))]
    if name == "RandomRotation":
        drawn = params_of(one, blank(width, height))
        angle = one.get_params(one.degrees) if drawn is None else drawn["angle"]
        steps = [_native.augmentation("Rotate", angle, width, height)]
    elif name == "RandomAffine":
        steps = [_affine(one, width, height)]
    else:
        steps = list(_policy(name, one, width, height))
    filtered = float(_filter_of(one) or Op.AFFINE)
    return [[filtered, *step[1:]] if step[0] == Op.AFFINE else step for step in steps]


def _second(one: Any) -> bool:
    """Whether it is one of v2."""
    return ".v2" in type(one).__module__


def _step(op: Op, *values: float) -> list[float]:
    return [op, *values, *[0.0] * (6 - len(values))]


def _jitter(one: Any, picture: torch.Tensor) -> list[list[float]]:
    drawn = params_of(one, picture)
    if drawn is None:
        order, *factors = one.get_params(one.brightness, one.contrast, one.saturation, one.hue)
    else:
        order = drawn["fn_idx"]
        names = ("brightness", "contrast", "saturation", "hue")
        factors = [drawn[f"{name}_factor"] for name in names]
    steps = []
    for i in map(int, order):
        if factors[i] is not None:
            op = (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOUR, Op.HUE)[i]
            # torchvision turns hues by whole levels of 8 bits.
            steps.append(_step(op, int(factors[i] * 255) if op is Op.HUE else float(factors[i])))
    return steps


def _affine(one: Any, width: int, height: int) -> list[float]:
    """A RandomAffine: where each pixel comes from, with torchvision's order of its parts."""
    drawn = params_of(one, blank(width, height))
    names = ("angle", "translate", "scale", "shear")
    angle, shift, scale, shear = (
        one.get_params(one.degrees, one.translate, one.scale, one.shear, [width, height])
        if drawn is None
        else (drawn[name] for name in names)
    )
    turn, (sx, sy) = math.radians(angle), map(math.radians, shear)
    cos, sin = math.cos(turn - sy) / math.cos(sy), math.sin(turn - sy) / math.cos(sy)
    back = (
        -sin * math.tan(sx) + math.cos(turn), cos * math.tan(sx) + math.sin(turn), -sin, cos,
    )  # fmt: skip
    a, b, d, e = (part / scale for part in back)
    x, y = (width * 0.5, height * 0.5) if one.center is None else one.center
    to_x, to_y = -x - shift[0], -y - shift[1]
    return _step(Op.AFFINE, a, b, a * to_x + b * to_y + x, d, e, d * to_x + e * to_y + y)


def _policy(name: str, one: Any, width: int, height: int) -> Iterator[list[float]]:
    """The operators of a policy; v1 and v2 draw differently."""
    bins = 10 if name == "AutoAugment" else one.num_magnitude_bins
    second = getattr(one, "_AUGMENTATION_SPACE", None)
    if second is None:
        size = () if name == "TrivialAugmentWide" else ((height, width),)
        first = one._augmentation_space(bins, *size)  # noqa: SLF001 - torchvision's forward asks it
    for chosen, given, sign in _chosen(name, one, list(second or first), second is not None):
        if second is not None:
            make, signed = second[chosen]
            magnitudes = make(bins, height, width)
        else:
            magnitudes, signed = first[chosen]
            magnitudes = magnitudes if magnitudes.ndim > 0 else None
        level, negative, magnitude = given, sign, 0.0
        if magnitudes is not None:
            if level is None and second is not None:
                level = int(torch.randint(bins, ()))
            elif level is None:
                level = int(torch.randint(len(magnitudes), (1,), dtype=torch.long))
            magnitude = float(magnitudes[level])
            # torchvision's v2 asks for a sign only where there are magnitudes; in v1 none is signed without.
            if signed and negative is None:
                drawn = torch.rand(()) <= 0.5 if second is not None else torch.randint(2, (1,))
                negative = bool(drawn)
            magnitude *= -1.0 if signed and negative else 1.0
        if chosen == "Solarize" and second is not None:
            magnitude *= 255.0  # a share of the largest value
        if chosen == "Posterize":
            magnitude = int(magnitude)
        yield _native.augmentation(chosen, magnitude, width, height)


def _chosen(
    name: str, one: Any, names: list[str], second: bool
) -> Iterator[tuple[str, int | None, bool | None]]:
    """Draw a policy's operators: each with its level and whether it is negative, if that is not drawn later."""
    if name != "AutoAugment":
        for _ in range(one.num_ops if name == "RandAugment" else 1):
            at = int(torch.randint(len(names), () if second else (1,)))
            yield names[at], one.magnitude if name == "RandAugment" else None, None
    elif second:
        policies = one._policies  # noqa: SLF001 - torchvision's forward asks them
        for chosen, probability, level in policies[int(torch.randint(len(policies), ()))]:
            if bool(torch.rand(()) <= probability):
                yield chosen, level, None
    else:
        at, shares, signs = one.get_params(len(one.policies))
        for i, (chosen, probability, level) in enumerate(one.policies[at]):
            if bool(shares[i] <= probability):
                yield chosen, level, bool(signs[i] == 0)


def erasing_of(one: Any, width: int, height: int) -> tuple[int, int, int, int, Any] | None:
    """Draw a RandomErasing: top, left, height and width of what is erased, and with what; None: nothing is."""
    if not bool(torch.rand(1) < one.p):
        return None
    picture = blank(width, height)
    drawn = params_of(one, picture)
    if drawn is not None:
        top, left, rows, columns, pixels = (drawn[key] for key in "ijhwv")
        return None if pixels is None else (top, left, rows, columns, pixels)
    value = one.value
    if isinstance(value, (int, float)):
        value = [float(value)]
    top, left, rows, columns, pixels = one.get_params(
        picture, one.scale, one.ratio, None if isinstance(value, str) else list(value)
    )
    # Where no rectangle fits, torchvision gives the picture itself.
    return None if pixels is picture else (top, left, rows, columns, pixels)
