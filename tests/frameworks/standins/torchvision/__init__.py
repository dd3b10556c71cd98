"""A stand-in for torchvision, which has no build for processors alone: written from its documentation.

What `decode="native"` looks at is here under torchvision's names: classes, modules, attributes, `get_params`
and `make_params`, and which random numbers are drawn in which order. Pixels are made by Pillow.
"""

from . import datasets, transforms

__all__ = ["datasets", "transforms"]
