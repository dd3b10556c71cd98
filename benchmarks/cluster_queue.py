"""The queue of a large cluster, and what submitting adds to sbatch: whole commands, from start to end.

    python -m benchmarks.cluster_queue            # half a minute
    python -m benchmarks.cluster_queue --quick    # once each

The cluster is a simulation: 5,000 nodes and 50,000 jobs in the form of `scontrol --details show`, from a seed.
`saved` reads them from a snapshot file; `live` from stand-ins for Slurm's commands, which print at once what
slurmctld would have to gather first. Submitting is measured beside the same stand-in for sbatch, and lays a
job out on 5,000 nodes. Raw figures go to benchmarks/results/cluster_queue-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "tests"))

from benchmarks import machine
from benchmarks.processes import leaving_nothing
from cluster.simulated import simulated_cluster
from headrace.cluster.snapshot import save_snapshot

RESULTS = ROOT / "benchmarks/results"
NODES, JOBS = 5_000, 50_000

_SCONTROL = """#!/bin/sh
case "$*" in
  *nodes*) exec cat {folder}/nodes ;;
  *jobs*) exec cat {folder}/jobs ;;
  *partitions*) exec cat {folder}/partitions ;;
  *config*) exec cat {folder}/config ;;
  *) echo "slurm 22.05.8" ;;
esac
"""
_SBATCH = "#!/bin/sh\ncat >/dev/null\necho 17\n"
_SCRIPT = "#!/bin/bash\n#SBATCH --job-name=train\nsrun python train.py\n"


@leaving_nothing()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once each, and nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    times = 1 if given.quick else 7
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = prepare(folder)
        script = str(folder / "train.sh")
        python = [sys.executable, "-c"]
        headrace = [*python, "from headrace.cli import main; main()"]
        swbatch = [
            *python,
            "import sys; sys.argv[0] = 'swbatch'; from headrace.cli.sw import swbatch; swbatch()",
        ]
        commands = {
            "queue, saved": [
                *headrace,
                "cluster",
                "queue",
                "--from",
                str(folder / "snapshot.json"),
            ],
            "queue, live": [*headrace, "cluster", "queue"],
            "queue --json, saved": [
                *headrace,
                "cluster",
                "queue",
                "--json",
                "--from",
                str(folder / "snapshot.json"),
            ],
            "sbatch alone": ["sbatch", script],
            "batch --gpus 16": [*headrace, "cluster", "batch", "--gpus", "16", script],
            "swbatch gpux16": [*swbatch, "--partition", "gpux16", script],
            "python -c pass": [*python, "pass"],
        }
        results: dict[str, Any] = {
            "benchmark": "cluster_queue", "simulation": f"{NODES} nodes, {JOBS} jobs",
            "machine": machine.describe(folder),
            "load": os.getloadavg(), "commands": {},
        }  # fmt: skip
        for label, command in commands.items():
            results["commands"][label] = measure(command, environment, times)
    results["load_after"] = os.getloadavg()
    show(results)
    if not given.quick:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"cluster_queue-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(path)


def prepare(folder: Path) -> dict[str, str]:
    """A recording, a snapshot of it, stand-ins for Slurm's commands; the environment that finds them."""
    recording = simulated_cluster(NODES, JOBS)
    for name in ("nodes", "jobs", "partitions", "config"):
        (folder / name).write_text(getattr(recording, name))
    save_snapshot(recording.read(), folder / "snapshot.json")
    programs = folder / "bin"
    programs.mkdir()
    for name, text in (("scontrol", _SCONTROL.format(folder=folder)), ("sbatch", _SBATCH)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "train.sh").write_text(_SCRIPT)
    # The first run of each compiles what the others load, as an installed package's programs do.
    own = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM", "SBATCH", "HEADRACE_EXECUTOR", "PYTHONDONTWRITEBYTECODE"))
    }
    return {
        **own,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(folder),
        "COLUMNS": "120",
    }


def measure(command: list[str], environment: dict[str, str], times: int) -> dict[str, Any]:
    """Wall and CPU seconds of a whole command, its children's included."""
    program = shutil.which(command[0], path=environment["PATH"])
    assert program is not None
    walls: list[float] = []
    cpus: list[float] = []
    for _ in range(times + (times > 1)):  # the first one warms the page cache
        before, began = os.times(), time.perf_counter()
        with subprocess.Popen(
            [program, *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as process:
            assert process.wait(120) == 0, command
        after = os.times()
        walls.append(time.perf_counter() - began)
        cpus.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    walls, cpus = walls[-times:], cpus[-times:]
    return {
        "wall_s": statistics.median(walls), "cpu_s": statistics.median(cpus), "walls_s": walls, "cpus_s": cpus,
    }  # fmt: skip


def show(results: dict[str, Any]) -> None:
    """Print the figures."""
    print(f"simulation: {results['simulation']}; medians; load {results['load'][0]:.1f}")
    for label, found in results["commands"].items():
        print(f"  {label:22} {found['wall_s'] * 1e3:7.0f} ms   CPU {found['cpu_s'] * 1e3:6.0f} ms")
    alone = results["commands"]["sbatch alone"]
    for label in ("batch --gpus 16", "swbatch gpux16"):
        found = results["commands"][label]
        print(f"  {label} adds {1e3 * (found['wall_s'] - alone['wall_s']):.0f} ms to sbatch")


if __name__ == "__main__":
    main()
