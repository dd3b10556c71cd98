"""`headrace run`, `record`, `mount`, `unmount`: programs as they are, and a store as a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from headrace.base.text import bytes_of, count_text, printable
from headrace.cli import exit_codes
from headrace.cli.options import JsonOutput, QuietEnd, ReportFile, StorageOptions, not_started
from headrace.cli.printing import log_to_stderr, write_json
from headrace.cli.simulate import SimulateOption

if TYPE_CHECKING:
    from headrace.insight.record.recording import Recording
    from headrace.posix.mount import MountedStore


def run(
    command: list[str] = Argument(..., metavar="COMMAND [ARGUMENT]...", help="What to run."),
    *,
    root: list[str] | None = Option(
        None,
        metavar="DIR",
        help="Folder whose files are served.",
        show_default="those in the arguments",
    ),
    order: str | None = Option(
        None, metavar="FILE", help="Paths, one a line, as the program will open them."
    ),
    seed: int | None = Option(
        None, help="It opens all files in headrace's order of this seed.", metavar="SEED"
    ),
    record_order: str | None = Option(None, metavar="FILE", help="Write the order of its opens."),
    immutable: bool = Option(
        False, "--immutable", help="Nothing below the roots changes: do not look at originals."
    ),
    simulate: SimulateOption = None,
    simulate_only: bool = Option(
        False, "--simulate-only", help="With --simulate: nothing is served."
    ),
    report: ReportFile = None,
    quiet: QuietEnd = False,
) -> int:
    """Run a program as it is; files that it opens come from memory where they can."""
    from headrace.posix.launch import ProgramOptions, end_like, find_program, launch

    if simulate_only and simulate is None:
        raise typer.BadParameter("--simulate-only needs --simulate NAME")
    roots = root or _folders_of(command)
    if not roots:
        try:
            find_program(command[0])
        except (FileNotFoundError, PermissionError) as e:
            return not_started(e)
        raise typer.BadParameter("name the folder whose files are served: --root DIR")
    options = ProgramOptions(
        roots=roots, order=order, seed=seed, record_order=record_order, immutable=immutable,
        simulate=simulate, plane=not simulate_only,
    )  # fmt: skip
    try:
        ended_run = launch(command, options)
    except (FileNotFoundError, PermissionError) as e:
        return not_started(e)
    if report is not None:
        write_json(report, ended_run.document())
    if not quiet and ended_run.opens:  # else it was said before that nothing is seen
        print(f"headrace run: {ended_run.line()}", file=sys.stderr)
    end_like(ended_run.ended)
    return ended_run.ended.status


def _folders_of(command: list[str]) -> list[str]:
    """Folders that the arguments name: `DIR`, `--data=DIR`."""
    words = [word.rpartition("=")[2] for word in command[1:]]
    return [word for word in words if Path(word).is_dir() and Path(word).resolve() != Path("/")]


def record(
    command: list[str] | None = Argument(
        None, metavar="COMMAND [ARGUMENT]...", help="What to run."
    ),
    *,
    output: str = Option(
        "job.yaml", "--output", "-o", metavar="FILE.yaml", help="The workload to write."
    ),
    root: list[str] | None = Option(
        None, metavar="DIR", help="Folder of the data set.", show_default="it is found"
    ),
    finish: str | None = Option(
        None, metavar="DIR", help="Finish a recording that was cut off (FILE.yaml.part)."
    ),
    traces: list[str] | None = Option(
        None,
        "--from",
        metavar="PATH",
        help="Instead of a command: DFTracer's traces (*.pfw, *.pfw.gz) or Darshan's logs.",
    ),
    limit: str = Option("1G", metavar="SIZE", help="What each process may log, at most."),
    keep: bool = Option(False, "--keep", help="Leave the logs in FILE.yaml.part."),
    overwrite: bool = Option(False, "--overwrite", help="Replace a workload that is there."),
    report: ReportFile = None,
    quiet: QuietEnd = False,
) -> int:
    """Run a program as it is, and write its reads as a workload: files, sizes, order, step times.

    Nothing about the program changes. `headrace bench run --workload FILE.yaml` does the same reads on
    other storage, `headrace whatif FILE.yaml` predicts other machines. `--from` makes the same of what
    DFTracer or Darshan wrote about a job.
    """
    from headrace.insight.record.recording import RecordOptions, import_recording
    from headrace.insight.record.recording import finish as finish_part
    from headrace.insight.record.recording import record as record_command
    from headrace.posix.launch import end_like

    if [bool(command), bool(finish), bool(traces)].count(True) != 1:
        raise typer.BadParameter("give a command to record: headrace record -o job.yaml -- COMMAND")
    options = RecordOptions(
        output=Path(output), roots=root or (), log_bytes=bytes_of(limit), keep=keep,
        overwrite=overwrite,
    )  # fmt: skip
    try:
        if traces:
            done = import_recording([Path(path) for path in traces], options)
        elif finish is not None:
            done = finish_part(Path(finish), options)
        else:
            done = record_command(command or [], options)
    except (FileNotFoundError, PermissionError) as e:
        return not_started(e)
    _tell_recorded(done, report, quiet=quiet)
    ended = done.run.ended
    if ended is not None:
        end_like(ended)
    status = ended.status if ended is not None else exit_codes.OK
    return status or (exit_codes.OK if done.job is not None else exit_codes.STORE_ERROR)


def _tell_recorded(done: Recording, report: str | None, *, quiet: bool) -> None:
    """What came of it, on stderr: stdout is the program's."""
    from headrace.insight.record.recording import document_of, lines_of

    if report is not None:
        write_json(report, document_of(done))
    if done.why is not None and not done.run.unseen:
        print(f"headrace record: {printable(str(done.why))}", file=sys.stderr)
    lines = [] if quiet else list(lines_of(done))
    if lines:
        print("headrace record:", file=sys.stderr)
        for line in lines:
            print(f"  {printable(line)}", file=sys.stderr)


