"""Pictures that headrace's own decoders refuse, as Pillow has them: GIF, BMP, TIFF and rarer ones.

A picture with more than `max_pixels` is refused by its head, before a pixel is decoded. That bound is the
user's: Pillow's own, which `Image.open` warns of and then raises, is not asked.
"""

from __future__ import annotations

import contextlib
import io
import struct
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from headrace.plane.images import TOO_LARGE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.ImageFile import ImageFile

    from headrace.plane.images import Images


def by_pillow(encoded: bytes, images: Images) -> NDArray[np.uint8]:
    """Decode a picture: uint8, shape (height, width, 3). Raises what Pillow does, or ValueError: too large."""
    with _opened(encoded) as picture:
        if picture.width * picture.height > images.max_pixels:
            size = f"it has {picture.width} x {picture.height} pixels"
            raise ValueError(f"{size}, more than the {images.max_pixels}{TOO_LARGE}")
        upright = ImageOps.exif_transpose(picture) if images.orient else picture
        if images.background is not None and upright.has_transparency_data:
            behind = Image.new("RGBA", upright.size, (*images.background, 255))
            upright = Image.alpha_composite(behind, upright.convert("RGBA"))
        return np.ascontiguousarray(np.asarray(upright.convert("RGB"), np.uint8))


def _opened(encoded: bytes) -> ImageFile:
    """What `Image.open` opens, by the same plugins in the same order, whatever its size."""
    asked = set[str]()
    for load_plugins in (Image.preinit, Image.init):
        load_plugins()
        for name in [name for name in Image.ID if name not in asked]:
            asked.add(name)
            make, accepts = Image.OPEN[name]
            with contextlib.suppress(SyntaxError, IndexError, TypeError, struct.error):
                fits = accepts is None or accepts(encoded[:16])
                if fits and not isinstance(fits, str):  # a text says what is missing for it
                    return make(io.BytesIO(encoded), "")
    raise ValueError("no format that it knows")
