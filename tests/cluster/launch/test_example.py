"""`examples/train_ddp.py`, launched as its first lines say; slow for what torch imports."""

from __future__ import annotations

import signal

import pytest

import headrace as hr
from tests_shared import ROOT, until, write_photos

pytest.importorskip("torch")
pytest.importorskip("PIL")


@pytest.mark.slow
def test_the_example_trains_stops_and_goes_on(launch):
    write_photos(launch.folder / "photos")
    script = str(ROOT / "examples/train_ddp.py")
    words = ("--stage", "photos", "--ranks-per-node", "2", script, "--batch-size", "2")
    launch.start(*words, "--epochs", "500", nodes=1)
    checkpoints = launch.folder / "checkpoints"
    assert until(lambda: hr.checkpoint.latest(checkpoints) is not None, 120.0)
    launch.process.send_signal(signal.SIGTERM)
    code, out, err = launch.end()
    assert code == 128 + signal.SIGTERM, err
    assert launch.left() == []
    step = hr.checkpoint.latest(checkpoints)
    epochs = 9 * (step // 9 // 9 + 1)
    launch.start(*words, "--epochs", str(epochs), nodes=1)
    code, out, err = launch.end(150.0)
    assert code == 0, err
    # Nothing is done twice: 36 samples are 9 steps of two ranks with two samples each.
    assert f"epoch {epochs - 1}: loss" in out
    assert f"step {epochs * 9}\n" in out
    assert launch.left() == []
