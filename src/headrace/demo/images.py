"""Images: which files of a folder are samples, which class each has, and which are held out.

A class is a top-level folder. Symbolic links are left out: in the clip art they show the same image in
a second class, and would put training images among the held-out ones.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from PIL import Image, UnidentifiedImageError

from headrace.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.demo.options import DemoOptions

__all__ = ["Choice", "ImageFile", "choose", "list_images"]

EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"})

UNCLASSIFIED = frozenset({"unsorted"})
"""A folder for what was not classified is no class."""

HELD_OUT_SHARE = 8
"""One image in 8 is held out."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that may become a sample."""

    name: str
    """The path below the folder: `animals/cat.png`."""

    path: Path
    size_bytes: int
    mtime_ns: int

    @property
    def class_name(self) -> str:
        """The top-level folder."""
        return self.name.split("/", 1)[0]

    @property
    def digest(self) -> int:
        """A hash of the name: it alone decides whether the image is held out."""
        return int.from_bytes(blake2b(self.name.encode(errors="replace"), digest_size=8).digest())

    @property
    def held_out(self) -> bool:
        """Whether the model must not see it in training."""
        return self.digest % HELD_OUT_SHARE == 0


@dataclass(slots=True)
class Choice:
    """The images that were chosen, and how many were left out for which reason."""

    images: list[ImageFile]
    classes: list[str]
    left_out: dict[str, int] = field(default_factory=dict)


def list_images(folder: Path) -> list[ImageFile]:
    """Return the image files below a folder's folders, sorted by name.

    Raises:
        SourceError: there are none.
    """
    files = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix.lower() not in EXTENSIONS or "/" not in name or path.is_symlink():
            continue
        status = path.stat()
        files.append(ImageFile(name, path, status.st_size, status.st_mtime_ns))
    if not files:
        raise SourceError(
            f"{folder}: there are no images in class folders (folder/class/image.png).",
            path=str(folder),
            next_step="Give a folder of your own, DATA=folder, or install Debian's "
            "openclipart-png.",
        )
    return files


def choose(files: list[ImageFile], options: DemoOptions) -> Choice:
    """Choose what to train on.

    Raises:
        SourceError: fewer than two classes are left.
    """
    left_out: Counter[str] = Counter()
    kept = []
    for file in files:
        reason = _reason_against(file, options.pixels_limit)
        if reason:
            left_out[reason] += 1
        else:
            kept.append(file)
    kept = sorted(kept, key=lambda file: file.digest)
    left_out["more than are needed"] = max(0, len(kept) - options.images_max)
    kept = kept[: options.images_max]
    counts = Counter(file.class_name for file in kept)
    classes = sorted(name for name, count in counts.items() if count >= options.class_images_min)
    images = [file for file in kept if file.class_name in set(classes)]
    left_out[f"in classes of fewer than {options.class_images_min}"] = len(kept) - len(images)
    if len(classes) < 2:
        raise SourceError(
            f"{options.source}: {len(classes)} classes have {options.class_images_min} images or "
            f"more ({dict(counts)}), expected two or more.",
            path=str(options.source),
            next_step="Give a folder with a folder of images per class.",
        )
    return Choice(images, classes, {k: v for k, v in left_out.items() if v})


def _reason_against(file: ImageFile, pixels_max: int) -> str:
    if file.class_name in UNCLASSIFIED:
        return "unclassified"
    if not file.size_bytes:
        return "empty"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file.path) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        return "too large"
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        return "unreadable"
    return "too large" if width * height > pixels_max else ""


def samples(images: list[ImageFile], classes: list[str]) -> Iterator[tuple[str, bytes, int]]:
    """Yield (name, bytes, label) of each image, for `headrace.pack`."""
    numbers = {name: number for number, name in enumerate(classes)}
    for image in images:
        yield image.name, image.path.read_bytes(), numbers[image.class_name]
