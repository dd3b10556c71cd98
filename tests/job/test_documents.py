"""The how-to page's commands run as they stand, on one machine."""

import os
import subprocess
import sys

from tests_shared import ROOT, blocks, write_photos

PAGE = ROOT / "docs/howto/global-store.md"
TRAIN = """
import headrace as hr
with hr.open("headrace://job") as store, hr.open("photos") as source:
    for mine, theirs in zip(hr.loader(store, 8), hr.loader(source, 8), strict=True):
        assert [bytes(a) for a in mine] == [bytes(b) for b in theirs]
print("trained")
"""


def test_the_commands_for_plain_processes_run(tmp_path):
    write_photos(tmp_path / "photos")
    (tmp_path / "train.py").write_text(TRAIN)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "headrace").write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "from headrace.cli import main; main()" "$@"\n'
    )
    (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (script,) = blocks(PAGE, "bash")
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=100,
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "trained" in ended.stdout
    assert "node 1 of 2" in ended.stderr
    assert not (tmp_path / "meet").exists()
    assert not list(tmp_path.glob("headrace-*"))
