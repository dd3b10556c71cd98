"""Run: pack, train, kill, resume, prove, compare; with progress on stderr and the result on stdout."""

from __future__ import annotations

import contextlib
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
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from headrace.demo.images import DemoOptions, PackedImages

    Progress = Callable[[str, int, int], None]

KILLED_EPOCH = 1
"""The second epoch: the first has shown that training works, and others follow."""


def run(options: DemoOptions, progress: Progress = lambda _what, _done, _of: None) -> DemoReport:
    """Run the whole demo.

    Raises:
        SourceError: the images cannot be used.
        HeadraceError: the training process failed.
    """
    started = time.perf_counter()
    packed = pack_images(options, lambda done, of: progress("packing", done, of))
    epochs, interruption = _train(packed, options, progress)
    chance = _most_common_share(packed.held_out)
    measured = compare(packed, options, lambda what: progress(what, 0, 0))
    report = DemoReport(
        packed, epochs, interruption, chance, measured, time.perf_counter() - started
    )
    (options.out / "report.json").write_text(json.dumps(report.to_dict(), indent=2))
    return report


def _train(
    packed: PackedImages, options: DemoOptions, progress: Progress
) -> tuple[list[EpochResult], Interruption]:
    checkpoint = options.out / "checkpoint.pt"
    checkpoint.unlink(missing_ok=True)
    job = TrainingJob(
        str(packed.train), str(packed.held_out), len(packed.classes), options.epochs,
        options.batch_size, SEED, str(checkpoint),
    )  # fmt: skip
    epochs: list[EpochResult] = []
    killed_at = killed_by = resumed_at = 0
    with _training_process(job) as (process, events):
        for event in events:
            _note(event, epochs, packed.train_samples, progress)
            if _is_kill_point(event, packed.train_samples):
                killed_at = event["position"]
                process.send_signal(signal.SIGKILL)  # as a crash of the machine would
                killed_by = -process.wait()
                break
    with _training_process(job) as (_, events):
        for event in events:
            _note(event, epochs, packed.train_samples, progress)
            if event["event"] == "resumed":
                resumed_at = event["position"]
    interruption = Interruption(
        KILLED_EPOCH, killed_at, resumed_at, killed_by,
        epochs[KILLED_EPOCH].order_hash,
        _hash_of_pass(packed.train, options, KILLED_EPOCH),
    )  # fmt: skip
    return epochs, interruption


def _note(
    event: dict[str, Any], epochs: list[EpochResult], samples: int, progress: Progress
) -> None:
    if event["event"] == "epoch":
        epochs.append(EpochResult(**{name: event[name] for name in event if name != "event"}))
    elif event["event"] == "step":
        progress(f"training, epoch {event['epoch']}", event["position"], samples)


def _is_kill_point(event: dict[str, Any], samples: int) -> bool:
    """In the middle of the second epoch, after a step that no checkpoint knows of."""
    if event["event"] != "step" or event["epoch"] != KILLED_EPOCH:
        return False
    return bool(event["position"] * 2 > samples and not event["saved"])


_TRAIN = "import sys; from headrace.demo.training import run_training; run_training(sys.argv[1])"


@contextlib.contextmanager
def _training_process(
    job: TrainingJob,
) -> Iterator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    """A Python process that trains, and its events until it ends; it is over at the end.

    Raises:
        HeadraceError: the process failed.
    """
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-c", _TRAIN, json.dumps(job)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None

    def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
        yield from map(json.loads, lines)
        if code := process.wait():
            raise HeadraceError(
                f"the training process ended with status {code}.",
                next_step="Its own error stands above.",
            )

    with process:
        try:
            yield process, events(process.stdout)
        finally:
            process.kill()


def _hash_of_pass(train: Path, options: DemoOptions, epoch: int) -> str:
    """Deliver the epoch in one go and return its order hash."""
    with api.open(train) as store:
        loader = api.loader(store, options.batch_size, seed=SEED, rank=0, world_size=1)
        loader.set_epoch(epoch)
        for _ in loader:
            pass
        loader.close()
        return str(loader.last_order_hash)


def _most_common_share(held_out: Path) -> float:
    with api.open(held_out) as store:
        assert store.labels is not None
        return float(np.bincount(store.labels).max() / len(store))


_PROGRESS_S = 0.2


class _ProgressLine:
    """One line that is written over on a terminal; a line per kind of work in a log."""

    def __init__(self) -> None:
        self._what = ""
        self._shown_at = 0.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        new = what != self._what
        if not new and (not self._terminal or now - self._shown_at < _PROGRESS_S):
            return
        self._what, self._shown_at = what, now
        text = f"{what}: {done:,} of {of:,}" if of else what
        sys.stderr.write(f"\r{text:<70}" if self._terminal else f"{what} ...\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave nothing behind on a terminal."""
        if self._terminal:
            sys.stderr.write(f"\r{'':<70}\r")


def main(options: DemoOptions, *, as_json: bool = False) -> int:
    """Run the demo and print its report.

    Returns:
        0 if the model beats chance and the resumed order is the same, 1 otherwise.
    """
    progress = _ProgressLine()
    try:
        report = run(options, progress)
    finally:
        progress.end()
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        show(report)
    return 0 if report.passed else 1
