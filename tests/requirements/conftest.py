"""The archive and the wheel, built once for all that installs them; clients that are patient."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests_shared import ROOT


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node daemon that waits for a processor is not lost: clients of this process wait for it."""
    for name in ("link.ALIVE_S", "reads.ALIVE_S", "reads.FIRST_S"):
        monkeypatch.setattr(f"headrace.node.{name}", 60.0)


@pytest.fixture(scope="package")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the repaired wheel."""
    pytest.importorskip("auditwheel", reason="the group `wheel` is not installed: make wheel")
    folder = tmp_path_factory.mktemp("wheel")
    python = [sys.executable, "-m"]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for words in (
        ["build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        ["auditwheel", "repair", "--wheel-dir", str(folder / "repaired")],
    ):
        wheels = [str(w) for w in folder.glob("*.whl")] if words[0] == "auditwheel" else []
        subprocess.run([*python, *words, *wheels], check=True, env={"PATH": path}, timeout=1800)
    return folder
