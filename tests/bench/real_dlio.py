"""The real DLIO, from PyPI, in an environment of its own: made once, in build/dlio.

DLIO asks for TensorFlow, torch and DALI at fixed old versions, and is installed without them: it runs with the
torch and the TensorFlow that are here. Its MPI is a wheel; one rank needs no launcher.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FRAMEWORKS = REPOSITORY / ".venv-frameworks"

# The last release; mpich is the MPI library that mpi4py looks for.
_ALONE = ("dlio-benchmark==2.0.0",)
_WITH_WHAT_THEY_NEED = (
    "hydra-core==1.3.2", "pydftracer==1.0.2", "mpi4py==4.1.2", "mpich==5.0.2", "pytest", "pytest-timeout",
)  # fmt: skip


class RealDlio:
    """Runs `dlio_benchmark`.

    Attributes:
        folder: of the environment; made where it is not there yet.
    """

    def __init__(self, folder=REPOSITORY / "build/dlio"):
        self.folder = Path(folder)
        done = self.folder / "done"
        if not done.exists():
            self._make()
            done.touch()

    def _make(self):
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=True)
        for more, packages in ((["--no-deps"], _ALONE), ([], _WITH_WHAT_THEY_NEED)):
            pip = [self.folder / "bin/python", "-m", "pip", "-qq", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", *more, *packages], check=True, stdout=sys.stderr)
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        below = [path for path in sys.path if path.endswith("site-packages")]
        below += map(str, (FRAMEWORKS / "lib" / python).glob("site-packages"))
        site = self.folder / "lib" / python / "site-packages"
        # Plain paths: what is editable in them stays out.
        (site / "zz_below.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(below)))
        # DLIO calls DALI's tool, which writes what only DALI reads.
        tool = self.folder / "bin/tfrecord2idx"
        tool.write_text('#!/bin/sh\n: >"$2"\n')
        tool.chmod(0o755)

    def run(self, words, timeout_s=200):
        """One run; its output. Fails the test when DLIO fails."""
        environ = {
            key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
        }
        environ |= {
            "PATH": f"{self.folder / 'bin'}:{environ['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "-1",
        }  # fmt: skip
        ended = subprocess.run(
            [self.folder / "bin/dlio_benchmark", *words], env=environ, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
        message = ended.stdout + ended.stderr
        assert ended.returncode == 0, message[-4000:]
        return message
