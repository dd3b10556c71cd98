"""`headrace node` and `headrace agent`, and what all commands over a daemon share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from headrace import runtime
from headrace.base.text import bytes_of, bytes_text, count_text, counted
from headrace.cli import exit_codes
from headrace.cli.options import CommandGroup, JsonOutput, controller_options
from headrace.cli.printing import Output, log_to_stderr

if TYPE_CHECKING:
    from collections.abc import Callable


Foreground = Annotated[bool, Option("--foreground", help="Stay here, and log to stderr.")]
Lines = Annotated[int, Option("--lines", "-n", help="How many.")]


def words_of(context: typer.Context, **instead: Any) -> list[str]:
    """A command's options as words for a daemon in the background, whose current folder is another."""
    words: list[str] = []
    for parameter in context.command.params:
        given = {**context.params, **instead}[parameter.name]
        for value in given if isinstance(given, list | tuple) else (given,):
            if value is True and parameter.name != "as_json":
                words.append(parameter.opts[0])
            elif value and value is not True:
                path = value.absolute() if isinstance(value, Path) else value
                words += [parameter.opts[0], str(path)]
    return words


def end(
    output: Output, folder: runtime.RuntimeFolder, stop: Callable[[], int], elsewhere: str = ""
) -> int:
    """End a daemon with `stop`, which returns its process id, and say so; returns the exit code."""
    try:
        pid = stop()
    except FileNotFoundError:
        return _not_running(output, folder, elsewhere)
    output.result({"pid": pid, "running": False}, f"process {pid} has ended")
    return exit_codes.OK


def tell(
    output: Output,
    folder: runtime.RuntimeFolder,
    ask: Callable[[], dict[str, Any]],
    show: Callable[[Output, dict[str, Any]], None],
    elsewhere: str = "",
) -> int:
    """Say how a daemon fares: `show` prints what `ask` returns; returns the exit code."""
    try:
        state = ask()
    except FileNotFoundError:
        return _not_running(output, folder, elsewhere)
    if output.as_json:
        output.document({"running": True, **state})
    else:
        show(output, state)
    return exit_codes.OK


def _not_running(output: Output, folder: runtime.RuntimeFolder, elsewhere: str) -> int:
    """Say that no daemon is there, and which one is elsewhere; returns the exit code."""
    text = f"no {folder.title} runs in {folder.path}{elsewhere}"
    output.result({"running": False, "folder": str(folder.path)}, text)
    return exit_codes.FINDING


def print_log(output: Output, folder: runtime.RuntimeFolder, lines: int) -> None:
    """Print the end of the log of a daemon in the background."""
    text = runtime.tail(folder, lines)
    output.result({"path": str(folder.log), "lines": text.splitlines()}, *text.splitlines())


node_app = CommandGroup(
    "Start, stop and watch the node daemon: one cache for all jobs (`plane='node'`)."
)


_CONTROLLER = controller_options(
    "Says what jobs may take: own (this user's), unix:PATH, http(s)://HOST:PORT.",
    "--controller-token-file", "--controller-ca", "--controller-cert", "--controller-key",
)  # fmt: skip


