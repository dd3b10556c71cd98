"""Our target as users run it: `headrace export` in a process of its own, confined."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests_shared import free_ports

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

__all__ = ["Exporting", "exporting"]


class Exporting:
    """A running export, always on the same port.

    Args:
        arguments: of the command.
    """

    def __init__(self, *arguments: str | os.PathLike[str]) -> None:
        self.port = free_ports(1)[0]
        self._arguments = [str(argument) for argument in arguments]
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        program = [sys.executable, "-c", "from headrace.cli import main; main()"]
        listen = ["--listen", f"127.0.0.1:{self.port}", "--json"]
        self.process = subprocess.Popen(
            [*program, "export", *self._arguments, *listen], stdout=subprocess.PIPE, text=True
        )
        text = ""
        for line in self.process.stdout or ():
            text += line
            if line == "}\n":
                break
        self.told: dict[str, Any] = json.loads(text)["export"]
        self.nqn: str = self.told["nqn"]

    def kill(self) -> None:
        """As a crash would."""
        self.process.kill()
        self.process.communicate()

    def close(self) -> int:
        """Ends it in order; its exit status."""
        self.process.terminate()
        self.process.communicate(timeout=20)
        return self.process.returncode


@contextlib.contextmanager
def exporting(*arguments: str | os.PathLike[str]) -> Iterator[Exporting]:
    """While it runs; it must end well."""
    running = Exporting(*arguments)
    try:
        yield running
    except BaseException:
        running.kill()
        raise
    assert running.close() == 0
