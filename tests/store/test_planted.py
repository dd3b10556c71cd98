"""What is no file of ours, planted at every name that a command opens: see `planted.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(*words: str) -> dict[str, Any]:
    program = Path(__file__).with_name("planted.py")
    ended = subprocess.run(
        [sys.executable, program, *words], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return dict(json.loads(ended.stdout))


def check(found: dict[str, Any], attempts: int) -> None:
    assert found["bad"] == []
    assert found["attempts"] >= attempts
    assert found["refused"] + found["harmless"] == found["attempts"]
    assert found["refused"]


def test_a_link_or_a_fifo_in_a_store_changes_no_victim_and_hangs_nothing() -> None:
    check(run("--kinds", "link,fifo", "--commands", "info,repair", "--users", "0"), 12)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users and makes device nodes")
def test_whatever_is_planted_wherever_changes_no_victim_and_hangs_nothing() -> None:
    check(run(), 500)
