"""What jpeg and png have in common: a file is one sample, and Pillow decodes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.formats.base import Reader, SampleExtents, bad_file, extra, whole_file
from headrace.bench.formats.npy import ArrayReader

if TYPE_CHECKING:
    from headrace.bench.dataset import DatasetSpec

__all__ = ["open_reader", "sample_extents"]


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """All of the file."""
    return whole_file(path, spec)


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Decodes the image."""
    image = extra("PIL.Image", f"decoding {spec.format}", "bench")
    try:
        with image.open(path) as opened:
            pixels = np.asarray(opened)
    except (image.UnidentifiedImageError, SyntaxError, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise
        raise bad_file(path, "the image", e, f"a {spec.format} that Pillow can decode") from e
    return ArrayReader(pixels[None], axis=0)
