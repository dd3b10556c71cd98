"""Recording: runs a program with the library that logs what it reads and changes nothing.

Each process of the run leaves a file in the run's folder (`native/record/log_layout.h`), which holds what
it did however it ended. `run.json` says what was run, and at the end how that ended: where the latter is
missing, the recording itself was cut off.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.base.documents import DocumentKind
from headrace.errors import RecordError
from headrace.posix.launch import (
    ProgramEnd,
    find_program,
    preloading,
    run_program,
    why_not_loaded,
    why_unseen,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RUN_FILE: Final = "run.json"
RUN: Final = DocumentKind(
    name="what a recording left",
    version=2,
    unchecked=1,
    error=RecordError,
    next_step="Give the folder NAME.yaml.part that lies beside the output.",
    marks={"kind": "headrace record"},
)
TRACE_FOLDER: Final = "trace"
"""Where headrace's own loaders leave their exact figures."""

_VARIABLE: Final = "HEADRACE_RECORD"
_SLOTS_VARIABLE: Final = "HEADRACE_RECORD_SLOTS"
_SLOT_BYTES: Final = 40


@dataclass(slots=True)
class RecordedRun:
    """One recorded run.

    Attributes:
        unseen: why nothing could be seen; '' where it could.
        process: that records.
        ended: None: the recording was cut off before.
    """

    command: list[str]
    folder: str
    began_unix_s: float = 0.0
    working_folder: str = ""
    processors: int = 0
    process: int = 0
    unseen: str = ""
    ended: ProgramEnd | None = None
    wall_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Put `run.json` in its place."""
        new = folder / (RUN_FILE + ".new")
        new.write_bytes(RUN.encode(asdict(self), indent=2))
        new.replace(folder / RUN_FILE)


def record_program(command: Sequence[str], folder: Path, log_bytes: int) -> RecordedRun:
    """Run a command to its end, and log what it reads, at most `log_bytes` for each process.

    Raises:
        FileNotFoundError: there is no such program.
        PermissionError: it cannot be run.
        FileExistsError: the folder is there.
    """
    program = find_program(command[0])
    folder.mkdir(mode=0o700, parents=True)
    run = RecordedRun(
        list(command), str(folder), time.time(), os.getcwd(), len(os.sched_getaffinity(0)),
        os.getpid(),
    )  # fmt: skip
    why = why_unseen(program) or why_not_loaded("record")
    if not why and len(os.fsencode(folder.absolute())) > 480:
        why = f"{folder} is too long a name for a log"
    if why:
        run.unseen = why
        sys.stderr.write(
            f"headrace record: {why}: what it reads cannot be seen; it runs all the same.\n"
        )
    run.write(folder)
    environment = dict(os.environ) if why else _environment(folder, log_bytes)
    began = time.monotonic()
    try:
        run.ended = run_program(program, command, environment)
    finally:
        run.wall_s = time.monotonic() - began
        run.write(folder)
    return run


def _environment(folder: Path, log_bytes: int) -> dict[str, str]:
    environment = preloading(os.environ, "record")
    environment[_VARIABLE] = str(folder.absolute())
    environment[_SLOTS_VARIABLE] = str(max(1024, log_bytes // _SLOT_BYTES))
    # What headrace's own loaders open through a ring of the kernel passes by every library, and what they
    # have read ahead nobody opens again.
    environment.setdefault("HEADRACE_ENGINE", "threads")
    environment.setdefault("HEADRACE_AHEAD", "0")
    environment.setdefault("HEADRACE_TRACE", str(folder.absolute() / TRACE_FOLDER))
    return environment
