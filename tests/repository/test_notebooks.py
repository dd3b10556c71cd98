"""The notebooks: cells run from top to bottom, in a folder of their own, and what is kept of output is text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from documents.running import Reader

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


def code_of(notebook: Path) -> str:
    """The cells as one program; `!command` becomes a shell's."""
    cells = json.loads(notebook.read_text())["cells"]
    program = ["import subprocess as _subprocess"]
    for cell in cells:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            program += [
                f"_subprocess.run({line[1:]!r}, shell=True, check=True)"
                if line[:1] == "!"
                else line
                for line in lines
            ]
    return "\n".join(program)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    reader = Reader(notebook, tmp_path)  # for its commands and environment
    work = tmp_path / "notebook"
    work.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", code_of(notebook)], check=False, capture_output=True, text=True,
        cwd=work, env=reader.environment | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_three_notebooks_are_there_with_what_they_printed_and_no_folder_of_the_machine():
    assert [path.stem for path in NOTEBOOKS] == ["bottleneck", "images", "tokens"]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        printed = [output for cell in cells for output in cell.get("outputs", ())]
        assert printed, path
        assert not [output for output in printed if output["output_type"] == "error"], path
        assert "/tmp/" not in path.read_text(), path
        assert "\\u001b" not in path.read_text(), path
