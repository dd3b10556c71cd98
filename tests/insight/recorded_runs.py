"""Programs that are recorded, and the command that records them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]

TORCH = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    def __init__(self, root):
        self.paths = sorted(str(p) for p in Path(root).rglob("*.png"))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, i):
        data = Path(self.paths[i]).read_bytes()
        return torch.tensor([len(data), sum(data[:64])])

if __name__ == "__main__":
    root, workers, batch, epochs, shuffle, save, context = sys.argv[1:8]
    loader = DataLoader(Files(root), batch_size=int(batch), shuffle=shuffle == "yes",
                        num_workers=int(workers), multiprocessing_context=context or None,
                        generator=torch.Generator().manual_seed(5))
    seen = 0
    for epoch in range(int(epochs)):
        for item in loader:
            seen += int(item[:, 0].sum())
            time.sleep(0.01)
        if save:
            torch.save({"w": torch.zeros(40_000)}, save)
    print(seen)
"""


@dataclass(frozen=True)
class Recorded:
    """How a recording ended."""

    code: int
    out: bytes
    err: str
    output: Path
    report: dict[str, Any]

    @property
    def job(self) -> dict[str, Any]:
        return self.report["job"]


def record(folder: Path, *command: object, options: tuple[object, ...] = ()) -> Recorded:
    """Records a command into `folder`/job.yaml."""
    output, report = folder / "job.yaml", folder / "report.json"
    report.unlink(missing_ok=True)
    words = [
        *HEADRACE, "record", "-o", output, "--overwrite", "--report", report, *options, "--", *command,
    ]  # fmt: skip
    done = subprocess.run(
        [os.fspath(w) if isinstance(w, Path) else str(w) for w in words],
        capture_output=True, timeout=120, check=False, cwd=folder,
    )  # fmt: skip
    found = json.loads(report.read_text()) if report.exists() else {}
    return Recorded(done.returncode, done.stdout, done.stderr.decode(), output, found)


def torch_command(
    script: Path, root: Path, *, workers: int, batch: int, epochs: int = 2, shuffle: bool = True,
    save: str = "", context: str = "",
) -> list[object]:  # fmt: skip
    """Trains, as far as a loader can tell, on a folder of PNG files."""
    script.write_text(TORCH)
    words = (root, workers, batch, epochs, "yes" if shuffle else "no", save, context)
    return [sys.executable, script, *words]
