"""Images: what to run the demo on, which files are samples, and the two stores that they are packed into.

A class is a top-level folder. Symbolic links are left out: in the clip art they show the same image in a
second class, and would put training images among the held-out ones.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from headrace.errors import SourceError
from headrace.store.pack import pack

CLIP_ART = Path("/usr/share/openclipart/png")
"""Where Debian's package openclipart-png puts its images."""

CLIP_ART_PIXELS_MAX = 512 * 512
"""Three quarters of the clip art. The rest is poster-sized: an epoch over it would measure how fast
PIL inflates PNGs, in every loader alike."""

PIXELS_MAX = 64 << 20  # larger images of other folders are left out
IMAGES_MAX = 6000  # of more images than this, as many are chosen by a hash of their names

CLASS_IMAGES_MIN = 20
"""Classes of fewer images are left out: a few held-out images say nothing about a class."""

HELD_OUT_SHARE = 8  # one image in 8 is held out
SEED = 7  # of the order and of the network

EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"})

UNCLASSIFIED = "unsorted"  # a folder for what was not classified is no class


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to run the demo on; raises ValueError if a number is out of bounds."""

    data: Path | None = None  # a folder of images with a folder per class; None: Debian's clip art
    out: Path = Path("build/demo")  # where stores, checkpoints and the report go
    epochs: int = 3  # at least 2, because the run is interrupted in the second
    batch_size: int = 64  # at most: of few images smaller ones, for an epoch of some steps
    compare_samples: int = 2048  # that each loader trains on in the comparison

    def __post_init__(self) -> None:
        for name, low in {"epochs": 2, "batch_size": 1, "compare_samples": 1}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {low}")

    @property
    def source(self) -> Path:
        """The folder of images."""
        return CLIP_ART if self.data is None else self.data


class ImageFile(NamedTuple):
    """A file that may become a sample; `name` is its path below the folder: `animals/cat.png`."""

    name: str
    path: Path

    @property
    def class_name(self) -> str:
        """The top-level folder."""
        return self.name.split("/", 1)[0]

    @property
    def digest(self) -> int:
        """A hash of the name: it alone decides whether the image is held out."""
        return int.from_bytes(blake2b(self.name.encode(errors="replace"), digest_size=8).digest())


class Choice(NamedTuple):
    """The images that were chosen, and how many were left out for which reason."""

    images: list[ImageFile]
    classes: list[str]
    left_out: dict[str, int]


@dataclass(frozen=True, slots=True)
class PackedImages:
    """Two stores and what is in them."""

    train: Path
    held_out: Path
    source: Path
    classes: list[str]
    train_samples: int
    held_out_samples: int
    nbytes: int
    left_out: dict[str, int]
    seconds: float


def list_images(folder: Path) -> list[ImageFile]:
    """Return the image files below a folder's folders, sorted by name; raises SourceError if there are none."""
    files = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix.lower() in EXTENSIONS and "/" in name and not path.is_symlink():
            files.append(ImageFile(name, path))
    if not files:
        found = "there are no images in class folders (folder/class/image.png)"
        raise SourceError(
            f"{folder}: {found if folder.is_dir() else 'there is no such folder'}.",
            path=str(folder),
            next_step="Give a folder of your own, --data DIR, or install Debian's openclipart-png.",
        )
    return files


def choose(files: list[ImageFile], options: DemoOptions) -> Choice:
    """Choose what to train on; raises SourceError if fewer than two classes are left."""
    pixels_max = CLIP_ART_PIXELS_MAX if options.data is None else PIXELS_MAX
    ordered = sorted(files, key=lambda file: file.digest)
    reasons = [_reason_against(file, pixels_max) for file in ordered]
    left_out = Counter(filter(None, reasons))
    good = [file for file, reason in zip(ordered, reasons, strict=True) if not reason]
    left_out["more than are needed"] = max(0, len(good) - IMAGES_MAX)
    good = good[:IMAGES_MAX]
    counts = Counter(file.class_name for file in good)
    classes = sorted(name for name, count in counts.items() if count >= CLASS_IMAGES_MIN)
    images = [file for file in good if file.class_name in classes]
    left_out[f"in classes of fewer than {CLASS_IMAGES_MIN}"] = len(good) - len(images)
    if len(classes) < 2:
        raise SourceError(
            f"{options.source}: {len(classes)} classes have {CLASS_IMAGES_MIN} images or "
            f"more ({dict(counts)}), expected two or more.",
            path=str(options.source),
            next_step="Give a folder with a folder of images per class.",
        )
    return Choice(images, classes, {k: v for k, v in left_out.items() if v})


def _reason_against(file: ImageFile, pixels_max: int) -> str:
    if file.class_name == UNCLASSIFIED:
        return "unclassified"
    if not file.path.stat().st_size:
        return "empty"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file.path) as image:
                return "too large" if image.width * image.height > pixels_max else ""
    except Image.DecompressionBombError:
        return "too large"
    except (OSError, SyntaxError, ValueError):
        return "unreadable"


def pack_images(options: DemoOptions) -> PackedImages:
    """Pack the images; raises SourceError if the folder has too few of them."""
    started = time.perf_counter()
    choice = choose(list_images(options.source), options)
    options.out.mkdir(parents=True, exist_ok=True)
    stores = options.out / "train.hr", options.out / "held-out.hr"
    counts = []
    for store, held_out in zip(stores, (False, True), strict=True):
        if store.exists():
            shutil.rmtree(store)  # ours, by the name and place
        images = [i for i in choice.images if (i.digest % HELD_OUT_SHARE == 0) is held_out]
        numbered = ((i, choice.classes.index(i.class_name)) for i in images)
        pack(((i.name, i.path.read_bytes(), label) for i, label in numbered), store, resume=False)
        counts.append(len(images))
    return PackedImages(
        *stores, options.source, choice.classes, counts[0], counts[1],
        sum(image.path.stat().st_size for image in choice.images), choice.left_out,
        time.perf_counter() - started,
    )  # fmt: skip
