"""The real DLIO, from its own virtual environment, which is made here.

DLIO's package asks for gigabytes (TensorFlow, torch, torchvision, DALI); without its dependencies and with
those few that it imports it runs. torch and TensorFlow are found in the environments that the project has.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

DLIO = "dlio-benchmark==2.0.0"
_DEPENDENCIES = (
    "hydra-core==1.3.2", "omegaconf==2.3.1", "pydftracer==1.0.2", "mpi4py==4.1.2", "mpich==5.0.2",
    "numpy==2.4.6", "pandas", "h5py", "pillow", "psutil",
)  # fmt: skip
_DRIVER = Path(__file__).with_name("dlio_run.py")
_TIMEOUT_S = 1200.0


class PeerError(Exception):
    """DLIO cannot be installed, or it failed; the text says why."""


@dataclass(frozen=True, slots=True)
class Dlio:
    """DLIO, ready to run."""

    python: Path

    def run(self, words: Sequence[str], *, without_debug_line: bool = False) -> dict[str, Any]:
        """Runs its command line.

        Returns:
            `epochs_s`, `steps`, and of generation `generate_s` and `generate_synced_s`.

        Raises:
            PeerError: it failed.
        """
        with tempfile.TemporaryDirectory(prefix="headrace-dlio-") as folder:
            result = Path(folder, "result.json")
            command = [
                self.python, _DRIVER, result, *(["--without-debug-line"] if without_debug_line else []),
                "workload=default", "++workload.workflow.evaluation=False", *words,
                f"++hydra.run.dir={folder}/out", f"++workload.output.folder={folder}/out",
            ]  # fmt: skip
            _run(command)
            found: dict[str, Any] = json.loads(result.read_text())
            return found

    def read(
        self,
        data: Path,
        form: str,
        files: int,
        *,
        batch: int,
        threads: int,
        epochs: int,
        fixed: bool,
    ) -> list[float]:
        """Seconds of each epoch over a data set, without computing."""
        words = [
            *_data(data, form, files), "++workload.workflow.generate_data=False",
            "++workload.workflow.train=True", f"++workload.reader.batch_size={batch}",
            f"++workload.reader.read_threads={threads}", f"++workload.train.epochs={epochs}",
            "++workload.train.computation_time=0", "++workload.reader.data_loader=pytorch",
            "++workload.reader.sample_shuffle=seed",
        ]  # fmt: skip
        found = self.run(words, without_debug_line=fixed)
        if any(steps != files // batch for steps in found["steps"]):
            raise PeerError(f"DLIO made {found['steps']} steps, expected {files // batch}")
        return [float(seconds) for seconds in found["epochs_s"]]

    def generate(self, data: Path, form: str, files: int, record_length: int) -> dict[str, float]:
        """Writes a data set; `generate_s`, and `generate_synced_s` with the disk's share."""
        words = [
            *_data(data, form, files), "++workload.workflow.generate_data=True",
            "++workload.workflow.train=False", f"++workload.dataset.record_length={record_length}",
        ]  # fmt: skip
        found = self.run(words)
        return {name: float(found[name]) for name in ("generate_s", "generate_synced_s")}


def _data(data: Path, form: str, files: int) -> list[str]:
    return [
        f"++workload.dataset.data_folder={data}", f"++workload.dataset.format={form}",
        f"++workload.dataset.num_files_train={files}", "++workload.dataset.num_files_eval=0",
        "++workload.dataset.num_subfolders_train=0", "++workload.dataset.num_subfolders_eval=0",
    ]  # fmt: skip


def ensure(folder: Path, frameworks: Path) -> Dlio:
    """Installs DLIO below `folder`, once.

    Args:
        folder: for the environment.
        frameworks: the environment that has TensorFlow, which DLIO imports whatever it is to do.

    Raises:
        PeerError: it cannot be installed.
    """
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        _run([sys.executable, "-m", "venv", "--clear", folder])
        pip = [python, "-m", "pip", "-qq", "--disable-pip-version-check", "install"]
        _run([*pip, "--no-deps", DLIO])
        _run([*pip, *_DEPENDENCIES])
        (folder / "ready").touch()
    below = [next(iter(frameworks.glob("lib/python3*/site-packages")), None),
             Path(sysconfig.get_path("purelib"))]  # fmt: skip
    own = next(folder.glob("lib/python3*/site-packages"))
    (own / "zz_below.pth").write_text(
        "".join(f"import site; site.addsitedir({str(path)!r})\n" for path in below if path)
    )
    _run([python, "-c", "import dlio_benchmark.main, torch"])
    return Dlio(python)


def _run(command: Sequence[str | Path]) -> None:
    try:
        subprocess.run(
            command, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        last = (error.stdout or "").strip().splitlines()[-1:]
        raise PeerError(f"{' '.join(map(str, command[:4]))}: {' '.join(last)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(str(error)) from error
