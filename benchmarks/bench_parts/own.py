"""headrace's side of `benchmarks.bench`, a process for each run; prints what it saw as JSON.

python -m benchmarks.bench_parts.own read FOLDER FORMAT FILES BATCH THREADS EPOCHS
python -m benchmarks.bench_parts.own null WORKLOAD ACCELERATORS STEPS
python -m benchmarks.bench_parts.own generate FOLDER FORMAT FILES BYTES SAMPLES
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench_parts.ceiling import ceiling
from benchmarks.bench_parts.truth import SETTINGS, truth
from headrace.base.job import Rank
from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.dataset import DatasetSpec
from headrace.bench.dataset_files import find_files, generate
from headrace.bench.ranks import join
from headrace.bench.run import SessionOptions, run_epochs

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


def call(*words: object) -> dict[str, Any]:
    """Runs one of the commands in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_parts.own", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read(folder: str, form: str, files: str, batch: str, threads: str, epochs: str) -> Any:
    """Every epoch's seconds, of one accelerator that computes nothing."""
    loaded = load_workload(parse_command_line([
        "workload=default", f"++workload.dataset.data_folder={folder}",
        f"++workload.dataset.format={form}", f"++workload.dataset.num_files_train={files}",
        "++workload.dataset.num_files_eval=0", "++workload.dataset.num_subfolders_train=0",
        "++workload.dataset.num_subfolders_eval=0", "++workload.workflow.evaluation=False",
        f"++workload.reader.batch_size={batch}", f"++workload.reader.read_threads={threads}",
        f"++workload.train.epochs={epochs}", "++workload.train.computation_time=0",
        "++workload.reader.sample_shuffle=seed", "++workload.dataset.record_length_bytes=100000",
    ]))  # fmt: skip
    paths = {"train": find_files(loaded.workload.dataset, "train")}
    with tempfile.TemporaryDirectory() as meeting:
        group = join(Rank(0, 1), Path(meeting))
        before = _cpu_s()
        found = run_epochs(loaded, SessionOptions(), group, paths)
        group.close()
    return {
        "epochs_s": [block.end_s - block.start_s for block in found.blocks],
        "steps": [block.steps for block in found.blocks],
        "bytes": found.nbytes,
        "device_bytes": found.device_bytes,
        "cpu_s": _cpu_s() - before,
    }


def null(workload: str, seconds: str) -> Any:
    """AU and lateness of a workload's steps over a store that has every batch at once."""
    with tempfile.TemporaryDirectory() as folder:
        return ceiling(Path(folder), [workload], float(seconds))[0].document()


def hand(settings: str) -> Any:
    """The reported AU beside the one by hand, of the first so many storages."""
    with tempfile.TemporaryDirectory() as folder:
        return [row.document() for row in truth(Path(folder), SETTINGS[: int(settings)])]


def generation(folder: str, form: str, files: str, nbytes: str, samples: str) -> Any:
    """Bytes and seconds until all is on the disk."""
    spec = DatasetSpec(
        data_folder=folder, format=form, num_files_train=int(files),  # type: ignore[arg-type]
        num_samples_per_file=int(samples), record_length_bytes=float(nbytes),
    )  # fmt: skip
    before, began = _cpu_s(), time.perf_counter()
    report = generate(spec)
    return {
        "bytes": report.bytes, "seconds": time.perf_counter() - began, "cpu_s": _cpu_s() - before,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    what, *words = sys.argv[1:]
    commands: dict[str, Callable[..., Any]] = {
        "read": read, "null": null, "truth": hand, "generate": generation,
    }  # fmt: skip
    print(json.dumps(commands[what](*words)))


if __name__ == "__main__":
    main()
