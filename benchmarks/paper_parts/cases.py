"""DLIO and HAL: a case study each.

DLIO: a workload that a storage starves is measured with `headrace bench`, its data are looked at with
`headrace doctor`, what that names is changed, and it is measured again. HAL: a training job on 1, 2 and 4
ranks of one machine, each with an emulated accelerator and as much work as any, that meet at every step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import datasets, forms
from benchmarks.paper_parts import ROOT, Options, train
from benchmarks.unmodified import HEADRACE

WORKLOAD = (
    "workload=resnet50_h100", "++workload.framework=pytorch", "++workload.reader.data_loader=pytorch",
    "++workload.dataset.format=npz", "++workload.dataset.num_samples_per_file=1",
    "++workload.dataset.record_length_bytes=114660", "++workload.dataset.data_folder=dlio",
)  # fmt: skip
STEP_MS, BATCH = 20, 32
RANKS = (1, 2, 4)
RANK_BATCH, RANK_STEP_S = 32, 0.05


def dlio(options: Options) -> dict[str, Any]:
    """Before, the diagnosis, and after; with the commands, to be typed by the reader."""
    files = 64 if options.tiny else 640 if options.quick else 2560
    words = [*WORKLOAD, f"++workload.dataset.num_files_train={files}"]
    running = [
        *words, f"++workload.reader.batch_size={BATCH}", "++workload.train.epochs=3",
        f"++workload.train.computation_time={STEP_MS / 1e3:g}", "--simulate", "lustre",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="hr-paper-") as name:
        folder, typed = Path(name), []

        def call(*command: str) -> str:
            typed.append(" ".join(["headrace", *command]))
            ended = subprocess.run(
                [HEADRACE, *command],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            if ended.returncode:
                raise RuntimeError(f"{typed[-1]}: {ended.stderr[-2000:]}")
            return ended.stdout

        call("bench", "generate", *words, "++hydra.run.dir=generated")
        call("bench", "run", *running, "++workload.reader.read_threads=1", "++hydra.run.dir=before")
        examined = json.loads(call(
            "doctor", "dlio/train", "--simulate", "lustre", "--step-ms", str(STEP_MS), "--batch", str(BATCH),
            "--workers", "1", "--seconds", "2" if options.tiny else "5", "--json", "-q",
        ))  # fmt: skip
        first = examined["advice"][0]
        at_a_time = re.search(r"(\d+) at a time give", first["because"])
        threads = at_a_time[1] if at_a_time else "64"
        call(
            "bench",
            "run",
            *running,
            f"++workload.reader.read_threads={threads}",
            "++hydra.run.dir=after",
        )
        seen = {
            when: json.loads((folder / when / "summary.json").read_text())
            for when in ("before", "after")
        }
        return {
            "commands": typed, "read_threads": int(threads), "verdict": examined["verdict"],
            "advice": {k: first[k] for k in ("do", "because", "gain")},
            "cause": examined["cause"], "files": files,
            **{when: {
                "au_percent": each["metric"]["train_au_mean_percentage"],
                "training_s": each["headrace"]["time_to_solution"]["training_s"],
                "bound": each["headrace"]["bound"], "wait_share": each["headrace"]["time"]["wait_s"]
                / each["headrace"]["time"]["total_s"],
            } for when, each in seen.items()},
        }  # fmt: skip


def hal(options: Options) -> dict[str, Any]:
    """Samples a second of all ranks, with torch's loader and with headrace's."""
    count = 256 if options.tiny else 1280 if options.quick else 3840
    data = [datasets.DataSet("A", n, RANK_BATCH) for n in (count, 128)]
    folders = [forms.ensure(options.dir, each, "files") for each in data]
    stores = [str(forms.ensure(options.dir, each, "headrace")) for each in data]
    paths = [sorted(p for p in folder.rglob("*") if p.is_file()) for folder in folders]
    lists = []
    for at, part in enumerate(paths):
        lists.append(str(options.dir / f"hal-{at}"))
        Path(lists[-1]).write_text("\n".join(map(str, part)))
    packed = [p for store in stores for p in (Path(store), *Path(store).rglob("*")) if p.is_file()]
    rows = []
    for way, workers in (("torch", 2), ("store", 0)):
        for world in RANKS[:2] if options.tiny else RANKS:
            spec = {
                "way": way, "workers": workers, "batch": RANK_BATCH, "epochs": 3, "model": "accelerator",
                "step_s": RANK_STEP_S, "simulate": None, "lists": lists, "stores": stores,
                "ram_bytes": 0, "warm_up_s": 0, "socket": "",
            }  # fmt: skip
            seen = _ranks(spec, world, packed if way == "store" else paths[0] + paths[1])
            epoch_s = statistics.median(seen["train_s"])
            per_s = count / epoch_s
            print(f"  {way}, {world} ranks: {per_s:,.0f} samples/s", flush=True)
            rows.append({"way": way, "ranks": world, "samples_per_s": per_s, **seen})
    return {"step_s": RANK_STEP_S, "batch": RANK_BATCH, "samples": count, "rows": rows}


def _ranks(spec: dict[str, Any], world: int, cold: list[Path]) -> dict[str, Any]:
    """A job of so many ranks; what rank 0 saw."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.programs.paper_torch", json.dumps(spec)]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
    }
    with contextlib.ExitStack() as stack:
        for rank in range(1, world):
            other = stack.enter_context(subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            ))  # fmt: skip
            stack.callback(other.terminate)
        return train(command, {**environment, "RANK": "0", "LOCAL_RANK": "0"}, cold)