def mount(
    store: str = Argument(..., help="A store, or a source that can be opened directly."),
    folder: str = Argument(..., metavar="DIR", help="An empty folder."),
    *,
    foreground: bool = Option(False, "--foreground", "-f", help="Stay here, and log to stderr."),
    allow_other: bool = Option(False, "--allow-other", help="Let other users look in."),
    cache: str = Option("64M", help="Memory for samples that were read last.", metavar="SIZE"),
    check_up_to: str = Option(
        "1G", "--check-up-to", help="Larger samples are delivered unchecked.", metavar="SIZE"
    ),
    timeout: int = Option(
        120,
        help="Seconds after which the kernel ends a mount that hangs.",
        min=1,
        metavar="SECONDS",
    ),
    log: str | None = Option(None, help="File for the log.", metavar="FILE"),
    storage: StorageOptions,
    output: JsonOutput,
) -> None:
    """Show a store as a read-only folder, until it is unmounted."""
    from headrace.posix.mount import MountOptions, serve
    from headrace.posix.mount import mount as mount_store

    options = MountOptions(
        allow_other=allow_other, kept_bytes=bytes_of(cache), check_bytes_max=bytes_of(check_up_to),
        timeout_s=timeout, log=None if log is None else str(Path(log).absolute()),
        storage_options=storage,
    )  # fmt: skip

    def announce(state: MountedStore) -> None:
        output.result(
            {"mount": state},
            f"{state.folder} shows the {count_text(state.samples)} samples of {state.store} "
            f"(process {state.pid})",
        )
        sys.stdout.flush()

    if not foreground:
        announce(mount_store(store, folder, options))
        return
    log_to_stderr()
    serve(store, folder, options, announce)


def unmount(
    folder: str = Argument(..., metavar="DIR", help="Where a store is mounted."),
    *,
    lazy: bool = Option(False, "--lazy", help="Even though files in it are in use."),
    output: JsonOutput,
) -> None:
    """Take a mounted store away, also one whose process was killed."""
    from headrace.posix.mount import unmount as unmount_store

    path = unmount_store(folder, lazy=lazy)
    output.result({"folder": path, "mounted": False}, f"{path} is unmounted")
