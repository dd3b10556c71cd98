"""A stand-in for torchvision.transforms.transforms: what it draws and in which order, with Pillow's pixels."""

import enum
import math

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.nn.functional import conv2d
from torch.nn.functional import pad as torch_pad

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


class RandomApply(torch.nn.Module):
    def __init__(self, transforms, p=0.5):
        super().__init__()
        self.transforms, self.p = transforms, p

    def forward(self, img):
        if self.p < torch.rand(1):
            return img
        for each in self.transforms:
            img = each(img)
        return img


class Grayscale(torch.nn.Module):
    def __init__(self, num_output_channels=1):
        super().__init__()
        self.num_output_channels = num_output_channels

    def forward(self, img):
        grey = img.convert("L")
        return grey if self.num_output_channels == 1 else grey.convert("RGB")


def blurred(img, kernel_size, sigma):
    """In one sum over the whole kernel, of pixels that are reflected at the edges."""
    across, down = (
        torch.exp(-0.5 * (torch.linspace(-(size - 1) / 2, (size - 1) / 2, size) / sigma) ** 2)
        for size in kernel_size
    )
    kernel = torch.outer(down / down.sum(), across / across.sum()).expand(3, 1, -1, -1)
    x, y = (size // 2 for size in kernel_size)
    tensor = img if isinstance(img, torch.Tensor) else as_tensor(img)
    padded = torch_pad(tensor[None].float(), (x, x, y, y), "reflect")
    result = conv2d(padded, kernel, groups=3)[0].round().to(torch.uint8)
    if isinstance(img, torch.Tensor):
        return result.as_subclass(type(img))
    return Image.fromarray(result.permute(1, 2, 0).contiguous().numpy())


class GaussianBlur(torch.nn.Module):
    def __init__(self, kernel_size, sigma=(0.1, 2.0)):
        super().__init__()
        self.kernel_size = two(kernel_size)
        self.sigma = (sigma, sigma) if isinstance(sigma, (int, float)) else tuple(sigma)

    @staticmethod
    def get_params(sigma_min, sigma_max):
        return torch.empty(1).uniform_(sigma_min, sigma_max).item()

    def forward(self, img):
        return blurred(img, self.kernel_size, self.get_params(*self.sigma))


class Sometimes(torch.nn.Module):
    """One of Pillow's operators with a probability."""

    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, img):
        return self.of(img) if torch.rand(1).item() < self.p else img


class RandomInvert(Sometimes):
    def of(self, img):
        return ImageOps.invert(img)


class RandomAutocontrast(Sometimes):
    def of(self, img):
        return ImageOps.autocontrast(img)


class RandomEqualize(Sometimes):
    def of(self, img):
        return ImageOps.equalize(img)


class RandomPosterize(Sometimes):
    def __init__(self, bits, p=0.5):
        super().__init__(p)
        self.bits = bits

    def of(self, img):
        return ImageOps.posterize(img, self.bits)


class RandomSolarize(Sometimes):
    def __init__(self, threshold, p=0.5):
        super().__init__(p)
        self.threshold = threshold

    def of(self, img):
        return ImageOps.solarize(img, self.threshold)


class RandomAdjustSharpness(Sometimes):
    def __init__(self, sharpness_factor, p=0.5):
        super().__init__(p)
        self.sharpness_factor = sharpness_factor

    def of(self, img):
        return ImageEnhance.Sharpness(img).enhance(self.sharpness_factor)


def around(strength):
    return (-strength, strength) if isinstance(strength, (int, float)) else tuple(strength)


class RandomRotation(torch.nn.Module):
    def __init__(
        self, degrees, interpolation=InterpolationMode.NEAREST, expand=False, center=None, fill=0
    ):
        super().__init__()
        self.degrees, self.interpolation = around(degrees), interpolation
        self.expand, self.center, self.fill = expand, center, fill

    @staticmethod
    def get_params(degrees):
        return float(torch.empty(1).uniform_(*degrees).item())

    def turned(self, img, angle):
        how = Image.Resampling[self.interpolation.name]
        return img.rotate(angle, how, self.expand, self.center, fillcolor=(self.fill,) * 3)

    def forward(self, img):
        return self.turned(img, self.get_params(self.degrees))


class RandomAffine(torch.nn.Module):
    def __init__(
        self,
        degrees,
        translate=None,
        scale=None,
        shear=None,
        interpolation=InterpolationMode.NEAREST,
        fill=0,
        center=None,
    ):
        super().__init__()
        self.degrees, self.translate, self.scale = around(degrees), translate, scale
        self.shear = None if shear is None else around(shear)
        self.interpolation, self.fill, self.center = interpolation, fill, center

    @staticmethod
    def get_params(degrees, translate, scale_ranges, shears, img_size):
        def uniform(low, high):
            return float(torch.empty(1).uniform_(low, high).item())

        angle, shift, scale, shear = uniform(*degrees), (0, 0), 1.0, [0.0, 0.0]
        if translate is not None:
            most = [float(share * side) for share, side in zip(translate, img_size, strict=True)]
            shift = tuple(round(uniform(-each, each)) for each in most)
        if scale_ranges is not None:
            scale = uniform(*scale_ranges)
        for axis in range(0 if shears is None else len(shears) // 2):
            shear[axis] = uniform(*shears[2 * axis : 2 * axis + 2])
        return angle, shift, scale, tuple(shear)

    def moved(self, img, angle, translate, scale, shear):
        """By the inverse of: shear along x, then y, scale and turn around the centre, shift."""
        middle = self.center or (img.width / 2, img.height / 2)
        x, y, turn = (math.radians(each) for each in (*shear, angle))

        def matrix(*rows):
            return np.array([*rows, (0, 0, 1)], float)

        whole = (
            matrix((1, 0, translate[0] + middle[0]), (0, 1, translate[1] + middle[1]))
            @ matrix((math.cos(turn), -math.sin(turn), 0), (math.sin(turn), math.cos(turn), 0))
            @ matrix((scale, 0, 0), (0, scale, 0))
            @ matrix((1, 0, 0), (-math.tan(y), 1, 0))
            @ matrix((1, -math.tan(x), 0), (0, 1, 0))
            @ matrix((1, 0, -middle[0]), (0, 1, -middle[1]))
        )
        numbers = np.linalg.inv(whole)[:2].flatten().tolist()
        how = Image.Resampling[self.interpolation.name]
        return img.transform(img.size, Image.Transform.AFFINE, numbers, how)

    def forward(self, img):
        ranges = (self.degrees, self.translate, self.scale, self.shear, [img.width, img.height])
        return self.moved(img, *self.get_params(*ranges))
