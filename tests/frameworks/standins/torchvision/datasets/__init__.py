"""A stand-in for torchvision.datasets."""

from .folder import DatasetFolder, ImageFolder

__all__ = ["DatasetFolder", "ImageFolder"]
