"""`headrace cluster`: jobs asked for in GPUs (run, batch), the queue, and what becomes of jobs (status)."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from headrace.cli import exit_codes
from headrace.cli.options import CommandGroup, Group, Json, JsonOutput, Quiet, QuietOutput
from headrace.cli.printing import Output
from headrace.cluster.request import JOB_OPTIONS, NOT_IN_THE_FOREGROUND, JobOption, OptionKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.cli.cluster_submit import Asked
    from headrace.cluster.executor import Executor, JobStatus

From = Annotated[
    Path | None,
    Option(
        "--from",
        metavar="FILE",
        help="A saved snapshot instead of the live cluster (`queue --save`).",
    ),
]
Where = Annotated[
    str | None,
    Option(
        "--executor",
        metavar="NAME",
        help="slurm, ray, kubernetes or local.",
        show_default="slurm where sbatch is; ray by RAY_API_SERVER_ADDRESS",
    ),
]


def _asked(
    *, dry_run: bool, executor: str | None, site: Path | None, source: Path | None, **values: Any
) -> Asked:
    from headrace.cli.cluster_submit import Asked

    return Asked(values, executor, site, source, dry_run)


def _asking(*without: str) -> Group:
    """Options for what can be asked of a cluster, made of its table, without some fields."""
    asks = {option.field: _option(option) for option in JOB_OPTIONS if option.field not in without}
    dry_run = Option(
        "--dry-run", help="Print what would be submitted, byte for byte; submit nothing."
    )
    site = Option(
        "--site", metavar="FILE", help="The site's file, as `headrace cluster init` writes it."
    )
    return Group(
        _asked, **asks, dry_run=Annotated[bool, dry_run], executor=Where,
        site=Annotated[Path | None, site], source=From,
    )  # fmt: skip


def _option(option: JobOption) -> Any:
    kind: Any = {OptionKind.FLAG: bool, OptionKind.TEXTS: list[str] | None}.get(
        option.kind, str | None
    )
    metavar = None if option.kind is OptionKind.FLAG else option.metavar or option.kind.value
    shown = Option(*option.flags, help=option.help, metavar=metavar, show_default=False)
    return Annotated[kind, shown]


_DryJson = Annotated[bool, Option("--json", help="With --dry-run: as one JSON document.")]
_OURS_END = {"allow_interspersed_args": False}
"""What follows the command or script is its own."""

cluster_app = CommandGroup("Run training on a Slurm cluster, or here in the same words.")


@cluster_app.command("run", context_settings=_OURS_END)
def cluster_run(
    command: list[str] | None = Argument(
        None, metavar="[COMMAND ...]", help="What to run.", show_default="a shell"
    ),
    *,
    asked: Annotated[Any, _asking(*NOT_IN_THE_FOREGROUND)],
    output: Annotated[Output, Group(Output, quiet=Quiet, as_json=_DryJson)],
) -> int:
    """Run a command in the foreground, or a shell, on the nodes that are asked for, and end as it ends.

    The command runs once, on the first node; `srun` in it starts one task for each GPU.
    """
    from headrace.cli.cluster_submit import run_command

    return run_command(asked, command or [], output)


@cluster_app.command("batch", context_settings=_OURS_END)
def cluster_batch(
    script: str = Argument(..., help="A script; - for standard input."),
    arguments: list[str] | None = Argument(
        None, metavar="[ARGUMENTS ...]", help="For the script.", show_default=False
    ),
    *,
    asked: Annotated[Any, _asking()],
    output: Annotated[Output, Group(Output, quiet=Quiet, as_json=Json)],
) -> int:
    """Submit a script. It is sent byte for byte, with our directives after its own.

    Options of ours may stand in the script too: `#HEADRACE --gpus=8 --container=torch`.
    """
    from headrace.cli.cluster_submit import submit_script

    return submit_script(asked, script, arguments or [], output)


Texts = list[str] | None


@cluster_app.command("queue")
def queue(
    *,
    user: Texts = Option(
        None, "--user", "-u", help="Only this user's jobs; `me`: mine.", metavar="USER"
    ),
    node: Texts = Option(
        None, "--node", "-n", help="Only these nodes: gpu[01-04].", metavar="NODES"
    ),
    partition: Texts = Option(
        None, "--partition", "-p", help="Only this partition.", metavar="NAME"
    ),
    watch: float | None = Option(
        None, "--watch", "-w", help="Look again every so many seconds.", metavar="SECONDS"
    ),
    rows: int = Option(20, "--rows", help="At most so many lines of each kind."),
    everything: bool = Option(False, "--all", help="All lines."),
    save: Path | None = Option(
        None, "--save", help="Keep what was seen, for --from.", metavar="FILE"
    ),
    executor: Where = None,
    source: From = None,
    output: JsonOutput,
) -> int:
    """Show nodes, who has which GPUs, who waits for what and until when. `0·2·`: GPUs 0 and 2 are in use."""
    from headrace.cli.cluster_queue import show_queue
    from headrace.cluster.plan import cluster_snapshot

    if rows < 1:
        raise ValueError(f"--rows is {rows}, expected 1 or more")
    return show_queue(
        output, lambda: cluster_snapshot(executor, source, jobs=True), users=user or (), nodes=node or (),
        partitions=partition or (), watch=watch, rows=None if everything else rows, save=save,
    )  # fmt: skip


# -- the life of a job ---------------------------------------------------------------------------------


def _executor(executor: str | None) -> Executor:
    from headrace.cluster.executor import executor as executor_named

    return executor_named(executor)


RunsOn = Annotated[Any, Group(_executor, executor=Where)]
Jobs = Annotated[
    list[str], Argument(metavar="JOB...", help="Their numbers; 17_3 is one task of an array.")
]


_ENDED_SHOWN = 10


@cluster_app.command("status")
def cluster_status(
    jobs: list[str] | None = Argument(
        None,
        metavar="[JOB]...",
        help="Their numbers.",
        show_default=f"yours that are not over, and the last {_ENDED_SHOWN} that are",
    ),
    *,
    everything: bool = Option(
        False, "--all", help="All that are known, and a line for each task of an array."
    ),
    runs_on: RunsOn,
    output: JsonOutput,
) -> int:
    """Show how jobs are: waiting and why, running and where, completing, or how they ended.

    RAN: since they began last. FOLDER: of jobs of other folders than this. `--json` has all that are known.
    """
    known = runs_on.status(jobs or runs_on.own())
    return _show(output, known, runs_on, everything=everything, own=not jobs)


@cluster_app.command("logs")
def cluster_logs(
    job: str = Argument(..., help="A job, or one task of an array: 17_3."),
    *,
    follow: bool = Option(False, "--follow", "-f", help="Until the job is over."),
    lines: int | None = Option(None, "--lines", "-n", min=1, help="Only the last so many."),
    runs_on: RunsOn,
    output: JsonOutput,
) -> int:
    """Print what a job has printed."""
    pieces = runs_on.logs(job, follow=follow, lines=lines)
    if output.as_json:
        text = b"".join(pieces).decode(errors="replace")
        output.document({"job": job, "output": runs_on.one(job).output, "text": text})
        return exit_codes.OK
    with _job_goes_on():
        for piece in pieces:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    return exit_codes.OK


@cluster_app.command("cancel")
def cluster_cancel(
    jobs: Jobs,
    *,
    signal: str | None = Option(
        None, "--signal", "-s", metavar="NAME", help="Only send their scripts this signal, as USR1."
    ),
    runs_on: RunsOn,
    output: JsonOutput,
) -> int:
    """End jobs, or tasks of arrays, that wait or run. `headrace launch` lets its ranks save first."""
    runs_on.cancel(runs_on.known(jobs), None if signal is None else _signal_number(signal))
    return _show(output, runs_on.status(jobs), runs_on)


@cluster_app.command("wait")
def cluster_wait(
    jobs: Jobs,
    *,
    timeout_s: float | None = Option(
        None, min=0.0, help="At most so many seconds.", show_default="for ever", metavar="SECONDS"
    ),
    runs_on: RunsOn,
    output: QuietOutput,
) -> int:
    """Wait until jobs are over, and show how they ended. Ends with 1 unless all of them completed."""
    from headrace.cluster.executor import JobState

    runs_on.known(jobs)
    with _job_goes_on():
        output.remark(f"waiting for {', '.join(jobs)}")
        ended = runs_on.wait(jobs, timeout_s)
    code = _show(output, ended, runs_on)
    well = all(s.state is JobState.COMPLETED for known in ended.values() for s in known)
    return code if well else exit_codes.FINDING


@cluster_app.command("resubmit")
def cluster_resubmit(jobs: Jobs, *, runs_on: RunsOn, output: JsonOutput) -> int:
    """Submit jobs that are over once more as they were: script, options, arguments and folder.

    Of an array, all tasks or those that are named. Each is a new job with a number and a log of its own.
    """
    again = [{"job": runs_on.resubmit(job), "of": job} for job in jobs]
    output.result({"jobs": again}, *(f"Submitted batch job {new['job']}" for new in again))
    return exit_codes.OK


@contextlib.contextmanager
def _job_goes_on() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as e:
        e.add_note("the job goes on; headrace cluster cancel ends it")
        raise


def _signal_number(name: str) -> int:
    from signal import Signals

    known = {word: s for s in Signals for word in (s.name, s.name[3:], str(int(s)))}
    if name.upper() not in known:
        raise ValueError(f"--signal is {name!r}, expected a signal as USR1, TERM or 10")
    return known[name.upper()]


def _show(
    output: Output,
    statuses: Mapping[str, list[JobStatus]],
    runs_on: Executor,
    *,
    everything: bool = False,
    own: bool = False,
) -> int:
    """Lines of jobs, of an array's tasks that are alike one; with 1 if some are not known, an error if all.

    `own`: nobody named them, so of those that are over, unless it is `everything`, only the last.
    """
    from headrace.cli.cluster_queue import status_table
    from headrace.cluster.executor import JobState

    known = [status for job in dict.fromkeys(statuses) for status in statuses[job]]
    lost = [job for job, of_job in statuses.items() if not of_job]
    if lost and not known:
        runs_on.known(lost)
    known += map(runs_on.lost, lost)
    if output.as_json:
        output.document({"jobs": [_status_document(status.with_run()) for status in known]})
    elif known:
        earlier = set(_ended(statuses)[:-_ENDED_SHOWN] if own and not everything else ())
        shown = [s for s in known if s.job_id.partition("_")[0] not in earlier]
        output.console().print(status_table(shown, everything=everything, folders=own))
        if earlier:
            output.remark(f"{len(earlier):,} more ended before: headrace cluster status --all")
        for status in [status for status in shown if status.went_wrong][-1:]:
            job, log = status.job_id, f" ({status.output})" if status.output else ""
            output.remark(f"how {job} ended: headrace cluster logs {job} --lines 50{log}")
    else:
        output.remark("You have no jobs here.")
    return exit_codes.FINDING if any(s.state is JobState.UNKNOWN for s in known) else exit_codes.OK


def _ended(statuses: Mapping[str, list[JobStatus]]) -> list[str]:
    """Jobs that are over, by their ends."""
    over = [job for job, known in statuses.items() if known and all(s.state.is_over for s in known)]
    return sorted(over, key=lambda job: max(s.ended_s or 0.0 for s in statuses[job]))


def _status_document(status: JobStatus) -> dict[str, Any]:
    return {
        "job": status.job_id, "name": status.name, "state": str(status.state), "reason": status.reason,
        "why": status.why, "nodes": status.nodes, "exit_code": status.exit_code,
        "signal": status.signal, "restarts": status.restarts, "submitted_s": status.submitted_s,
        "started_s": status.started_s, "ended_s": status.ended_s, "output": status.output,
        "resumed": status.resumed, "folder": status.folder,
    }  # fmt: skip


@cluster_app.command("init")
def cluster_init(
    *,
    out: Path | None = Option(
        None,
        "--out",
        "-o",
        show_default="~/.config/headrace/site.yaml",
        help="Where to write; - for standard output.",
        metavar="FILE",
    ),
    ondemand: Path | None = Option(
        None, metavar="DIR", help="Write apps for Open OnDemand there, and no site's file."
    ),
    module: Path | None = Option(
        None, metavar="DIR", help="Write modulefiles there (Lmod, Environment Modules)."
    ),
    slurm: Path | None = Option(
        None, metavar="DIR", help="Write a prolog and epilog there, which tell agents of jobs."
    ),
    kubernetes: Path | None = Option(
        None, metavar="DIR", help="Write a kustomize folder and a pod's file for Kubernetes there."
    ),
    image: str = Option(
        "registry.example.org/headrace:latest", metavar="NAME:TAG", help="For --kubernetes."
    ),
    overwrite: bool = Option(False, "--overwrite", help="Replace files."),
    executor: Where = None,
    source: From = None,
    output: JsonOutput,
) -> int:
    """Write the site's file from what the cluster says it has, with comments. Most clusters need none."""
    from headrace.cluster import site_files as generated
    from headrace.cluster.plan import cluster_snapshot
    from headrace.cluster.site import find_site, own_site, site_text

    texts: list[tuple[Path | None, Mapping[str, str]]] = []
    if kubernetes is not None:
        texts.append((kubernetes, generated.kubernetes_files(image)))
    elif not (ondemand is module is slurm is None):
        facts = generated.site_facts(cluster_snapshot(executor, source), site_file=find_site())
        texts += [
            (ondemand, generated.ondemand_files(facts)), (module, generated.modulefiles(facts)),
            (slurm, generated.slurm_files(facts)),
        ]  # fmt: skip
    files: list[Path] = []
    for folder, named in texts:
        if folder is not None:
            files += generated.write_files(folder, named, overwrite=overwrite)
    if texts:
        output.result({"files": files}, f"wrote {', '.join(map(str, files))}")
        return exit_codes.OK
    text, path = site_text(cluster_snapshot(executor, source)), out or own_site()
    if str(path) == "-":
        output.result({"path": None, "text": text}, text.rstrip("\n"))
        return exit_codes.OK
    generated.write_files(path.parent, {path.name: text}, overwrite=overwrite)
    what = f"wrote {path}; each key in it may be changed or left out"
    output.result({"path": str(path), "text": text}, what)
    return exit_codes.OK
