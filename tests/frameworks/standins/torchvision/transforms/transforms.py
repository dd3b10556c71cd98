"""A stand-in for torchvision.transforms.transforms: what it draws and in which order, with Pillow's pixels."""

import enum
import math

import numpy as np
import torch
from PIL import Image, ImageEnhance

LEFT_RIGHT, TOP_BOTTOM = Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def dimensions(img):
    """Channels, height and width of a tensor or a picture."""
    if isinstance(img, torch.Tensor):
        return list(img.shape[-3:])
    return [len(img.getbands()), img.height, img.width]


def as_picture(img):
    if isinstance(img, torch.Tensor):
        assert img.dtype == torch.uint8, "this stand-in resizes bytes alone"
        return Image.fromarray(img.permute(1, 2, 0).contiguous().numpy())
    return img


def like(img, picture):
    return as_tensor(picture).as_subclass(type(img)) if isinstance(img, torch.Tensor) else picture


def as_tensor(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def crop(img, top, left, height, width):
    if isinstance(img, torch.Tensor):
        return img[..., top : top + height, left : left + width]
    return img.crop((left, top, left + width, top + height))


def flip(img, axis):
    if isinstance(img, torch.Tensor):
        return img.flip(-1 - axis)
    return img.transpose((LEFT_RIGHT, TOP_BOTTOM)[axis])


def resize(img, size, interpolation):
    how = Image.Resampling[interpolation.name]
    return like(img, as_picture(img).resize(size[::-1], how))


def two(size):
    return (size, size) if isinstance(size, int) else tuple(size)


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, img):
        for one in self.transforms:
            img = one(img)
        return img


class Resize(torch.nn.Module):
    def __init__(
        self, size, interpolation=InterpolationMode.BILINEAR, max_size=None, antialias=True
    ):
        super().__init__()
        self.size, self.interpolation = size, interpolation
        self.max_size, self.antialias = max_size, antialias

    def forward(self, img):
        _, height, width = dimensions(img)
        size = [self.size] if isinstance(self.size, int) else list(self.size)
        if len(size) == 1:
            long = int(size[0] * max(height, width) / min(height, width))
            size = [long, size[0]] if width <= height else [size[0], long]
        return img if size == [height, width] else resize(img, size, self.interpolation)


class CenterCrop(torch.nn.Module):
    """Pads with zeros what is smaller, then takes the middle."""

    def __init__(self, size):
        super().__init__()
        self.size = two(size)

    def forward(self, img):
        _, height, width = dimensions(img)
        rows, columns = self.size
        above, before = max(0, rows - height) // 2, max(0, columns - width) // 2
        padded = Image.new("RGB", (max(width, columns), max(height, rows)))
        padded.paste(as_picture(img), (before, above))
        top, left = round((padded.height - rows) / 2.0), round((padded.width - columns) / 2.0)
        return like(img, padded.crop((left, top, left + columns, top + rows)))


class RandomCrop(torch.nn.Module):
    def __init__(self, size, padding=None, pad_if_needed=False):
        super().__init__()
        self.size, self.padding, self.pad_if_needed = two(size), padding, pad_if_needed

    @staticmethod
    def get_params(img, output_size):
        _, height, width = dimensions(img)
        rows, columns = output_size
        if height < rows or width < columns:
            raise ValueError(f"crop {output_size} is larger than the image {(height, width)}")
        if (height, width) == (rows, columns):
            return 0, 0, height, width
        top = torch.randint(0, height - rows + 1, size=(1,)).item()
        left = torch.randint(0, width - columns + 1, size=(1,)).item()
        return top, left, rows, columns

    def forward(self, img):
        if self.padding:
            padded = Image.new("RGB", (img.width + 2 * self.padding, img.height + 2 * self.padding))
            padded.paste(img, (self.padding, self.padding))
            img = padded
        return crop(img, *self.get_params(img, self.size))


class RandomResizedCrop(torch.nn.Module):
    def __init__(
        self,
        size,
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        interpolation=InterpolationMode.BILINEAR,
        antialias=True,
    ):
        super().__init__()
        self.size, self.scale, self.ratio = two(size), scale, ratio
        self.interpolation, self.antialias = interpolation, antialias

    @staticmethod
    def get_params(img, scale, ratio):
        _, height, width = dimensions(img)
        low, high = torch.log(torch.tensor(ratio))
        for _ in range(10):
            area = height * width * torch.empty(1).uniform_(scale[0], scale[1]).item()
            aspect = torch.exp(torch.empty(1).uniform_(low, high)).item()
            columns, rows = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < columns <= width and 0 < rows <= height:
                top = torch.randint(0, height - rows + 1, size=(1,)).item()
                left = torch.randint(0, width - columns + 1, size=(1,)).item()
                return top, left, rows, columns
        rows, columns = height, width
        if width / height < min(ratio):
            rows = round(width / min(ratio))
        elif width / height > max(ratio):
            columns = round(height * max(ratio))
        return (height - rows) // 2, (width - columns) // 2, rows, columns

    def forward(self, img):
        box = self.get_params(img, self.scale, self.ratio)
        return resize(crop(img, *box), self.size, self.interpolation)


class RandomHorizontalFlip(torch.nn.Module):
    axis = 0

    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, img):
        return flip(img, self.axis) if torch.rand(1) < self.p else img


class RandomVerticalFlip(RandomHorizontalFlip):
    axis = 1


class PILToTensor:
    def __call__(self, picture):
        return as_tensor(picture)


class ToTensor:
    def __call__(self, picture):
        return as_tensor(picture).to(torch.float32).div(255)


class ConvertImageDtype(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, img):
        return img if img.dtype == self.dtype else img.to(self.dtype) / 255


class Normalize(torch.nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, tensor):
        mean, std = (torch.as_tensor(each)[:, None, None] for each in (self.mean, self.std))
        return tensor.clone().sub_(mean).div_(std)


class ColorJitter(torch.nn.Module):
    """Brightness alone, of a picture or a tensor."""

    def __init__(self, brightness=0.0):
        super().__init__()
        self.brightness = (max(0.0, 1 - brightness), 1 + brightness)

    def forward(self, img):
        torch.randperm(4)
        factor = torch.empty(1).uniform_(*self.brightness).item()
        if isinstance(img, torch.Tensor):
            return img * factor
        return ImageEnhance.Brightness(img).enhance(factor)