@node_app.command("start")
def node_start(
    context: typer.Context,
    *,
    foreground: Foreground = False,
    ram: str | None = Option(
        None, help="Memory for samples (8G).", show_default="half of what is free", metavar="SIZE"
    ),
    job_ram: str | None = Option(
        None, help="The same for one job.", show_default="all", metavar="SIZE"
    ),
    window: str = Option("1G", help="Batches that one client may hold.", metavar="SIZE"),
    job_window: str = Option("2G", help="The same for one job.", metavar="SIZE"),
    cache_dir: str | None = Option(
        None, help="Folder on a local disk to keep samples in.", metavar="DIR"
    ),
    cache: str | None = Option(None, help="Quota of that folder.", metavar="SIZE"),
    simulate: str | None = Option(
        None, help="Slow storage to simulate: lustre, nfs, s3, hdd.", metavar="NAME"
    ),
    controller: Annotated[Any, _CONTROLLER],
    metrics: str | None = Option(
        None, metavar="[HOST:]PORT", help="Serve Prometheus there (9464)."
    ),
    output: JsonOutput,
) -> None:
    """Start the daemon, in the background if not told otherwise."""
    from headrace.config import ReaderOptions, TierOptions
    from headrace.node.daemon import NodeOptions, automatic_ram_bytes, run
    from headrace.node.daemon import start as start_daemon

    cache_bytes = None if cache is None else bytes_of(cache)
    options = NodeOptions(
        ram_bytes=automatic_ram_bytes() if ram is None else bytes_of(ram),
        job_ram_bytes=None if job_ram is None else bytes_of(job_ram),
        window_bytes=bytes_of(window), job_window_bytes=bytes_of(job_window), controller=controller,
        metrics=metrics, reader=ReaderOptions(simulate=simulate),
        tiers=TierOptions(cache_dir=cache_dir, cache_bytes=cache_bytes),
    )  # fmt: skip
    folder = runtime.runtime_folder()
    if foreground:
        log_to_stderr()
        run(folder, options)
        return
    state = start_daemon(folder, words_of(context, cache_dir=cache_dir and Path(cache_dir)))
    serves = f"process {state['pid']} serves {state['folder']}"
    served = f", metrics at http://{state['metrics']}/metrics" if state["metrics"] else ""
    output.result(state, f"{serves} with {bytes_text(state['ram_bytes'])} of memory{served}")


@node_app.command("stop")
def node_stop(
    *,
    force: bool = Option(False, "--force", help="Kill it if it does not answer."),
    output: JsonOutput,
) -> int:
    """Stop the daemon. Its clients go on by reading directly."""
    from headrace.node.daemon import stop as stop_daemon

    folder = runtime.runtime_folder()
    return end(output, folder, lambda: stop_daemon(folder, force=force))


@node_app.command("status")
def node_status(*, output: JsonOutput) -> int:
    """Say what the daemon holds, and for whom."""
    from headrace.errors import NodeError
    from headrace.node.daemon import ask_status
    from headrace.node.link import LinkLost

    folder = runtime.runtime_folder()

    def ask() -> dict[str, Any]:
        try:
            return ask_status(folder)
        except LinkLost as e:
            raise NodeError(
                f"{folder.path}: the node daemon does not answer: {e}.",
                path=str(folder.path),
                next_step="Kill it: headrace node stop --force.",
            ) from e

    return tell(output, folder, ask, _print_node)


@node_app.command("logs")
def node_logs(*, lines: Lines = 50, output: JsonOutput) -> None:
    """Print the end of the log of a daemon in the background."""
    print_log(output, runtime.runtime_folder(), lines)


