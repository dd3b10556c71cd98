"""A run that is stopped and one that goes on, held against a run that never stopped."""

from __future__ import annotations

import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import headrace as hr

from .ranks import Ranks, by_hand, epochs_of, launched

if TYPE_CHECKING:
    from collections.abc import Callable
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


def stop(recipe: str, data: Path, folder: Path) -> None:
    """Ask the launcher to stop as soon as something is saved."""
    _in_the_middle(launched, signal.SIGTERM, recipe, data, folder)


def kill(recipe: str, data: Path, folder: Path) -> None:
    """Kill all ranks as soon as something is saved."""
    _in_the_middle(by_hand, signal.SIGKILL, recipe, data, folder)


def _in_the_middle(
    start: Callable[..., Ranks], number: int, recipe: str, data: Path, folder: Path
) -> None:
    """Signal to ranks in the middle of their work; to others if, on a busy machine, it came too late."""
    log, parts = folder / "stopped.log", folder / "parts"
    for _ in range(4):
        log.unlink(missing_ok=True)
        shutil.rmtree(parts, ignore_errors=True)
        with start(recipe, 2, log, arguments(data, parts)) as ranks:
            _until_saved(parts, ranks)
            ranks.signal(number)
            ranks.codes()
        epochs = len(epochs_of(log))
        if epochs < EPOCHS and (number != signal.SIGKILL or epochs == _epoch_saved(parts)):
            return
    raise AssertionError(
        f"it is always over, or between an epoch's line and what it saves:\n{ranks.text()}"
    )


def _epoch_saved(checkpoints: Path) -> int:
    """That of the newest checkpoint."""
    saved = hr.checkpoint.load(checkpoints, rank=0, world_size=1)
    return int(saved.tree["loader"]["epoch"])


def _until_saved(checkpoints: Path, ranks: Ranks) -> None:
    until_s = time.monotonic() + 150.0
    while hr.checkpoint.latest(checkpoints) is None:
        assert time.monotonic() < until_s, ranks.text()
        assert all(process.poll() is None for process in ranks.processes), ranks.text()
        time.sleep(0.002)


def go_on(recipe: str, data: Path, folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """The epochs of both starts, the one that was stopped and the one that goes on."""
    log = folder / f"resumed-{size}.log"
    with by_hand(recipe, size, log, arguments(data, folder / "parts")) as ranks:
        assert set(ranks.codes()) == {0}, ranks.text()
    return epochs_of(folder / "stopped.log") + epochs_of(log)


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Loss and accuracy of each epoch, to the last digit; samples are of one start alone."""
    kept = ("epoch", "loss", "accuracy")
    return [[line[k] for k in kept] for line in found] == [
        [line[k] for k in kept] for line in expected
    ]
