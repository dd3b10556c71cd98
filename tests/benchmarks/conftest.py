"""Makes `benchmarks`, which is no installed package, importable."""

import os
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


class Mark:
    """What a program is started with, so that all that it starts is known by it, daemons and orphans too."""

    def __init__(self):
        self._value = uuid.uuid4().hex
        self.environment = {**os.environ, "HEADRACE_TEST_MARK": self._value}

    def living(self):
        """Processes that carry it."""
        pids = set()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._value.encode() in environ.read_bytes():
                    pids.add(int(environ.parent.name))
            except OSError:
                continue
        return pids


@pytest.fixture
def mark():
    """A mark of this test's own."""
    return Mark()
