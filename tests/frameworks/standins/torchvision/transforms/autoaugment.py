"""A stand-in for torchvision.transforms.autoaugment: what policies draw, and Pillow's operators."""

import math

import torch
from PIL import Image, ImageEnhance, ImageOps

from .transforms import InterpolationMode


def applied(img, name, magnitude, interpolation=InterpolationMode.NEAREST):
    """One operator of a policy to one of PIL's pictures."""
    how = Image.Resampling[interpolation.name]
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return getattr(ImageEnhance, name)(img).enhance(1 + magnitude)
    slope, moved = math.tan(math.radians(math.degrees(math.atan(magnitude)))), -int(magnitude)
    matrix = {
        "ShearX": (1, slope, 0, 0, 1, 0), "ShearY": (1, 0, 0, slope, 1, 0),
        "TranslateX": (1, 0, moved, 0, 1, 0), "TranslateY": (1, 0, 0, 0, 1, moved),
    }  # fmt: skip
    if name in matrix:
        return img.transform(img.size, Image.Transform.AFFINE, matrix[name], how)
    return {
        "Identity": lambda: img,
        "Rotate": lambda: img.rotate(magnitude, how),
        "Posterize": lambda: ImageOps.posterize(img, int(magnitude)),
        "Solarize": lambda: ImageOps.solarize(img, magnitude),
        "AutoContrast": lambda: ImageOps.autocontrast(img),
        "Equalize": lambda: ImageOps.equalize(img),
        "Invert": lambda: ImageOps.invert(img),
    }[name]()


def spans(narrow, bins, height, width):
    """Magnitudes by name, and whether they get a sign: of RandAugment, or of TrivialAugmentWide."""
    top = 0.9 if narrow else 0.99
    slopes = torch.linspace(0.0, 0.3 if narrow else 0.99, bins)
    across, down = (150.0 / 331.0 * width, 150.0 / 331.0 * height) if narrow else (32.0, 32.0)
    return {
        "Identity": (torch.tensor(0.0), False),
        "ShearX": (slopes, True),
        "ShearY": (slopes, True),
        "TranslateX": (torch.linspace(0.0, across, bins), True),
        "TranslateY": (torch.linspace(0.0, down, bins), True),
        "Rotate": (torch.linspace(0.0, 30.0 if narrow else 135.0, bins), True),
        **dict.fromkeys(
            ("Brightness", "Color", "Contrast", "Sharpness"), (torch.linspace(0.0, top, bins), True)
        ),
        "Posterize": (
            8 - (torch.arange(bins) / ((bins - 1) / (4 if narrow else 6))).round().int(), False,
        ),
        "Solarize": (torch.linspace(255.0, 0.0, bins), False),
        "AutoContrast": (torch.tensor(0.0), False),
        "Equalize": (torch.tensor(0.0), False),
    }  # fmt: skip


class RandAugment(torch.nn.Module):
    def __init__(
        self,
        num_ops=2,
        magnitude=9,
        num_magnitude_bins=31,
        interpolation=InterpolationMode.NEAREST,
        fill=None,
    ):
        super().__init__()
        self.num_ops, self.magnitude, self.num_magnitude_bins = (
            num_ops,
            magnitude,
            num_magnitude_bins,
        )
        self.interpolation, self.fill = interpolation, fill

    def _augmentation_space(self, num_bins, image_size):
        return spans(True, num_bins, *image_size)

    def forward(self, img):
        for _ in range(self.num_ops):
            space = self._augmentation_space(self.num_magnitude_bins, (img.height, img.width))
            name = list(space)[int(torch.randint(len(space), (1,)).item())]
            magnitudes, signed = space[name]
            magnitude = float(magnitudes[self.magnitude]) if magnitudes.ndim > 0 else 0.0
            if signed and torch.randint(2, (1,)):
                magnitude *= -1.0
            img = applied(img, name, magnitude, self.interpolation)
        return img


class TrivialAugmentWide(torch.nn.Module):
    def __init__(self, num_magnitude_bins=31, interpolation=InterpolationMode.NEAREST, fill=None):
        super().__init__()
        self.num_magnitude_bins = num_magnitude_bins
        self.interpolation, self.fill = interpolation, fill

    def _augmentation_space(self, num_bins):
        return spans(False, num_bins, 0, 0)

    def forward(self, img):
        space = self._augmentation_space(self.num_magnitude_bins)
        name = list(space)[int(torch.randint(len(space), (1,)).item())]
        magnitudes, signed = space[name]
        magnitude = 0.0
        if magnitudes.ndim > 0:
            magnitude = float(magnitudes[torch.randint(len(magnitudes), (1,)).item()])
        if signed and torch.randint(2, (1,)):
            magnitude *= -1.0
        return applied(img, name, magnitude, self.interpolation)


POLICIES = [
    (("Invert", 0.7, None), ("ShearX", 0.9, 4)),
    (("Solarize", 0.6, 3), ("Posterize", 0.8, 7)),
    (("Rotate", 0.9, 9), ("Equalize", 0.2, None)),
]
"""Fewer than torchvision has, and of the same form."""


def wider(space):
    """What AutoAugment chooses from, out of RandAugment's."""
    return {name: each for name, each in space.items() if name != "Identity"}


class AutoAugment(torch.nn.Module):
    def __init__(self, interpolation=InterpolationMode.NEAREST, fill=None):
        super().__init__()
        self.interpolation, self.fill, self.policies = interpolation, fill, POLICIES

    def _augmentation_space(self, num_bins, image_size):
        invert = {"Invert": (torch.tensor(0.0), False)}
        return wider(spans(True, num_bins, *image_size)) | invert

    @staticmethod
    def get_params(transform_num):
        at = int(torch.randint(transform_num, (1,)).item())
        return at, torch.rand((2,)), torch.randint(2, (2,))

    def forward(self, img):
        at, shares, signs = self.get_params(len(self.policies))
        space = self._augmentation_space(10, (img.height, img.width))
        for i, (name, probability, level) in enumerate(self.policies[at]):
            if shares[i] <= probability:
                magnitudes, signed = space[name]
                magnitude = 0.0 if level is None else float(magnitudes[level])
                if signed and signs[i] == 0:
                    magnitude *= -1.0
                img = applied(img, name, magnitude, self.interpolation)
        return img
