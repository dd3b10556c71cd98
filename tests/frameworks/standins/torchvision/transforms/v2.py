"""A stand-in for torchvision.transforms.v2: parameters come from `make_params`."""

import torch

from . import transforms as v1
from .transforms import Compose, InterpolationMode

__all__ = [
    "Compose", "InterpolationMode", "Normalize", "RandomCrop", "RandomHorizontalFlip",
    "RandomResizedCrop", "ToDtype", "ToImage", "ToPureTensor", "TvImage",
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
        rows, columns = self.size
        top = int(torch.randint(0, height - rows + 1, size=())) if height > rows else 0
        left = int(torch.randint(0, width - columns + 1, size=())) if width > columns else 0
        return {"top": top, "left": left, "height": rows, "width": columns, "needs_pad": False}

    def forward(self, img):
        box = self.make_params([img])
        return v1.crop(img, *(box[name] for name in ("top", "left", "height", "width")))


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