@node_app.command(
    "unit", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def node_unit(context: typer.Context, *, output: JsonOutput) -> None:
    """Print a systemd unit and Slurm lines; options of `start` go into them."""
    import shutil

    from headrace.cluster.script import node_daemon_lines
    from headrace.node.daemon import systemd_unit

    words = shutil.which("headrace") or sys.argv[0], context.args
    texts = {"systemd": systemd_unit(*words), "slurm": node_daemon_lines(*words)}
    output.result(texts, "\n".join(texts.values()).rstrip("\n"))


def _tuned(data: dict[str, Any]) -> str:
    """How the reads of a data set go, who is the slower side, and what the tuner does about it."""
    reads, tuning = data["reads"], data["tuning"]
    recent, knobs = tuning["recent"], tuning["knobs"]
    text = (
        f"{recent['reads_in_flight']:.0f} of {reads['in_flight_max']} reads in flight, "
        f"{bytes_text(knobs['buffer_bytes']['value'])} of buffer"
    )
    if not any(data["jobs"].values()):  # what its last ones waited for is over
        return f"{text}; nobody reads it now"
    text += f"; consumers wait {recent['stall']:.1%}: {tuning['verdict']}"
    held_back = f", held back by {data['held_back']}" if data["held_back"] else ""
    doing = f"; tuner: {tuning['doing']}" if tuning["doing"] else ""
    return f"{text}{held_back}{doing}"


def _print_node(output: Output, state: dict[str, Any]) -> None:
    output.line(
        f"process {state['pid']} in {state['folder']}, up {state['uptime_s']:.0f} s: "
        f"{bytes_text(state['held_bytes'])} of {bytes_text(state['ram_bytes'])} held, "
        f"{counted(len(state['sessions']), 'client')} of {counted(len(state['jobs']), 'job')}"
    )
    for data in state["datasets"]:
        output.line(
            f"  {data['path']}: {count_text(data['held_samples'])} of "
            f"{count_text(data['samples'])} samples held, {bytes_text(data['source_bytes'])} read, "
            f"{bytes_text(data['delivered_bytes'])} delivered "
            f"({bytes_text(data['ram_bytes'])} from memory)"
        )
        output.line(f"    {_tuned(data)}")
    for root in state["files"]["roots"]:
        output.line(
            f"  {root['root']}: {count_text(root['files'])} files, "
            f"{count_text(root['copies'])} copied, {bytes_text(root['held_bytes'])} in memory, "
            f"{bytes_text(root['disk_bytes'])} on disk"
        )
        if tuning := root["tuning"]:
            allowed = tuning["knobs"]["reads_in_flight"]["value"]
            output.line(
                f"    {root['in_flight']} of {allowed} reads in flight; tuner: {tuning['doing']}"
            )
    for run in state["files"]["runs"]:
        opens = run["opens"]
        output.line(
            f"  process {run['pid']} of {run['job']}: {count_text(sum(opens.values()))} opens, "
            f"{count_text(opens['ram'])} from memory, {count_text(opens['disk'])} from disk, "
            f"{count_text(opens['ahead'])} read ahead; order: {run['order'] or 'not known'}"
        )


agent_app = CommandGroup(
    "Start, stop and watch the agent, which tells who starves on this node.", no_args_is_help=False
)


@agent_app.callback(invoke_without_command=True)
def agent(context: typer.Context) -> None:
    """Look at this node and its jobs, and keep what is seen: who starves, and why.

    Without a command it is `start --foreground`; within a job, for that job: a step on each node.
    """
    if context.invoked_subcommand is None:
        from headrace.telemetry import agent as process

        log_to_stderr()
        options = process.own_options()
        process.run(process.folder_of(options.job), options)


Job = Annotated[str, Option("--job", metavar="JOB", help="The agent of this job alone.")]
Site = Annotated[
    bool, Option("--site", help="For all users: listen where everybody can. For root.")
]


@agent_app.command("start")
def agent_start(
    context: typer.Context,
    *,
    foreground: Foreground = False,
    history: Path | None = Option(
        None,
        help="Folder of history files.",
        show_default="$HEADRACE_HISTORY, or of the user",
        metavar="DIR",
    ),
    no_history: bool = Option(False, "--no-history", help="Keep none: Prometheus does."),
    job: Job = "",
    site: Site = False,
    metrics: str | None = Option(
        None, metavar="[HOST:]PORT", help="Serve Prometheus there (9466)."
    ),
    interval: float = Option(
        5.0,
        help="Seconds between looks while jobs run; more where looks cost much.",
        metavar="SECONDS",
    ),
    keep_days: float = Option(30.0, help="How long the history goes back.", metavar="DAYS"),
    keep_bytes: str = Option("256M", help="How large its file may become.", metavar="SIZE"),
    output: JsonOutput,
) -> None:
    """Start the agent, in the background if not told otherwise."""
    from headrace.telemetry import agent as process
    from headrace.telemetry.history import default_history
    from headrace.telemetry.messages import ask_state

    if not 0.1 <= interval <= 3600:
        raise ValueError(f"--interval is {interval:g}, expected 0.1 to 3600 seconds")
    if keep_days <= 0:
        raise ValueError(f"--keep-days is {keep_days:g}, expected more than 0")
    place = None if no_history else (history or default_history()).absolute()
    folder = process.folder_of(job, site=site)
    node, why, shape = _node_of_slurm() if foreground else (process.node_name(), "", (0, 0, 0))
    options = process.AgentOptions(
        node=node, node_why=why, shape=shape, history=place, job=job, site=site, metrics=metrics,
        interval_s=interval, age_s=keep_days * 86400, bytes_max=bytes_of(keep_bytes),
    )  # fmt: skip
    if foreground:
        log_to_stderr()
        process.run(folder, options)
        return
    where = process.socket_of(folder, site=site)
    words = words_of(context, history=place)
    state = runtime.launch(folder, words, lambda: ask_state(where))
    kept = f", history {state['history']}" if state["history"] else ""
    served = f", metrics at http://{state['metrics']}/metrics" if state["metrics"] else ""
    output.result(state, f"process {state['pid']} looks at {state['node']}{kept}{served}")


def _node_of_slurm() -> tuple[str, str, tuple[int, int, int]]:
    """This node's name, why it may not be Slurm's, and its CPUs, memory in bytes and GPUs by Slurm."""
    import socket

    from headrace.cluster.slurm.commands import Commands, is_set_up
    from headrace.cluster.slurm.scontrol import node_here
    from headrace.errors import ClusterError
    from headrace.telemetry.agent import node_name

    host, name = socket.gethostname().partition(".")[0], node_name()
    if not is_set_up():
        return name, "", (0, 0, 0)
    try:
        node = node_here(Commands(deadline_s=10.0), host, "" if name == host else name)
    except ClusterError as e:
        return name, f"{e.message} {e.next_step or ''}".strip(), (0, 0, 0)
    if node is None:
        return (
            name,
            f"Slurm knows no node of host {host}: set HEADRACE_NODE to its NodeName",
            (0, 0, 0),
        )
    return node.name, "", (node.cpus, node.memory_mib << 20, node.gpus)


@agent_app.command("stop")
def agent_stop(*, job: Job = "", site: Site = False, output: JsonOutput) -> int:
    """Stop the agent. What it has counted is in its history."""
    from headrace.telemetry import agent as process

    folder = process.folder_of(job, site=site)
    kill = "Kill it (kill -9): what it wrote stays whole."
    return end(output, folder, lambda: runtime.end(folder, kill), _site_agent(site=site))


def _site_agent(*, site: bool) -> str:
    """Where an agent is that was not asked for."""
    return (
        "; that of all users is there: --site"
        if not site and Path(runtime.SITE_SOCKET).exists()
        else ""
    )


@agent_app.command("status")
def agent_status(*, job: Job = "", site: Site = False, output: JsonOutput) -> int:
    """Say what the agent sees, what it costs, and what it cannot see."""
    from headrace.telemetry import agent as process
    from headrace.telemetry.messages import ask_state

    folder = process.folder_of(job, site=site)
    where = process.socket_of(folder, site=site)
    elsewhere = _site_agent(site=site)
    return tell(output, folder, lambda: ask_state(where), _print_agent, elsewhere)


@agent_app.command("logs")
def agent_logs(*, lines: Lines = 50, job: Job = "", site: Site = False, output: JsonOutput) -> None:
    """Print the end of the log of an agent in the background."""
    from headrace.telemetry import agent as process

    print_log(output, process.folder_of(job, site=site), lines)


def _print_agent(output: Output, state: dict[str, Any]) -> None:
    share = state["look_cpu_s"] / state["interval_s"]
    output.line(
        f"process {state['pid']} looks at {state['node']} every {state['interval_s']:.1f} s, "
        f"{state['look_cpu_s'] * 1e3:.1f} ms of CPU a look ({share:.2%} of a core)"
    )
    jobs, more = state["jobs"], state["running"] - len(state["jobs"])
    named = f"{', '.join(jobs)}{f' and {more} more' if more else ''} run" if jobs else "none runs"
    ended = f"; {counted(state['ended'], 'job')} ended lately" if state["ended"] else ""
    output.line(f"  jobs     {named}{ended}")
    output.line(f"  heard    {state['messages']} messages, {state['refused']} refused")
    if state["history"]:
        why = f", cannot be written: {state['history_error']}" if state["history_error"] else ""
        output.line(f"  history  {state['history']}{why}")
    if state["metrics"]:
        output.line(f"  metrics  http://{state['metrics']}/metrics")
    if state["without"]:
        output.line(
            f"  without  {', '.join(state['without'])}; `headrace agent logs`, with the same options, says why"
        )
    if state["node_why"]:
        output.line(f"  node     may be called otherwise: {state['node_why']}")
    if state["elsewhere"]:
        left = ", ".join(state["elsewhere"])
        output.line(
            f"  left out jobs of {left}: this agent's node is {state['node']} (HEADRACE_NODE)"
        )
