"""The page about `headrace ab`: its commands run on its script, over real images."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests_shared import ROOT, blocks, write_real_images

PAGE = ROOT / "docs/howto/ab.md"
COMMANDS = [line for block in blocks(PAGE, "sh") for line in block.splitlines() if line]
PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()"]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_page_run_on_its_script(line, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text("".join(blocks(PAGE, "python")))
    write_real_images(tmp_path / "photos", per_class=8)
    name, word, *words = shlex.split(line)
    assert (name, word) == ("headrace", "ab")
    ended = subprocess.run(
        [*PROGRAM, "ab", "-n", "1", "--json", *words],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=200,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["same_work"]
    assert document["runs"][0]["files"] == 24
    assert document["roots"] == [str(tmp_path / "photos")]
    assert document["treatment"] == ("drop-in" if "--drop-in" in words else "run")


def test_the_page_names_every_option():
    said = subprocess.run(
        [*PROGRAM, "ab", "--help"], capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
    ).stdout  # fmt: skip
    options = {word.strip(",") for word in said.split() if word.startswith("--")} - {"--help", "--"}
    options = {part for word in options for part in word.split("/")}
    assert len(options) > 12
    page = PAGE.read_text() + (ROOT / "docs/reference/cli.md").read_text()
    assert {option for option in options if option not in page} <= {"--json", "--quiet"}
