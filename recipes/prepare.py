"""Makes the recipes' data: one store of images to train on, and one of images that are held out.

    python prepare.py data                       # Debian's clip art (package openclipart-png)
    python prepare.py data --images photos       # your own: a folder with a folder of images per class

It does nothing where both stores are there already, so it may stand in every batch script. Needs
`pip install headrace pillow`.
"""

from __future__ import annotations

import argparse
import zlib
from collections import Counter
from pathlib import Path

from PIL import Image

import headrace as hr

CLIP_ART = Path("/usr/share/openclipart/png")
EXTENSIONS = {".png", ".jpg", ".jpeg"}
CLASS_IMAGES_MIN = 20
HELD_OUT_SHARE = 8  # one image in 8

Image.MAX_IMAGE_PIXELS = None  # headers alone are read here


def fits(path: Path, pixels_max: int) -> bool:
    """Whether it is an image that is not too large; this reads its header alone."""
    try:
        with Image.open(path) as image:
            return max(image.size) <= pixels_max
    except (OSError, SyntaxError, ValueError):
        return False


def find(folder: Path, pixels_max: int, images_max: int) -> list[tuple[str, Path]]:
    """(class, path) of images that are not too large, in classes that are not too small."""
    found = [
        (path.relative_to(folder).parts[0], path)
        for path in sorted(folder.rglob("*"))
        # In the clip art, links show an image in a second class.
        if path.suffix.lower() in EXTENSIONS and not path.is_symlink() and fits(path, pixels_max)
    ]
    found = sorted(found, key=lambda one: zlib.crc32(bytes(one[1].relative_to(folder))))[
        :images_max
    ]
    counts = Counter(name for name, _ in found)
    return [one for one in found if counts[one[0]] >= CLASS_IMAGES_MIN and one[0] != "unsorted"]


def main() -> None:
    """Choose, and pack both stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for train.hr and held-out.hr")
    parser.add_argument("--images", type=Path, default=CLIP_ART)
    parser.add_argument("--pixels-max", type=int, default=256, help="larger images are left out")
    parser.add_argument("--images-max", type=int, default=10_000_000)
    options = parser.parse_args()
    targets = {False: options.out / "train.hr", True: options.out / "held-out.hr"}
    if all(target.exists() for target in targets.values()):
        return
    chosen = find(options.images, options.pixels_max, options.images_max)
    labels = {name: label for label, name in enumerate(sorted({name for name, _ in chosen}))}
    if len(labels) < 2:
        raise SystemExit(
            f"{options.images}: {len(labels)} classes have {CLASS_IMAGES_MIN} images or more, expected "
            "two. Install Debian's openclipart-png, or name a folder with --images."
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for held_out, target in targets.items():
        mine = [
            (str(path.relative_to(options.images)), path.read_bytes(), labels[name])
            for name, path in chosen
            if (zlib.crc32(path.name.encode()) % HELD_OUT_SHARE == 0) == held_out
        ]
        if not target.exists():
            report = hr.pack(mine, target)
            print(f"{report.path}: {report.samples} images, {len(labels)} classes")


if __name__ == "__main__":
    main()
