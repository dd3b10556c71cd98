"""`headrace agent`: looks at a node and its jobs, and keeps what it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.base.text import bytes_of
from headrace.cli.daemons import (
    Foreground,
    Lines,
    arguments_of,
    end,
    log_to_stderr,
    print_log,
    tell,
)
from headrace.cli.output import Json, Output

__all__ = ["agent", "app", "logs", "start", "status", "stop"]

app = typer.Typer(
    help="Start, stop and watch the agent, which tells who starves on this node.",
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def agent(context: typer.Context) -> None:
    """Look at this node and its jobs, and keep what is seen: who starves, and why.

    Without a command it is `start --foreground`; within a job, for that job: a step on each node.
    """
    if context.invoked_subcommand is None:
        from headrace.telemetry import process

        log_to_stderr()
        options = process.own_options()
        process.run(process.folder_of(options.job), options)


Job = Annotated[str, typer.Option("--job", help="Look at this job alone.")]
Site = Annotated[
    bool, typer.Option("--site", help="For all users: listen where everybody can. For root.")
]


@app.command()
def start(
    *,
    foreground: Foreground = False,
    history: Annotated[
        Path | None,
        typer.Option(help="Folder of history files. Default: $HEADRACE_HISTORY, or of the user."),
    ] = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Keep none: Prometheus does.")
    ] = False,
    job: Job = "",
    site: Site = False,
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve Prometheus there (9466).")
    ] = None,
    interval: Annotated[
        float,
        typer.Option(help="Seconds between looks while jobs run; more where looks cost much."),
    ] = 5.0,
    keep_days: Annotated[float, typer.Option(help="How long the history goes back.")] = 30.0,
    keep_bytes: Annotated[str, typer.Option(help="How large its file may become.")] = "256M",
    as_json: Json = False,
) -> None:
    """Start the agent, in the background if not told otherwise."""
    from headrace.telemetry import process
    from headrace.telemetry.pace import Pace
    from headrace.telemetry.place import default_history

    if not 0.1 <= interval <= 3600:
        raise ValueError(f"--interval is {interval:g}, expected 0.1 to 3600 seconds")
    if keep_days <= 0:
        raise ValueError(f"--keep-days is {keep_days:g}, expected more than 0")
    place = None if no_history else (history or default_history()).absolute()
    options = process.RunOptions(
        history=place, job=job, site=site, metrics=metrics,
        pace=Pace(busy_s=interval, idle_s=max(30.0, interval), most_s=max(60.0, interval)),
        age_s=keep_days * 86400, bytes_max=bytes_of(keep_bytes),
    )  # fmt: skip
    folder = process.folder_of(job, site=site)
    if foreground:
        log_to_stderr()
        process.run(folder, options)
        return
    arguments = arguments_of(
        {
            "--history": place, "--job": job, "--metrics": metrics, "--interval": interval,
            "--keep-days": keep_days, "--keep-bytes": keep_bytes,
        }
    )  # fmt: skip
    arguments += ["--site"] * site + ["--no-history"] * no_history
    state = process.start(folder, arguments, site=site)
    output = Output(as_json=as_json)
    if as_json:
        output.document(state)
    else:
        where = f", history {state['history']}" if state["history"] else ""
        served = f", metrics at http://{state['metrics']}/metrics" if state["metrics"] else ""
        output.line(f"process {state['pid']} looks at {state['node']}{where}{served}")


@app.command()
def stop(*, job: Job = "", site: Site = False, as_json: Json = False) -> int:
    """Stop the agent. What it has counted is in its history."""
    from headrace.telemetry import process

    folder = process.folder_of(job, site=site)
    return end(Output(as_json=as_json), folder, lambda: process.stop(folder, site=site))


@app.command()
def status(*, job: Job = "", site: Site = False, as_json: Json = False) -> int:
    """Say what the agent sees, what it costs, and what it cannot see."""
    from headrace.telemetry import process
    from headrace.telemetry.listening import ask_state

    folder = process.folder_of(job, site=site)
    where = process.socket_of(folder, site=site)
    return tell(Output(as_json=as_json), folder, lambda: ask_state(where), _print)


@app.command()
def logs(
    *,
    lines: Lines = 50,
    job: Job = "",
    site: Site = False,
    as_json: Json = False,
) -> None:
    """Print the end of the log of an agent in the background."""
    from headrace.telemetry import process

    print_log(Output(as_json=as_json), process.folder_of(job, site=site), lines)


def _print(output: Output, state: dict[str, Any]) -> None:
    share = state["look_cpu_s"] / state["interval_s"]
    output.line(
        f"process {state['pid']} looks at {state['node']} every {state['interval_s']:.1f} s, "
        f"{state['look_cpu_s'] * 1e3:.1f} ms of CPU a look ({share:.2%} of a core)"
    )
    output.line(f"  jobs     {state['running']} run: {', '.join(state['jobs']) or '-'}")
    output.line(f"  heard    {state['messages']} messages, {state['refused']} refused")
    if state["history"]:
        why = f", cannot be written: {state['history_error']}" if state["history_error"] else ""
        output.line(f"  history  {state['history']}{why}")
    if state["metrics"]:
        output.line(f"  metrics  http://{state['metrics']}/metrics")
    if state["without"]:
        output.line(f"  without  {', '.join(state['without'])}")
