"""DemoOptions: what the demo is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.base.documents import DocumentKind
from headrace.errors import StoreError

NOTE = DocumentKind(
    name="a note of the demo",
    version=1,
    error=StoreError,
    next_step="Remove the demo's folder, and run it again.",
)
"""What the demo's processes hand over, and keep from run to run."""

__all__ = ["CLIP_ART", "DemoOptions"]

CLIP_ART = Path("/usr/share/openclipart/png")
"""Where Debian's package openclipart-png puts its images."""

CLIP_ART_PIXELS_MAX = 512 * 512
"""Three quarters of the clip art. The rest is poster-sized: an epoch over it would measure how fast
PIL inflates PNGs, in every loader alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to run the demo on.

    Raises:
        ValueError: a number is out of bounds.
    """

    data: Path | None = None
    """A folder of images with a folder per class; None: Debian's clip art."""

    out: Path = Path("build/demo")
    """Where stores, checkpoints and the report go. Packed stores are used again."""

    epochs: int = 3
    """Epochs to train; at least 2, because the run is interrupted in the second."""

    batch_size: int = 64

    seed: int = 7

    pixels_max: int | None = None
    """Larger images are left out; None: 512 x 512 for the clip art, 64 million for others."""

    images_max: int = 6000
    """Of more images than this, as many are chosen by a hash of their names."""

    class_images_min: int = 20
    """Classes of fewer images are left out: a few held-out images say nothing about a class."""

    compare_samples: int = 2048
    """Samples that each loader trains on in the comparison."""

    def __post_init__(self) -> None:
        bounds = {"epochs": 2, "batch_size": 1, "images_max": 2, "class_images_min": 1}
        for name, low in (bounds | {"compare_samples": 1, "seed": 0}).items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {low}")

    @property
    def source(self) -> Path:
        """The folder of images."""
        return CLIP_ART if self.data is None else self.data

    @property
    def pixels_limit(self) -> int:
        """Images of more pixels are left out."""
        if self.pixels_max is not None:
            return self.pixels_max
        return CLIP_ART_PIXELS_MAX if self.data is None else 64 << 20
