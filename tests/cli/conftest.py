"""Runs the command line: in this process, or as the installed program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        return json.loads(self.out)


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `headrace` with the given arguments in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: object) -> Ended:
        from headrace.cli.app import app

        result = CliRunner().invoke(app, [str(a) for a in arguments])
        return Ended(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture
def program() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Runs the program `headrace` in a process of its own."""

    def start(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", "from headrace.cli import main; main()"]
        environment = os.environ | options.pop("env", {})
        return subprocess.run(
            [*command, *(str(a) for a in arguments)],
            check=False,
            timeout=60,
            env=environment,
            **({"capture_output": True} | options),
        )

    return start
