"""Recording: from a command to a workload's YAML and its sidecar.

What is recorded lies in a folder beside the output (`job.yaml.part`) until the two files are written. A
recording that was cut off leaves that folder, and `finish` makes of it what can be made.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import RecordError
from headrace.insight.record.job import job_of
from headrace.insight.record.log import read_log
from headrace.insight.record.rhythm import exact_rhythm
from headrace.insight.record.text import workload_text
from headrace.posix.launch import (
    RUN,
    RUN_FILE,
    TRACE_FOLDER,
    ProgramEnd,
    RecordedRun,
    record_program,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.insight.record.job import RecordedJob

_LOG_BYTES: Final = 1 << 30
_NUMBER_MAX: Final = 1 << 32
_SECONDS_MAX: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """How a command is recorded.

    Attributes:
        roots: folders of the data set; empty: it is found.
        log_bytes: what each process may log, at most.
    """

    output: Path
    roots: Sequence[str] = ()
    log_bytes: int = _LOG_BYTES
    keep: bool = False
    overwrite: bool = False

    @property
    def part(self) -> Path:
        """The folder of the logs."""
        return self.output.with_name(self.output.name + ".part")


@dataclass(frozen=True, slots=True)
class Recording:
    """What came of it.

    Attributes:
        job: None: nothing that could be described was read; `why` says so.
        cut_off: the recording did not see the program's end.
    """

    run: RecordedRun
    job: RecordedJob | None
    output: Path
    sidecar: Path | None
    cut_off: bool = False
    why: RecordError | None = None


def record(command: Sequence[str], options: RecordOptions) -> Recording:
    """Run a command to its end, and write what it read.

    Raises:
        FileNotFoundError: there is no such program.
        PermissionError: it cannot be run.
        RecordError: an output is there already.
        OSError: the output cannot be written.
    """
    output, part = options.output, options.part
    if output.suffix not in (".yaml", ".yml"):
        raise ValueError(f"the output is {output}, expected a name that ends with .yaml")
    if not output.parent.is_dir():
        raise RecordError(f"{output.parent}: there is no such folder.", path=str(output.parent))
    _refuse_to_replace(options)
    if part.exists():
        raise RecordError(
            f"{part}: an earlier recording left its logs there.",
            path=str(part),
            next_step=f"Finish it: headrace record --finish {part} -o {output}, or remove the folder.",
        )
    run = record_program(command, part, options.log_bytes)
    return _write(run, options, part)


def finish(part: Path, options: RecordOptions) -> Recording:
    """Make of the folder that a recording left when it was cut off what can be made.

    Raises:
        RecordError: it is none, or is still going on, or an output is there already.
    """
    run = _read_run(part)
    _refuse_to_replace(options)
    return _write(run, options, part, finishing=True)


def _refuse_to_replace(options: RecordOptions) -> None:
    if options.output.exists() and not options.overwrite:
        raise RecordError(
            f"{options.output} is there already.",
            path=str(options.output),
            next_step="Choose another name, or pass --overwrite.",
        )


def _write(
    run: RecordedRun, options: RecordOptions, part: Path, *, finishing: bool = False
) -> Recording:
    """What can be said of the logs in a folder; those that cannot be read are noted."""
    logs, cut_off = [], finishing and run.ended is None
    for path in sorted(part.glob("log-*")):
        try:
            logs.append(read_log(path))
        except RecordError as e:
            run.notes.append(f"a process's log is left out: {e.message}")
    exact, wrong = exact_rhythm(part / TRACE_FOLDER)
    run.notes += [wrong] if wrong else []
    try:
        job = job_of(
            logs, command=run.command, cwd=run.working_folder or "/", roots=options.roots,
            processors=run.processors, wall_s=run.wall_s, exact=exact,
        )  # fmt: skip
    except RecordError as e:
        if not options.keep and not finishing:
            shutil.rmtree(part, ignore_errors=True)
        return Recording(run, None, options.output, None, cut_off, e)
    sidecar = options.output.with_name(f"{options.output.stem}.requests.npz")
    job.recorded.write(sidecar)
    text = workload_text(job, options.output.stem, sidecar.name)
    new = options.output.with_name(f".{options.output.name}.new")
    new.write_text(text, encoding="utf-8", errors="backslashreplace")
    new.replace(options.output)
    if not options.keep:
        shutil.rmtree(part, ignore_errors=True)
    return Recording(run, job, options.output, sidecar, cut_off)


def _read_run(part: Path) -> RecordedRun:
    path = part / RUN_FILE
    try:
        with path.open("rb") as f:
            data = f.read(RUN.bytes_max + 1)
    except OSError as e:
        raise RecordError(
            f"{part}: is no folder that a recording left: {e}.",
            path=str(part),
            next_step=RUN.next_step,
        ) from e
    fields = RUN.decode(data, str(path))
    ended = fields.inner("ended") if fields.value("ended") is not None else None
    process = fields.integer("process", 0, _NUMBER_MAX)
    command = b""
    with suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    if ended is None and b"record" in command.split(b"\0"):
        raise RecordError(
            f"{part}: process {process} is still recording there.",
            path=str(part),
            next_step="Wait until it has ended.",
        )
    run = RecordedRun(
        list(fields.texts("command")), str(part), fields.number("began_unix_s", 0, _SECONDS_MAX)
    )
    run.working_folder = fields.text("working_folder")
    run.processors = max(1, fields.integer("processors", 0, _NUMBER_MAX))
    run.wall_s = fields.number("wall_s", 0, _SECONDS_MAX)
    if ended is not None:
        run.ended = ProgramEnd(
            ended.integer("status", 0, _NUMBER_MAX), ended.integer("signal", 0, _NUMBER_MAX)
        )
    return run
