"""Hostile hosts at our target, hostile targets at our host: what each mistake must lead to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fabric.faults import tally

if TYPE_CHECKING:
    from fabric.conftest import Exported


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tally.INJECTED:
        terminalreporter.section("faults of the fabric")
        for line in tally.lines():
            terminalreporter.write_line(line)


@pytest.fixture
def target(exported: Exported) -> Exported:
    """A target that hosts may not harm."""
    return exported
