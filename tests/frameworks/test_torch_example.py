"""The example: an ordinary script, changed by one import, trains to the same losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import warm
from tests_shared import CLIPART, write_real_images

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_torch.py"
OURS = "from headrace.torch import DataLoader\n"
THEIRS = "from torch.utils.data import DataLoader\n"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_real_images(tmp_path_factory.mktemp("images") / "images", per_class=32)


def run(script, images, *options):
    # Pillow tells some clip art's palettes that they should be converted twice: not our affair.
    warnings = ("error", "ignore:Palette images")
    ended = warm.run(script, images, *options, warnings=warnings, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("workers", [0, 2])
def test_one_changed_import_trains_to_the_same_losses(images, tmp_path, workers):
    text = EXAMPLE.read_text()
    assert text.count(OURS) == 1
    theirs = tmp_path / "train_torch.py"
    theirs.write_text(text.replace(OURS, THEIRS))
    options = ("--epochs", "4", "--workers", str(workers))
    losses = run(EXAMPLE, images, *options)
    accuracy = [float(a) for a in re.findall(r"accuracy ([\d.]+)", losses)]
    assert len(accuracy) == 4
    if CLIPART.is_dir():  # noise has nothing to learn but its samples by heart
        assert accuracy[-1] > 0.7
    assert losses == run(theirs, images, *options)
