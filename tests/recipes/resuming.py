"""A run that is stopped and one that goes on, held against a run that never stopped."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import headrace as hr

from .ranks import Ranks, epochs_of

if TYPE_CHECKING:
    from pathlib import Path

EPOCHS = 3
SAVE_EVERY = 5


def arguments(data: Path, checkpoints: Path, *more: str) -> list[str]:
    """Of a small run: three epochs of some twenty steps on two ranks."""
    return [
        "--data", str(data / "train.hr"), "--held-out", str(data / "held-out.hr"),
        "--checkpoints", str(checkpoints), "--epochs", str(EPOCHS), "--batch-size", "4",
        "--save-every", str(SAVE_EVERY), *more,
    ]  # fmt: skip


def whole(recipe: str, data: Path, folder: Path) -> list[dict]:
    """The epochs of a run that never stops."""
    with Ranks(recipe, 2, folder / "whole.log", arguments(data, folder / "whole")) as ranks:
        ranks.wait()
    found = epochs_of(folder / "whole.log")
    assert [line["epoch"] for line in found] == list(range(EPOCHS)), ranks.text()
    return found


def stop_in_the_first_epoch(
    recipe: str, data: Path, folder: Path, number: int, size: int = 2
) -> int:
    """Signals all ranks as soon as something is saved; the step of the newest checkpoint then."""
    checkpoints = folder / "parts"
    with Ranks(recipe, size, folder / "stopped.log", arguments(data, checkpoints)) as ranks:
        until_s = time.monotonic() + 100.0
        while hr.checkpoint.latest(checkpoints) is None:
            assert time.monotonic() < until_s, ranks.text()
            assert all(process.poll() is None for process in ranks.processes), ranks.text()
            time.sleep(0.002)
        ranks.signal(number)
        for process in ranks.processes:
            process.wait(60)
        # It did stop in the middle, else this test would test nothing.
        assert len(epochs_of(folder / "stopped.log")) < EPOCHS, ranks.text()
    step = hr.checkpoint.latest(checkpoints)
    assert step is not None
    return step


def go_on(recipe: str, data: Path, folder: Path, size: int = 2) -> list[dict]:
    """The epochs of both starts, the one that was stopped and the one that goes on."""
    log = folder / f"resumed-{size}.log"
    with Ranks(recipe, size, log, arguments(data, folder / "parts")) as ranks:
        ranks.wait()
    return epochs_of(folder / "stopped.log") + epochs_of(log)


def same(found: list[dict], expected: list[dict]) -> bool:
    """Loss and accuracy of each epoch, to the last digit; samples are of one start alone."""
    kept = ("epoch", "loss", "accuracy")
    return [[line[k] for k in kept] for line in found] == [
        [line[k] for k in kept] for line in expected
    ]
