"""Augmentations of torchvision's: what they draw, as native code takes it (`headrace.plane.augment`).

Parameters are drawn by the transform's `get_params` or `make_params` where it has one, and for RandAugment and
TrivialAugmentWide from its own space of magnitudes; always from torch's generator, in torchvision's order. A
transform is taken over on PIL's pictures alone, whose operators native code has; RandomErasing on tensors,
where torch itself erases.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from headrace.plane.augment import Op, operator

COLOURS: Final = ("ColorJitter", "RandomGrayscale")
"""They look at each pixel by itself: whether it is mirrored before or after is the same."""

POLICIES: Final = ("RandAugment", "TrivialAugmentWide")

NAMES: Final = (*COLOURS, *POLICIES, "RandomErasing")


def name_of(transform: Any) -> str:
    """Of a class of torchvision's; empty: it is none."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith("torchvision.transforms") else ""


def taken(name: str, one: Any) -> bool:
    """Whether native code does what this policy does, or what this transform pads with."""
    if name in POLICIES:
        interpolation = getattr(one.interpolation, "value", one.interpolation)
        space = getattr(one, "_AUGMENTATION_SPACE", None) or hasattr(one, "_augmentation_space")
        return bool(space) and interpolation in {"nearest", 0} and _is_black(one.fill)
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


def steps_of(name: str, one: Any, width: int, height: int) -> list[list[float]]:
    """Draw what a transform does to a picture of this size."""
    if name == "ColorJitter":
        return _jitter(one, blank(width, height))
    if name == "RandomGrayscale":
        return [[Op.COLOUR, *[0.0] * 6]] if bool(torch.rand(1) < one.p) else []
    steps: list[list[float]] = []
    for _ in range(one.num_ops if name == "RandAugment" else 1):
        steps += _operator(name, one, width, height)
    return steps


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
            value = int(factors[i] * 255) if op is Op.HUE else float(factors[i])
            steps.append([op, value, *[0.0] * 5])
    return steps


def _operator(name: str, one: Any, width: int, height: int) -> list[list[float]]:
    """One operator of a policy; v1 and v2 draw differently."""
    bins = one.num_magnitude_bins
    second = getattr(one, "_AUGMENTATION_SPACE", None)
    if second is not None:
        chosen = list(second)[int(torch.randint(len(second), ()))]
        make, signed = second[chosen]
        magnitudes = make(bins, height, width)
    else:
        size = ((height, width),) if name == "RandAugment" else ()
        first = one._augmentation_space(bins, *size)  # noqa: SLF001 - torchvision's forward asks it
        chosen = list(first)[int(torch.randint(len(first), (1,)).item())]
        magnitudes, signed = first[chosen]
        magnitudes = magnitudes if magnitudes.ndim > 0 else None
    magnitude = 0.0
    if magnitudes is not None:
        if name == "RandAugment":
            at = one.magnitude
        elif second is not None:
            at = int(torch.randint(bins, ()))
        else:
            at = int(torch.randint(len(magnitudes), (1,), dtype=torch.long))
        magnitude = float(magnitudes[at])
    # torchvision's v2 asks for a sign only where there are magnitudes; in v1 none is signed without them.
    if signed and magnitudes is not None:
        negative = torch.rand(()) <= 0.5 if second is not None else torch.randint(2, (1,))
        magnitude *= -1.0 if bool(negative) else 1.0
    if chosen == "Solarize" and second is not None:
        magnitude *= 255.0  # a share of the largest value
    if chosen == "Posterize":
        magnitude = int(magnitude)
    step: list[list[float]] = operator(chosen, np.array([magnitude]), width, height).tolist()
    return step


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
