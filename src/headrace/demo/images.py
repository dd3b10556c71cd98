"""Images: what to run the demo on, which files are samples, and the two stores that they are packed into.

A class is a top-level folder. Symbolic links are left out: in the clip art they show the same image in a
second class, and would put training images among the held-out ones.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from headrace.base.documents import DocumentKind
from headrace.errors import HeadraceError, SourceError, StoreError
from headrace.store import open_store
from headrace.store.pack import pack

if TYPE_CHECKING:
    from collections.abc import Callable

_NOTE = DocumentKind(
    name="a note of the demo",
    version=1,
    error=StoreError,
    next_step="Remove the demo's folder, and run it again.",
)
"""What the demo keeps from run to run."""

CLIP_ART = Path("/usr/share/openclipart/png")
"""Where Debian's package openclipart-png puts its images."""

CLIP_ART_PIXELS_MAX = 512 * 512
"""Three quarters of the clip art. The rest is poster-sized: an epoch over it would measure how fast
PIL inflates PNGs, in every loader alike."""

PIXELS_MAX = 64 << 20
"""Larger images of other folders are left out."""

IMAGES_MAX = 6000
"""Of more images than this, as many are chosen by a hash of their names."""

CLASS_IMAGES_MIN = 20
"""Classes of fewer images are left out: a few held-out images say nothing about a class."""

HELD_OUT_SHARE = 8
"""One image in 8 is held out."""

SEED = 7
"""Of the order and of the network."""

EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"})

UNCLASSIFIED = "unsorted"
"""A folder for what was not classified is no class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to run the demo on; raises ValueError if a number is out of bounds.

    Attributes:
        data: a folder of images with a folder per class; None: Debian's clip art.
        out: where stores, checkpoints and the report go. Packed stores are used again.
        epochs: at least 2, because the run is interrupted in the second.
        compare_samples: that each loader trains on in the comparison.
    """

    data: Path | None = None
    out: Path = Path("build/demo")
    epochs: int = 3
    batch_size: int = 64
    compare_samples: int = 2048

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
    reused: bool = False


def list_images(folder: Path) -> list[ImageFile]:
    """Return the image files below a folder's folders, sorted by name; raises SourceError if there are none."""
    files = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix.lower() in EXTENSIONS and "/" in name and not path.is_symlink():
            status = path.stat()
            files.append(ImageFile(name, path, status.st_size, status.st_mtime_ns))
    if not files:
        raise SourceError(
            f"{folder}: there are no images in class folders (folder/class/image.png).",
            path=str(folder),
            next_step="Give a folder of your own, DATA=folder, or install Debian's openclipart-png.",
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
    if not file.size_bytes:
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


def pack_images(
    options: DemoOptions, progress: Callable[[int, int], None] = lambda _done, _of: None
) -> PackedImages:
    """Pack the images, or find them packed; raises SourceError if the folder has too few images."""
    started = time.perf_counter()
    files = list_images(options.source)
    options.out.mkdir(parents=True, exist_ok=True)
    # Names, sizes and times of all files, and what chooses among them.
    facts = [str(file[0:1] + file[2:]) for file in files]
    facts.append(repr((options.data is None, IMAGES_MAX, CLASS_IMAGES_MIN)))
    digest = blake2b("\n".join(facts).encode(errors="replace"), digest_size=16).hexdigest()
    record = options.out / "images.json"
    packed = _packed_before(record, digest)
    if packed is not None:
        return replace(packed, seconds=time.perf_counter() - started)
    record.unlink(missing_ok=True)
    choice = choose(files, options)
    stores = options.out / "train.hr", options.out / "held-out.hr"
    counts: list[int] = []
    for store, held_out in zip(stores, (False, True), strict=True):
        if store.exists():
            shutil.rmtree(store)  # ours, by the name and place
        done = sum(counts)
        images = [i for i in choice.images if (i.digest % HELD_OUT_SHARE == 0) is held_out]
        pack(
            ((i.name, i.path.read_bytes(), choice.classes.index(i.class_name)) for i in images),
            store,
            resume=False,
            progress=lambda n, *_, done=done: progress(done + n, len(choice.images)),
        )
        counts.append(len(images))
    packed = PackedImages(
        *stores, options.source, choice.classes, counts[0], counts[1],
        sum(image.size_bytes for image in choice.images), choice.left_out,
        time.perf_counter() - started,
    )  # fmt: skip
    paths = {name: str(getattr(packed, name)) for name in _PATHS}
    record.write_bytes(_NOTE.encode({"digest": digest, **asdict(packed), **paths}, indent=2))
    return packed


_PATHS = ("train", "held_out", "source")


def _packed_before(record: Path, digest: str) -> PackedImages | None:
    try:
        saved = _NOTE.decode(record.read_bytes(), str(record)).plain()
        if saved.pop("digest") != digest:
            return None
        packed = PackedImages(**saved | {name: Path(saved[name]) for name in _PATHS})
        for path in (packed.train, packed.held_out):
            open_store(path).close()
    except (OSError, ValueError, TypeError, KeyError, HeadraceError):
        return None  # whatever it is, it can be packed again
    return replace(packed, reused=True)
