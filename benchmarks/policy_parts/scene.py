"""The scene: a controller, a node daemon over slow storage, and three jobs, all real processes.

    0 s    caps and shares: `a` is capped, `b` weighs twice what `c` does
    C      `c` ends: its share is `b`'s
    K      the controller is killed (kill -9); the lease runs on
    K+L    the lease ends: the declared default holds for each job
    R      the controller comes back

The storage is simulated (and labelled so); data set, daemon, controller and loaders are not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr

SAMPLE_BYTES = 16_384
SAMPLES = 8_000
BATCH = 8
MB = 1e6

CLIENT = """
import sys, time
import headrace as hr
store, seed = sys.argv[1:]
loader = hr.loader(store, {batch}, seed=int(seed), plane="node", tune=False, budget_bytes=1 << 20)
while True:
    for batch in loader:
        sys.stdout.write(f"{{time.monotonic():.6f}} {{int(batch.lengths.sum())}}\\n")
        sys.stdout.flush()
"""


@dataclass(frozen=True)
class Plot:
    """When what happens, in seconds, and the rates of the policy in bytes a second."""

    shared_s: float = 12.0
    alone_s: float = 6.0
    lease_s: float = 4.0
    expired_s: float = 6.0
    back_s: float = 7.0
    capacity: float = 24 * MB
    cap: float = 4 * MB
    floor: float = 6 * MB
    simulate: str = "nfs"

    @property
    def policy(self) -> str:
        """As YAML."""
        return (
            f"version: 1\nlease_s: {self.lease_s}\n"
            f"when_expired: {{bytes_per_s: {self.floor:.0f}}}\n"
            "file_systems:\n"
            f"  slow: {{paths: [DATA], capacity: {{bytes_per_s: {self.capacity:.0f}}}}}\n"
            "jobs:\n"
            f"  a: {{cap: {{bytes_per_s: {self.cap:.0f}}}}}\n"
            "  b: {weight: 2}\n"
            "  c: {weight: 1}\n"
        )


@dataclass(frozen=True)
class Scene:
    """What was seen: deliveries of each job (seconds since the beginning, bytes), and events."""

    deliveries: dict[str, np.ndarray]
    events: dict[str, float]
    plot: Plot

    def rate(self, job: str, begin: float, end: float) -> float:
        """Bytes a second delivered to a job between two times."""
        rows = self.deliveries[job]
        inside = (rows[:, 0] >= begin) & (rows[:, 0] < end)
        return float(rows[inside, 1].sum() / (end - begin))

    def windows(self, job: str, begin: float, end: float, width: float = 5.0) -> np.ndarray:
        """The rates over all windows of this width, a tenth of a second apart."""
        starts = np.arange(begin, end - width + 1e-9, 0.1)
        return np.array([self.rate(job, s, s + width) for s in starts])


def play(plot: Plot) -> Scene:
    """Let it happen."""
    folder = Path(tempfile.mkdtemp(prefix="hr-policy-"))
    environment = os.environ | {"HEADRACE_RUNTIME_DIR": str(folder / "rt")}
    processes: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-c", "from headrace.cli import main; main()"]

    def headrace(*arguments: str) -> dict[str, Any]:
        ended = subprocess.run(
            [*command, *arguments, "--json"], env=environment, capture_output=True, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"{arguments}: {ended.stdout.decode()} {ended.stderr.decode()}")
        return json.loads(ended.stdout)

    def control() -> int:
        return int(headrace("control", "start", "--db", str(folder / "control.db"))["pid"])

    try:
        data = folder / "data.hr"
        blob = np.random.default_rng(0).bytes(SAMPLE_BYTES)
        hr.pack(((f"{i:06d}", blob, 0) for i in range(SAMPLES)), data)
        pid = control()
        (folder / "policy.yaml").write_text(plot.policy.replace("DATA", str(folder)))
        headrace("policy", "apply", str(folder / "policy.yaml"))
        headrace(
            "node", "start", "--ram", "1M", "--simulate", plot.simulate,
            "--controller", f"unix:{folder}/rt-control/socket",
        )  # fmt: skip
        for seed, job in enumerate("abc"):
            with (folder / job).open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", CLIENT.format(batch=BATCH), str(data), str(seed)],
                        env=environment | {"HEADRACE_JOB": job}, stdout=out,
                    )
                )  # fmt: skip
        while not all((folder / job).stat().st_size for job in "abc"):
            time.sleep(0.05)
        time.sleep(2.0)  # what was begun before the first lease
        began = time.monotonic()
        events: dict[str, float] = {}

        def now(event: str) -> None:
            events[event] = time.monotonic() - began

        time.sleep(plot.shared_s)
        processes[2].kill()
        now("c ends")
        time.sleep(plot.alone_s)
        os.kill(pid, signal.SIGKILL)
        now("controller killed")
        time.sleep(plot.lease_s + plot.expired_s)
        now("controller starts")
        control()
        now("controller serves")
        time.sleep(plot.back_s)
        now("end")
        return Scene({job: _read(folder / job, began) for job in "abc"}, events, plot)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for what in ("node", "control"):
            subprocess.run(
                [*command, what, "stop", "--force"], env=environment, capture_output=True,
                check=False,
            )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path, began: float) -> np.ndarray:
    lines = path.read_text().splitlines()
    rows = np.array([[float(v) for v in line.split()] for line in lines[:-1]]).reshape(-1, 2)
    rows[:, 0] -= began
    return rows
