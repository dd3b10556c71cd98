"""Truth: the AU that a run reports beside the one worked out by hand, for 20 storages of known bandwidth.

    python -m benchmarks.bench_parts.truth        # half a minute

In real time: files are read through a SlowVolume, native threads sleep until its transfers are due, and
accelerators compute by waiting. The value by hand needs no more than a ruler. With c the time of a step and T
the time in which the link moves a step's bytes of all A accelerators, n steps take T + (n - 1) max(c, T) + c.
The first batch of the k-th accelerator is there after k T / A, its first step does not count, and so

    AU of k = (n - 1) c / ((n - 1) max(c, T) + T - k T / A)

where T - k T / A is its wait at the first barrier, which DLIO's formula counts. The reported AU is the mean
of all accelerators; after many steps it is min(1, c / T).
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT = Path(__file__).resolve().parents[2]
if not __package__:
    sys.path.insert(0, str(ROOT))

from headrace.bench.run import SessionOptions
from headrace.bench.session import run_session
from headrace.io.simulation import Simulation
from headrace.testing import SlowVolume

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SETTINGS", "Row", "Setting", "show", "truth"]

TARGET_PERCENT: Final = 1.0

_FILE_BYTES: Final = 20_000


@dataclass(frozen=True, slots=True)
class Setting:
    """One run.

    Attributes:
        batch: files of a step of one accelerator.
        step_s: how long a step computes.
        share: the bandwidth, as a share of what the steps ask for.
    """

    accelerators: int
    batch: int
    step_s: float
    share: float
    steps: int = 16

    def bandwidth(self, file_bytes: int) -> float:
        """Bytes a second of the link."""
        return self.share * self.accelerators * self.batch * file_bytes / self.step_s

    def hand_percent(self) -> float:
        """The AU that follows."""
        count, rest = self.accelerators, self.steps - 1
        transfer_s = self.step_s / self.share
        total = 0.0
        for k in range(1, count + 1):
            skew_s = transfer_s - k * transfer_s / count
            total += rest * self.step_s / (rest * max(self.step_s, transfer_s) + skew_s)
        return 100 * total / count


SETTINGS: Final = tuple(
    Setting(accelerators, batch, step_s * longer, share)
    for accelerators, batch, longer in ((1, 4, 1), (1, 12, 1), (2, 3, 1), (8, 7, 1), (32, 2, 2))
    for step_s, share in ((0.04, 0.35), (0.03, 0.6), (0.05, 0.85), (0.06, 2.0))
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was found."""

    setting: Setting
    bandwidth: float
    hand_percent: float
    reported_percent: float
    late_p99_s: float
    """How late ends of steps were noticed."""

    @property
    def off_percent(self) -> float:
        """The difference as a share of the value by hand."""
        return 100 * (self.reported_percent / self.hand_percent - 1)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        setting = self.setting
        return {
            "accelerators": setting.accelerators, "batch": setting.batch, "step_s": setting.step_s,
            "steps": setting.steps, "bandwidth_bytes_per_s": self.bandwidth,
            "hand_percent": self.hand_percent, "reported_percent": self.reported_percent,
            "off_percent": self.off_percent, "late_p99_s": self.late_p99_s,
        }  # fmt: skip


def truth(
    work: Path,
    settings: Sequence[Setting] = SETTINGS,
    told: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Run all settings in real time.

    Args:
        work: a folder for the data set and the results; what is in it is left there.
        settings: what to run.
        told: called with each row.
    """
    files = max(s.accelerators * s.batch * s.steps for s in settings)
    common = [
        "workload=unet3d_h100", "++workload.dataset.format=npy", "++workload.train.epochs=1",
        f"++workload.dataset.num_files_train={files}", "++workload.workflow.checkpoint=False",
        f"++workload.dataset.record_length_bytes={_FILE_BYTES}",
        "++workload.dataset.record_length_bytes_stdev=0", "++workload.dataset.num_samples_per_file=1",
        f"++workload.dataset.data_folder={work / 'data'}",
    ]  # fmt: skip
    run_session([
        *common, "++workload.workflow.generate_data=True", "++workload.workflow.train=False",
        f"++hydra.run.dir={work / 'generated'}",
    ])  # fmt: skip
    first = next((work / "data/train").glob("*.npy"))
    size = first.stat().st_size
    rows = []
    for number, setting in enumerate(settings):
        row = _run(setting, size, [*common, f"++hydra.run.dir={work / f'{number:02d}'}"])
        rows.append(row)
        if told is not None:
            told(row)
    return rows


def _run(setting: Setting, file_bytes: int, words: list[str]) -> Row:
    bandwidth = setting.bandwidth(file_bytes)
    slow = SlowVolume(Simulation(name="truth", bandwidth_bytes_per_s=bandwidth))
    threads = min(8, 64 // setting.accelerators)  # enough that the link is never idle
    options = SessionOptions(accelerators=setting.accelerators, simulate=slow)
    report = run_session([
        *words, f"++workload.reader.batch_size={setting.batch}",
        f"++workload.train.computation_time={setting.step_s}",
        f"++workload.train.total_training_steps={setting.steps}",
        f"++workload.reader.read_threads={threads}", f"++workload.reader.prefetch_size={threads}",
    ], options)  # fmt: skip
    assert report.summary is not None
    found = report.summary["metric"]["train_au_mean_percentage"]
    late = report.summary["headrace"]["late_s"]["p99"]
    return Row(setting, bandwidth, setting.hand_percent(), found, late)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(
        f"{'n':>3}{'batch':>6}{'step':>9}{'bandwidth':>13}{'by hand':>10}{'reported':>10}{'off':>9}"
    )
    for row in rows:
        _show_row(row)
    worst = max(abs(row.off_percent) for row in rows)
    good = sum(abs(row.off_percent) <= TARGET_PERCENT for row in rows)
    print(f"within {TARGET_PERCENT:g} %: {good} of {len(rows)}; the worst is {worst:.2f} % off")


def _show_row(row: Row) -> None:
    setting = row.setting
    print(
        f"{setting.accelerators:>3}{setting.batch:>6}{setting.step_s * 1e3:>6.0f} ms"
        f"{row.bandwidth / 1e6:>8.3f} MB/s{row.hand_percent:>8.2f} %{row.reported_percent:>8.2f} %"
        f"{row.off_percent:>+7.2f} %",
        flush=True,
    )


def main() -> None:
    """Run it alone."""
    with tempfile.TemporaryDirectory(prefix="headrace-truth-") as folder:
        print(f"load average {os.getloadavg()[0]:.2f}")
        show(truth(Path(folder)))


if __name__ == "__main__":
    main()
