"""What the launcher's tests share."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from cluster.launch.launching import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A launch that has not begun; whatever the test did, it is over afterwards."""
    made = Launch(tmp_path)
    yield made
    made.kill_all()
    shutil.rmtree(made.disk, ignore_errors=True)
    if made.process is not None and made.process.poll() is None:
        made.process.wait(10)
    for stream in (made.process.stdout, made.process.stderr) if made.process else ():
        if stream is not None:
            stream.close()
