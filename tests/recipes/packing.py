"""The data that all recipes train on: three classes of real images, packed by `prepare.py`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from headrace.cluster.recipes import recipes_folder
from tests_shared import write_real_images

if TYPE_CHECKING:
    from pathlib import Path


def pack_data(folder: Path) -> Path:
    """A folder with `train.hr` and `held-out.hr`."""
    images = write_real_images(folder / "images", per_class=64)
    command = [sys.executable, "-W", "error", recipes_folder() / "prepare.py", folder / "data"]
    subprocess.run(
        [*command, "--images", images, "--pixels-max", "600"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return folder / "data"
