"""A stand-in for torchvision.transforms.v2: parameters come from `make_params`."""

import torch

from . import autoaugment as policies
from . import transforms as v1
from .transforms import Compose, InterpolationMode

__all__ = [
    "AutoAugment", "ColorJitter", "Compose", "GaussianBlur", "Grayscale", "InterpolationMode", "Normalize",
    "RandAugment", "RandomAffine", "RandomApply", "RandomCrop", "RandomErasing", "RandomHorizontalFlip",
    "RandomResizedCrop", "RandomRotation", "RandomSolarize", "ToDtype", "ToImage", "ToPureTensor",
    "TrivialAugmentWide", "TvImage",
]  # fmt: skip


class TvImage(torch.Tensor):
    """What torchvision's tv_tensors.Image is: a tensor of a class of its own."""


class RandomResizedCrop(v1.RandomResizedCrop):
    def make_params(self, flat_inputs):
        (img,) = flat_inputs
        names = ("top", "left", "height", "width")
        return dict(zip(names, self.get_params(img, self.scale, self.ratio), strict=True))

    def forward(self, img):
        box = self.make_params([img])
        return v1.resize(v1.crop(img, **box), self.size, self.interpolation)


class RandomCrop(v1.RandomCrop):
    """Draws for each side by itself, and only where there is something to choose."""

    def make_params(self, flat_inputs):
        _, height, width = v1.dimensions(flat_inputs[0])
        left, top, right, bottom = v1.sides_of(self.padding or 0)
        height, width = height + top + bottom, width + left + right
        padding = [left, top, right, bottom]
        rows, columns = self.size
        top = int(torch.randint(0, height - rows + 1, size=())) if height > rows else 0
        left = int(torch.randint(0, width - columns + 1, size=())) if width > columns else 0
        return {
            "top": top, "left": left, "height": rows, "width": columns, "needs_pad": any(padding),
            "padding": padding,
        }  # fmt: skip

    def forward(self, img):
        box = self.make_params([img])
        if box["needs_pad"]:
            img = v1.pad(img, box["padding"], self.fill)
        return v1.crop(img, *(box[name] for name in ("top", "left", "height", "width")))


class ColorJitter(v1.ColorJitter):
    def make_params(self, _):
        names = (
            "fn_idx",
            "brightness_factor",
            "contrast_factor",
            "saturation_factor",
            "hue_factor",
        )
        bounds = (self.brightness, self.contrast, self.saturation, self.hue)
        return dict(zip(names, self.get_params(*bounds), strict=True))

    def forward(self, img):
        return v1.jittered(img, *self.make_params([img]).values())


class RandomErasing(v1.RandomErasing):
    """None for a value where no rectangle fits."""

    def make_params(self, flat_inputs):
        (img,) = flat_inputs
        value = [float(self.value)] if isinstance(self.value, (int, float)) else self.value
        value = None if isinstance(value, str) else list(value)
        drawn = self.get_params(img, self.scale, self.ratio, value)
        return dict(zip("ijhwv", (*drawn[:4], None if drawn[4] is img else drawn[4]), strict=True))

    def forward(self, img):
        if torch.rand(1) >= self.p:
            return img
        i, j, h, w, v = self.make_params([img]).values()
        if v is None:
            return img
        erased = img.clone()
        erased[..., i : i + h, j : j + w] = v
        return erased


def space_of(narrow):
    """Functions of bins, height and width; None where there are no magnitudes; levels are shares."""
    space = {}
    for name, (magnitudes, signed) in policies.spans(narrow, 3, 3, 3).items():

        def make(bins, height, width, name=name):
            made = policies.spans(narrow, bins, height, width)[name][0]
            return made / 255.0 if name == "Solarize" else made

        space[name] = (make if magnitudes.ndim else lambda *_: None, signed)
    return space


def chosen(policy, img, level=None, name=None, bins=None):
    """Draws as v2 does, and applies what was drawn."""
    space = policy._AUGMENTATION_SPACE
    name = name or tuple(space)[int(torch.randint(len(space), ()))]
    make, signed = space[name]
    magnitudes, magnitude = make(bins or policy.num_magnitude_bins, img.height, img.width), 0.0
    if magnitudes is not None:
        if level is None:
            level = int(torch.randint(policy.num_magnitude_bins, ()))
        magnitude = float(magnitudes[level])
        if signed and torch.rand(()) <= 0.5:
            magnitude *= -1
    magnitude *= 255.0 if name == "Solarize" else 1.0
    return policies.applied(img, name, magnitude, policy.interpolation)


class RandAugment(policies.RandAugment):
    _AUGMENTATION_SPACE = space_of(True)

    def forward(self, img):
        for _ in range(self.num_ops):
            img = chosen(self, img, self.magnitude)
        return img


class TrivialAugmentWide(policies.TrivialAugmentWide):
    _AUGMENTATION_SPACE = space_of(False)

    def forward(self, img):
        return chosen(self, img)


class AutoAugment(policies.AutoAugment):
    _AUGMENTATION_SPACE = policies.wider(space_of(True)) | {"Invert": (lambda *_: None, False)}
    _policies = policies.POLICIES

    def forward(self, img):
        for name, probability, level in self._policies[int(torch.randint(len(self._policies), ()))]:
            if torch.rand(()) <= probability:
                img = chosen(self, img, level, name, 10)
        return img


class RandomApply(v1.RandomApply):
    def forward(self, img):
        if torch.rand(1) >= self.p:
            return img
        for each in self.transforms:
            img = each(img)
        return img


class Grayscale(v1.Grayscale):
    pass


class GaussianBlur(v1.GaussianBlur):
    def make_params(self, _):
        return {"sigma": [self.get_params(*self.sigma)] * 2}

    def forward(self, img):
        return v1.blurred(img, self.kernel_size, self.make_params([img])["sigma"][0])


class RandomSolarize(v1.RandomSolarize):
    def forward(self, img):
        return img if torch.rand(1) >= self.p else self.of(img)


class RandomRotation(v1.RandomRotation):
    def make_params(self, _):
        return {"angle": self.get_params(self.degrees)}

    def forward(self, img):
        return self.turned(img, **self.make_params([img]))


class RandomAffine(v1.RandomAffine):
    def make_params(self, flat_inputs):
        _, height, width = v1.dimensions(flat_inputs[0])
        names = ("angle", "translate", "scale", "shear")
        ranges = (self.degrees, self.translate, self.scale, self.shear, [width, height])
        return dict(zip(names, self.get_params(*ranges), strict=True))

    def forward(self, img):
        return self.moved(img, **self.make_params([img]))


class RandomHorizontalFlip(v1.RandomHorizontalFlip):
    def forward(self, img):
        return img if torch.rand(1) >= self.p else v1.flip(img, 0)


class ToImage(torch.nn.Module):
    def forward(self, img):
        tensor = img if isinstance(img, torch.Tensor) else v1.as_tensor(img)
        return tensor.as_subclass(TvImage)


class ToPureTensor(torch.nn.Module):
    def forward(self, img):
        return img.as_subclass(torch.Tensor)


class ToDtype(torch.nn.Module):
    def __init__(self, dtype, scale=False):
        super().__init__()
        self.dtype, self.scale = dtype, scale

    def forward(self, img):
        if img.dtype == self.dtype:
            return img
        return img.to(self.dtype) / 255 if self.scale else img.to(self.dtype)


class Normalize(v1.Normalize):
    pass
