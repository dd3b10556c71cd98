"""Model: a small convolutional network, and how an image becomes its input."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

if TYPE_CHECKING:
    from headrace.torch import Sample

__all__ = ["IMAGE_PIXELS", "decode", "decode_indexed", "make_model", "normalized"]

IMAGE_PIXELS = 48
"""Width and height of the network's input."""


def decode(data: memoryview | bytes) -> Tensor:
    """Decode an image onto white.

    Returns:
        uint8, shape (3, 48, 48).
    """
    size = (IMAGE_PIXELS, IMAGE_PIXELS)
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (2 * IMAGE_PIXELS, 2 * IMAGE_PIXELS))  # JPEG decodes smaller, faster
        # Alpha first, small first: both save most of the time and hardly change the picture.
        small = image.convert("RGBA").resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    white = Image.new("RGBA", size, "white")
    white.alpha_composite(small)
    pixels = np.asarray(white)[:, :, :3]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def decode_indexed(data: memoryview, sample: Sample) -> tuple[Tensor, int]:
    """Decode an image, and say which sample it is: the demo proves what was delivered."""
    return decode(data), sample.index


def normalized(images: Tensor) -> Tensor:
    """Return uint8 images as float32 in [-0.5, 0.5], same shape."""
    return images.float().div_(255).sub_(0.5).contiguous(memory_format=torch.channels_last)


def make_model(classes: int, seed: int) -> nn.Module:
    """Return the network: 26,000 weights, about 5 million multiplications per image."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *_block(3, 16, stride=2),
        *_block(16, 32, stride=1),
        nn.MaxPool2d(2),
        *_block(32, 64, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )
    # torch's own stubs do not know this overload.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _block(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )
