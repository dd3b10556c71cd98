"""Run: pack, train, kill, resume, prove, compare; with progress on stderr and the result on stdout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import api
from headrace.demo.comparison import compare
from headrace.demo.images import SEED, pack_images
from headrace.demo.report import DemoReport, EpochResult, Interruption, show
from headrace.demo.training import TrainingJob
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.demo.images import DemoOptions, PackedImages

    Progress = Callable[[str, int, int], None]

KILLED_EPOCH = 1
"""The second epoch: the first has shown that training works, and others follow."""

_TRAIN = "import sys; from headrace.demo.training import run_training; run_training(sys.argv[1])"


def run(options: DemoOptions, progress: Progress = lambda _what, _done, _of: None) -> DemoReport:
    """Run the whole demo.

    Raises:
        SourceError: the images cannot be used.
        HeadraceError: the training process failed.
    """
    started = time.perf_counter()
    packed = pack_images(options, lambda done, of: progress("packing", done, of))
    epochs, interruption = _train(packed, options, progress)
    with api.open(packed.held_out) as store:
        assert store.labels is not None
        chance = float(np.bincount(store.labels).max() / len(store))
    measured = compare(packed, options, lambda what: progress(what, 0, 0))
    seconds = time.perf_counter() - started
    report = DemoReport(packed, epochs, interruption, chance, measured, seconds)
    (options.out / "report.json").write_text(json.dumps(report.to_dict(), indent=2))
    return report


def _train(
    packed: PackedImages, options: DemoOptions, progress: Progress
) -> tuple[list[EpochResult], Interruption]:
    """Train in a process that is killed in the second epoch, and to the end in another."""
    checkpoint = options.out / "checkpoint.pt"
    checkpoint.unlink(missing_ok=True)
    job = TrainingJob(
        str(packed.train), str(packed.held_out), len(packed.classes), options.epochs,
        options.batch_size, SEED, str(checkpoint),
    )  # fmt: skip
    epochs: list[EpochResult] = []
    resumed_at = 0

    def train(*, kill: bool) -> tuple[int, int]:
        """Follow a process; where and by which signal it was killed."""
        nonlocal resumed_at
        with subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-c", _TRAIN, json.dumps(job)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for event in map(json.loads, process.stdout):
                    kind, position = event.pop("event"), event.get("position", 0)
                    if kind == "epoch":
                        epochs.append(EpochResult(**event))
                    elif kind == "resumed":
                        resumed_at = position
                    elif kind == "step":
                        progress(
                            f"training, epoch {event['epoch']}", position, packed.train_samples
                        )
                        if kill and _is_kill_point(event, packed.train_samples):
                            process.send_signal(signal.SIGKILL)  # as a crash of the machine would
                            return position, -process.wait()
                if code := process.wait():
                    raise HeadraceError(
                        f"the training process ended with status {code}.",
                        next_step="Its own error stands above.",
                    )
            finally:
                process.kill()
        return 0, 0

    killed_at, killed_by = train(kill=True)
    train(kill=False)
    with api.open(packed.train) as store:  # the same epoch in one go
        loader = api.loader(store, options.batch_size, seed=SEED, rank=0, world_size=1)
        loader.set_epoch(KILLED_EPOCH)
        for _ in loader:
            pass
        loader.close()
        uninterrupted = str(loader.last_order_hash)
    resumed = epochs[KILLED_EPOCH].order_hash
    return epochs, Interruption(
        KILLED_EPOCH, killed_at, resumed_at, killed_by, resumed, uninterrupted,
        identical=resumed == uninterrupted,
    )  # fmt: skip


def _is_kill_point(step: dict[str, Any], samples: int) -> bool:
    """In the middle of the second epoch, after a step that no checkpoint knows of."""
    return bool(
        step["epoch"] == KILLED_EPOCH and step["position"] * 2 > samples and not step["saved"]
    )


_PROGRESS_S = 0.2


def main(options: DemoOptions, *, as_json: bool = False) -> int:
    """Run the demo and print its report.

    Returns:
        0 if the model beats chance and the resumed order is the same, 1 otherwise.
    """
    terminal = sys.stderr.isatty()
    last, last_s = "", 0.0

    def progress(what: str, done: int, of: int) -> None:
        """One line that is written over on a terminal; a line per kind of work in a log."""
        nonlocal last, last_s
        now_s = time.monotonic()
        if what == last and (not terminal or now_s - last_s < _PROGRESS_S):
            return
        last, last_s = what, now_s
        text = f"{what}: {done:,} of {of:,}" if of else what
        sys.stderr.write(f"\r{text:<70}" if terminal else f"{what} ...\n")
        sys.stderr.flush()

    try:
        report = run(options, progress)
    finally:
        if terminal:
            sys.stderr.write(f"\r{'':<70}\r")
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        show(report)
    return 0 if report.passed else 1
