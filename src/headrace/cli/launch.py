"""`headrace launch`: a training script on all nodes of the job, staged, watched and ended without a trace."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import exit_codes

if TYPE_CHECKING:
    from headrace.cluster.launch.options import LaunchOptions
    from headrace.cluster.launch.plan import LaunchPlan
    from headrace.cluster.launch.report import LaunchReport
    from headrace.cluster.place import JobPlace

__all__ = ["launch"]


def launch(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT.py [ARGUMENT]...",
            help="A script, `-m MODULE` (after --), or a program.",
        ),
    ],
    *,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="MIN-MAX", help="Go on with MIN nodes when others are lost. Default: requeue."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs in all. Default: all that the job has.")
    ] = None,
    framework: Annotated[
        str, typer.Option(help="What the ranks expect: torch, tensorflow, jax, mpi, plain.")
    ] = "torch",
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Processes per node. Default: one per GPU, or the job's tasks."),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="SRC", help="Copy this onto the nodes' disks: headrace://job."),
    ] = None,
    local: Annotated[
        str | None,
        typer.Option(help="Folder on the local disks. Default: Slurm's for the job, TMPDIR, /tmp."),
    ] = None,
    meet: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Seen by all nodes. Default: the current one."),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=2, help="Nodes that hold each staged sample.")
    ] = 1,
    daemon: Annotated[bool, typer.Option(help="A node daemon on each node.")] = True,
    agent: Annotated[bool, typer.Option(help="The telemetry agent on each node.")] = True,
    stop_before: Annotated[
        float, typer.Option(metavar="SECONDS", help="Save and leave so long before the time limit.")
    ] = 120.0,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time to save and leave after SIGTERM.")
    ] = 25.0,
    connect_wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the nodes.")
    ] = 120.0,
    stage_wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long staging may take to begin.")
    ] = 600.0,
    silence: Annotated[
        float, typer.Option(metavar="SECONDS", help="A node silent for so long is lost.")
    ] = 30.0,
    requeue: Annotated[
        bool,
        typer.Option(
            help="Start the job again after SIGUSR1, near its limit, or without a lost node."
        ),
    ] = True,
    manifest: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Of the run. Default: headrace-runs/JOB-RESTARTS.json."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, and why; start nothing.")
    ] = False,
    report: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the report as JSON (-: stdout)."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
) -> int:
    """Run a training script on all nodes of this job (Slurm's, or this machine), and leave nothing behind.

    Once, in the batch script: it starts a launcher on each node, stages, starts the ranks, hands signals on,
    has the job requeued in time, and ends exactly what it started.
    """
    from headrace.cluster.launch.options import LaunchOptions
    from headrace.cluster.launch.plan import lay_out
    from headrace.cluster.place import JobPlace

    options = LaunchOptions(
        framework=framework, gpus=gpus, ranks_per_node=ranks_per_node, stage=tuple(stage or ()),  # type: ignore[arg-type]
        nodes=_range(nodes), local=local, meet=meet, replicas=replicas, daemon=daemon, agent=agent,
        stop_before_s=stop_before, grace_s=grace, connect_s=connect_wait, stage_s=stage_wait,
        silence_s=silence, requeue=requeue, manifest=manifest,
    )  # fmt: skip
    place = JobPlace.here()
    plan = lay_out(place, options)
    if dry_run:
        return _dry_run(place, options, plan, command, report)
    return _run(place, options, plan, command, report, quiet=quiet)


def _dry_run(
    place: JobPlace, options: LaunchOptions, plan: LaunchPlan, words: list[str], report: str | None
) -> int:
    from headrace.cluster.launch.preview import preview

    found = preview(place, options, plan, words, os.environ)
    if report is not None:
        _write(report, found.document())
    else:
        sys.stdout.write(found.text())
    return exit_codes.OK


def _run(
    place: JobPlace,
    options: LaunchOptions,
    plan: LaunchPlan,
    words: list[str],
    report: str | None,
    *,
    quiet: bool,
) -> int:
    from headrace.cluster.launch.conductor import Conductor
    from headrace.cluster.launch.job_report import report_text
    from headrace.cluster.launch.plan import lay_out
    from headrace.cluster.launch.record import Record
    from headrace.errors import HeadraceError

    def say(text: str) -> None:
        if not quiet:
            print(f"headrace launch: {text}", file=sys.stderr, flush=True)

    # What a job that was started again did before is its own; a first start has done nothing before.
    since_s = 0.0 if place.restarts else time.time()
    for restarts in itertools.count():
        record = Record(place, options, plan, words, os.environ)
        record.begin()
        conductor = Conductor(place, options, plan, words, say, restarts=restarts)
        found = conductor.report
        try:
            conductor.run()
        except HeadraceError as e:
            found.why, found.next_step = e.message, e.next_step
            raise
        finally:
            nodes = conductor.nodes.all if hasattr(conductor, "nodes") else []
            record.finish(found, nodes)
            if report is not None:
                _write(report, found.document())
            last = conductor.survivors is None
            if last and options.agent and (text := report_text(conductor.job, os.environ, since_s)):
                say(f"the job's report\n{text}")
            _say_end(found, say)
        if conductor.survivors is None:
            break
        place = conductor.survivors
        plan = lay_out(place, options)
    conductor.requeue()
    return found.exit_code


def _range(text: str | None) -> tuple[int, int] | None:
    """MIN-MAX, or N for N-N."""
    if text is None:
        return None
    least, _, most = text.partition("-")
    if not (least.isdigit() and (most or least).isdigit()):
        raise ValueError(f"nodes is {text!r}, expected MIN-MAX")
    return int(least), int(most or least)


def _say_end(found: LaunchReport, say: object) -> None:
    assert callable(say)
    say(found.line())
    if found.next_step and found.exit_code != exit_codes.STORE_ERROR:
        say(f"next: {found.next_step}")


def _write(where: str, document: object) -> None:
    text = json.dumps(document, indent=2) + "\n"
    if where == "-":
        sys.stdout.write(text)
    else:
        Path(where).write_text(text, encoding="utf-8")
