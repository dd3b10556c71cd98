"""Ceiling: 64 emulated accelerators of one process over a null store: what the harness loses by itself.

    python -m benchmarks.bench_parts.ceiling      # about half a minute

The step times are those of unet3d_h100 (0.323 s, batch 7) and resnet50_h100 (0.224 s, batch 400). Nothing is
read, by the same threads that wait for reads otherwise. What counts is AU, how late the ends of steps are
noticed, and the CPU that all of it takes.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT = Path(__file__).resolve().parents[2]
if not __package__:
    sys.path.insert(0, str(ROOT))

from headrace.bench.run import SessionOptions
from headrace.bench.session import run_session

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WORKLOADS", "Ceiling", "ceiling", "show"]

ACCELERATORS: Final = 64
AU_LEAST: Final = 99.0
LATE_P99_MOST_S: Final = 0.001

WORKLOADS: Final = ("unet3d_h100", "resnet50_h100")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What was found.

    Attributes:
        cpus: CPU seconds a second.
    """

    workload: str
    accelerators: int
    batch: int
    step_s: float
    steps: int
    au_percent: float
    au_mlperf_percent: float
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    cpus: float

    @property
    def holds(self) -> bool:
        """Whether it is as good as it should be."""
        return self.au_percent >= AU_LEAST and self.late_p99_s < LATE_P99_MOST_S

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"holds": self.holds}


def ceiling(
    work: Path, workloads: Sequence[str] = WORKLOADS, seconds: float = 15.0
) -> list[Ceiling]:
    """Run the steps of workloads, about `seconds` of each; results are left in `work`."""
    return [_run(work / name, name, seconds) for name in workloads]


def _run(folder: Path, name: str, seconds: float) -> Ceiling:
    from headrace.bench.config import load_workload, parse_command_line

    workload = load_workload(parse_command_line([f"workload={name}"])).workload
    step_s, batch = workload.train.computation_time.mean_s, workload.reader.batch_size
    steps = max(10, round(seconds / step_s))
    report = run_session([
        f"workload={name}", "++workload.reader.engine=null", "++workload.dataset.format=synthetic",
        "++workload.dataset.num_samples_per_file=1", "++workload.train.epochs=1",
        f"++workload.dataset.num_files_train={ACCELERATORS * batch * steps}",
        "++workload.workflow.checkpoint=False", "++workload.workflow.evaluation=False",
        f"++hydra.run.dir={folder}",
    ], SessionOptions(accelerators=ACCELERATORS))  # fmt: skip
    assert report.summary is not None
    own = report.summary["headrace"]
    late = own["late_s"]
    return Ceiling(
        workload=name, accelerators=ACCELERATORS, batch=batch, step_s=step_s, steps=steps,
        au_percent=report.summary["metric"]["train_au_mean_percentage"],
        au_mlperf_percent=own["au_mlperf_percent"], late_p50_s=late["p50"], late_p99_s=late["p99"],
        late_max_s=late["max"], cpus=own["cpu_s"] / (steps * step_s),
    )  # fmt: skip


def show(rows: Sequence[Ceiling]) -> None:
    """Print the table."""
    head = f"{'':<14}{'steps':>6}{'AU':>10}{'by MLPerf':>11}{'late p50':>11}{'p99':>11}{'most':>11}{'CPUs':>8}"
    print(head)
    for row in rows:
        lates = "".join(
            f"{s * 1e3:>8.3f} ms" for s in (row.late_p50_s, row.late_p99_s, row.late_max_s)
        )
        print(
            f"{row.workload:<14}{row.steps:>6}{row.au_percent:>8.2f} %{row.au_mlperf_percent:>9.2f} %"
            f"{lates}{row.cpus:>8.3f}"
        )


def main() -> None:
    """Run it alone."""
    with tempfile.TemporaryDirectory(prefix="headrace-ceiling-") as folder:
        print(f"load average {os.getloadavg()[0]:.2f}")
        show(ceiling(Path(folder)))


if __name__ == "__main__":
    main()
