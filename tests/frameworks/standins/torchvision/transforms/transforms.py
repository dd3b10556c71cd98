"""A stand-in for torchvision.transforms.transforms: what it draws and in which order, with Pillow's pixels."""

import enum
import math

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

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
    def __init__(self, size, padding=None, pad_if_needed=False, fill=0, padding_mode="constant"):
        super().__init__()
        self.size, self.padding, self.pad_if_needed = two(size), padding, pad_if_needed
        self.fill, self.padding_mode = fill, padding_mode

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
            img = pad(img, self.padding, self.fill)
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


def bounds(strength, around=1.0):
    """None for what is left out."""
    if not strength:
        return None
    return (max(0.0, 1 - strength), 1 + strength) if around else (-strength, strength)


def jittered(img, order, brightness, contrast, saturation, hue):
    """PIL's pictures by its operators; tensors by brightness alone, which is all that the tests ask for."""
    if isinstance(img, torch.Tensor):
        return img if brightness is None else img * brightness
    factors = (brightness, contrast, saturation)
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for i in map(int, order):
        if i < 3 and factors[i] is not None:
            img = enhancers[i](img).enhance(factors[i])
        elif i == 3 and hue is not None:
            h, s, v = img.convert("HSV").split()
            turned = np.array(h) + np.array(int(hue * 255)).astype(np.uint8)
            img = Image.merge("HSV", (Image.fromarray(turned), s, v)).convert("RGB")
    return img


class ColorJitter(torch.nn.Module):
    def __init__(self, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0):
        super().__init__()
        self.brightness, self.contrast = bounds(brightness), bounds(contrast)
        self.saturation, self.hue = bounds(saturation), bounds(hue, 0.0)

    @staticmethod
    def get_params(brightness, contrast, saturation, hue):
        order = torch.randperm(4)
        factors = [
            None if each is None else float(torch.empty(1).uniform_(*each))
            for each in (brightness, contrast, saturation, hue)
        ]
        return order, *factors

    def forward(self, img):
        drawn = self.get_params(self.brightness, self.contrast, self.saturation, self.hue)
        return jittered(img, *drawn)


class RandomGrayscale(torch.nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.p = p

    def forward(self, img):
        return img.convert("L").convert("RGB") if torch.rand(1) < self.p else img


def sides_of(padding):
    """Left, top, right and bottom."""
    sides = [padding] if isinstance(padding, int) else list(padding)
    return sides * (4 // len(sides))


def pad(img, padding, fill):
    left, top, right, bottom = sides_of(padding)
    source = as_picture(img)
    colour = fill if isinstance(fill, tuple) else (fill,) * 3
    padded = Image.new("RGB", (source.width + left + right, source.height + top + bottom), colour)
    padded.paste(source, (left, top))
    return like(img, padded)


class Pad(torch.nn.Module):
    def __init__(self, padding, fill=0, padding_mode="constant"):
        super().__init__()
        self.padding, self.fill, self.padding_mode = padding, fill, padding_mode

    def forward(self, img):
        return pad(img, self.padding, self.fill)


class RandomErasing(torch.nn.Module):
    """Of tensors alone."""

    def __init__(self, p=0.5, scale=(0.02, 0.33), ratio=(0.3, 3.3), value=0, inplace=False):
        super().__init__()
        self.p, self.scale, self.ratio = p, scale, ratio
        self.value, self.inplace = value, inplace

    @staticmethod
    def get_params(img, scale, ratio, value=None):
        channels, height, width = dimensions(img)
        logs = torch.log(torch.tensor(ratio))
        for _ in range(10):
            area = height * width * torch.empty(1).uniform_(scale[0], scale[1]).item()
            aspect = torch.exp(torch.empty(1).uniform_(logs[0], logs[1])).item()
            rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if not (rows < height and columns < width):
                continue
            if value is None:
                pixels = torch.empty([channels, rows, columns], dtype=torch.float32).normal_()
            else:
                pixels = torch.tensor(value)[:, None, None]
            top = torch.randint(0, height - rows + 1, size=(1,)).item()
            left = torch.randint(0, width - columns + 1, size=(1,)).item()
            return top, left, rows, columns, pixels
        return 0, 0, height, width, img

    def forward(self, img):
        if torch.rand(1) >= self.p:
            return img
        value = [float(self.value)] if isinstance(self.value, (int, float)) else self.value
        value = None if isinstance(value, str) else list(value)
        top, left, rows, columns, pixels = self.get_params(img, self.scale, self.ratio, value)
        erased = img.clone()
        erased[..., top : top + rows, left : left + columns] = pixels
        return erased


def applied(img, name, magnitude):
    """One operator of a policy to one of PIL's pictures."""
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return getattr(ImageEnhance, name)(img).enhance(1 + magnitude)
    slope, moved = math.tan(math.radians(math.degrees(math.atan(magnitude)))), -int(magnitude)
    matrix = {
        "ShearX": (1, slope, 0, 0, 1, 0), "ShearY": (1, 0, 0, slope, 1, 0),
        "TranslateX": (1, 0, moved, 0, 1, 0), "TranslateY": (1, 0, 0, 0, 1, moved),
    }  # fmt: skip
    if name in matrix:
        return img.transform(img.size, Image.Transform.AFFINE, matrix[name])
    return {
        "Identity": lambda: img,
        "Rotate": lambda: img.rotate(magnitude),
        "Posterize": lambda: ImageOps.posterize(img, int(magnitude)),
        "Solarize": lambda: ImageOps.solarize(img, magnitude),
        "AutoContrast": lambda: ImageOps.autocontrast(img),
        "Equalize": lambda: ImageOps.equalize(img),
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
            img = applied(img, name, magnitude)
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
        return applied(img, name, magnitude)
