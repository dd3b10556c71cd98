"""The example: an ordinary script, changed by one import, trains to the same losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_torch.py"
OURS = "from headrace.torch import DataLoader\n"
THEIRS = "from torch.utils.data import DataLoader\n"
CLIPART = Path("/usr/share/openclipart/png")
CLASSES = ("animals", "food", "shapes")


@pytest.fixture(scope="module")
def images(tmp_path_factory, photos):
    """Small clip art, 16 images of each of three classes, where it is installed; else the tests' own."""
    if not CLIPART.exists():
        return photos
    folder = tmp_path_factory.mktemp("clipart")
    for name in CLASSES:
        (folder / name).mkdir()
        found = sorted(p for p in (CLIPART / name).rglob("*.png") if p.stat().st_size < 20_000)
        for i, path in enumerate(found[:16]):
            (folder / name / f"{i}.png").symlink_to(path)
    return folder


def run(script, images, *options):
    # Pillow tells some clip art's palettes that they should be converted twice: not our affair.
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:Palette images", str(script), str(images), *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("workers", [0, 2])
def test_one_changed_import_trains_to_the_same_losses(images, tmp_path, workers):
    text = EXAMPLE.read_text()
    assert text.count(OURS) == 1
    theirs = tmp_path / "train_torch.py"
    theirs.write_text(text.replace(OURS, THEIRS))
    options = ("--epochs", "2", "--workers", str(workers))
    losses = run(EXAMPLE, images, *options)
    assert losses.count("epoch") == 2
    assert losses == run(theirs, images, *options)
