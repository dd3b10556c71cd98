"""Makes the recipes' data: one store of images to train on, and one of images that are held out.

    python prepare.py data                       # Debian's clip art (package openclipart-png)
    python prepare.py data --images photos       # your own: a folder with a folder of images per class

All images are decoded once: those that cannot be are named and left out. It does nothing where both stores are
there already, so it may stand in every batch script. Needs headrace, and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from PIL import Image

import headrace as hr

CLIP_ART = Path("/usr/share/openclipart/png")
EXTENSIONS = {".png", ".jpg", ".jpeg"}
CLIP_ART_PIXELS_MAX = 256
CLASS_IMAGES_MIN = 20
HELD_OUT_SHARE = 8  # one image in 8
BROKEN_SHOWN = 20
LARGE = "larger than --pixels-max"


def why_not(path: Path, pixels_max: int | None) -> str:
    """What speaks against an image; '': nothing. It is decoded: one that cannot be would end the training."""
    try:
        with Image.open(path) as image:
            if pixels_max is not None and max(image.size) > pixels_max:
                return LARGE
            image.load()
    except Exception as e:  # noqa: BLE001 - decoders raise what they like
        return f"{type(e).__name__}: {e}"
    return ""


def find(folder: Path, pixels_max: int | None, images_max: int) -> list[tuple[str, Path]]:
    """(class, path) of images that are not too large, in classes that are not too small."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in EXTENSIONS]
    # In the clip art, links show an image in a second class.
    own = [path for path in files if not path.is_symlink()]
    with ThreadPoolExecutor() as pool:  # Pillow decodes without Python's lock
        reasons = list(pool.map(why_not, own, repeat(pixels_max)))
    broken = [(path, why) for path, why in zip(own, reasons, strict=True) if why not in ("", LARGE)]
    for path, why in broken[:BROKEN_SHOWN]:
        print(f"{path}: left out, since it cannot be decoded: {why}")
    if len(broken) > BROKEN_SHOWN:
        print(f"{folder}: {len(broken) - BROKEN_SHOWN} more cannot be decoded, and are left out")
    whole = [path for path, why in zip(own, reasons, strict=True) if not why]
    whole = sorted(whole, key=lambda path: zlib.crc32(bytes(path.relative_to(folder))))[:images_max]
    found = [(path.relative_to(folder).parts[0], path) for path in whole]
    counts = Counter(name for name, _ in found)
    chosen = [one for one in found if counts[one[0]] >= CLASS_IMAGES_MIN and one[0] != "unsorted"]
    if left := len(files) - len(chosen):
        print(
            f"{folder}: {left} of {len(files)} images are left out: links, damaged, {LARGE}, or in a class "
            f"of fewer than {CLASS_IMAGES_MIN}"
        )
    return chosen


def is_held_out(path: Path, folder: Path) -> bool:
    """Whether nobody trains on it. The clip art has copies of one name in several classes: they go together."""
    known_by = path.name if folder == CLIP_ART else str(path.relative_to(folder))
    return hashlib.sha256(os.fsencode(known_by)).digest()[0] % HELD_OUT_SHARE == 0


def main() -> None:
    """Choose, and pack both stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for train.hr and held-out.hr")
    parser.add_argument("--images", type=Path, default=CLIP_ART)
    parser.add_argument(
        "--pixels-max",
        type=int,
        help="larger images are left out; of the clip art, those above 256",
    )
    parser.add_argument("--images-max", type=int, default=10_000_000)
    options = parser.parse_args()
    targets = {False: options.out / "train.hr", True: options.out / "held-out.hr"}
    if all(target.exists() for target in targets.values()):
        return
    if options.pixels_max is None and options.images == CLIP_ART:
        options.pixels_max = CLIP_ART_PIXELS_MAX
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
            if is_held_out(path, options.images) == held_out
        ]
        if not target.exists():
            report = hr.pack(mine, target)
            print(f"{report.path}: {report.samples} images, {len(labels)} classes")


if __name__ == "__main__":
    main()
