"""`headrace node`: one data plane for all processes of a user on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.base.text import bytes_of, bytes_text, count_text
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

__all__ = ["app", "logs", "start", "status", "stop", "unit"]

app = typer.Typer(
    help="Start, stop and watch the node daemon: one cache for all jobs (`plane='node'`).",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def start(
    *,
    foreground: Foreground = False,
    ram: Annotated[
        str | None, typer.Option(help="Memory for samples (8G). Default: half of what is free.")
    ] = None,
    job_ram: Annotated[str | None, typer.Option(help="The same for one job. Default: all.")] = None,
    window: Annotated[str, typer.Option(help="Batches that one client may hold.")] = "256M",
    job_window: Annotated[str, typer.Option(help="The same for one job.")] = "1G",
    cache_dir: Annotated[
        str | None, typer.Option(help="Folder on a local disk to keep samples in.")
    ] = None,
    cache: Annotated[str | None, typer.Option(help="Quota of that folder.")] = None,
    simulate: Annotated[
        str | None, typer.Option(help="Slow storage to simulate: lustre, nfs, s3, hdd.")
    ] = None,
    controller: Annotated[
        str | None,
        typer.Option(
            help="Says what jobs may take: own (this user's), unix:PATH, http(s)://HOST:PORT."
        ),
    ] = None,
    controller_token_file: Annotated[
        Path | None, typer.Option(help="Holds the token for it.")
    ] = None,
    controller_ca: Annotated[
        Path | None, typer.Option(help="Authority of its certificate.")
    ] = None,
    controller_cert: Annotated[Path | None, typer.Option(help="Own certificate.")] = None,
    controller_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve Prometheus there (9464).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start the daemon, in the background if not told otherwise."""
    from headrace.config import ReaderOptions, TierOptions
    from headrace.node.daemon import run
    from headrace.node.daemon import start as start_daemon
    from headrace.node.options import NodeOptions, automatic_ram_bytes
    from headrace.runtime import runtime_folder

    endpoint = None
    paths = (controller_token_file, controller_ca, controller_cert, controller_key)
    token, ca, cert, key = (None if path is None else path.absolute() for path in paths)
    if controller is not None:
        from headrace.control.client import Endpoint

        endpoint = Endpoint(url=controller, token_file=token, ca=ca, certificate=cert, key=key)
    cache_bytes = None if cache is None else bytes_of(cache)
    options = NodeOptions(
        ram_bytes=automatic_ram_bytes() if ram is None else bytes_of(ram),
        job_ram_bytes=None if job_ram is None else bytes_of(job_ram),
        window_bytes=bytes_of(window),
        job_window_bytes=bytes_of(job_window),
        controller=endpoint,
        metrics=metrics,
        reader=ReaderOptions(simulate=simulate),
        tiers=TierOptions(cache_dir=cache_dir, cache_bytes=cache_bytes),
    )
    folder = runtime_folder()
    if foreground:
        log_to_stderr()
        run(folder, options)
        return
    given = {
        "--ram": ram, "--job-ram": job_ram, "--window": window, "--job-window": job_window,
        "--cache-dir": _absolute(cache_dir), "--cache": cache, "--simulate": simulate,
        "--controller": controller, "--controller-token-file": token, "--controller-ca": ca,
        "--controller-cert": cert, "--controller-key": key,
        "--metrics": metrics,
    }  # fmt: skip
    state = start_daemon(folder, arguments_of(given))
    output = Output(as_json=as_json)
    if as_json:
        output.document(state)
    else:
        output.line(
            f"process {state['pid']} serves {state['folder']} "
            f"with {bytes_text(state['ram_bytes'])} of memory"
            + (f", metrics at http://{state['metrics']}/metrics" if state["metrics"] else "")
        )


@app.command()
def stop(
    *,
    force: Annotated[bool, typer.Option("--force", help="Kill it if it does not answer.")] = False,
    as_json: Json = False,
) -> int:
    """Stop the daemon. Its clients go on by reading directly."""
    from headrace.node.daemon import stop as stop_daemon
    from headrace.runtime import runtime_folder

    folder = runtime_folder()
    return end(Output(as_json=as_json), folder, lambda: stop_daemon(folder, force=force))


@app.command()
def status(*, as_json: Json = False) -> int:
    """Say what the daemon holds, and for whom."""
    from headrace.errors import NodeError
    from headrace.node.daemon import ask_status
    from headrace.node.link import LinkLost
    from headrace.runtime import runtime_folder

    folder = runtime_folder()

    def ask() -> dict[str, Any]:
        try:
            return ask_status(folder)
        except LinkLost as e:
            raise NodeError(
                f"{folder.path}: the node daemon does not answer: {e}.",
                path=str(folder.path),
                next_step="Kill it: headrace node stop --force.",
            ) from e

    return tell(Output(as_json=as_json), folder, ask, _print)


@app.command()
def logs(
    *,
    lines: Lines = 50,
    as_json: Json = False,
) -> None:
    """Print the end of the log of a daemon in the background."""
    from headrace.runtime import runtime_folder

    print_log(Output(as_json=as_json), runtime_folder(), lines)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def unit(context: typer.Context, *, as_json: Json = False) -> None:
    """Print a systemd unit and Slurm lines; options of `start` go into them."""
    import shutil

    from headrace.cluster.script import node_daemon_lines
    from headrace.node.unit import systemd_unit

    program = shutil.which("headrace") or sys.argv[0]
    texts = {
        "systemd": systemd_unit(program, context.args),
        "slurm": node_daemon_lines(program, context.args),
    }
    output = Output(as_json=as_json)
    if as_json:
        output.document(texts)
    else:
        output.line("\n".join(texts.values()).rstrip("\n"))


def _print(output: Output, state: dict[str, Any]) -> None:
    output.line(
        f"process {state['pid']} in {state['folder']}, up {state['uptime_s']:.0f} s: "
        f"{bytes_text(state['held_bytes'])} of {bytes_text(state['ram_bytes'])} held, "
        f"{len(state['sessions'])} clients of {len(state['jobs'])} jobs"
    )
    for data in state["datasets"]:
        output.line(
            f"  {data['path']}: {count_text(data['held_samples'])} of "
            f"{count_text(data['samples'])} samples held, {bytes_text(data['source_bytes'])} read, "
            f"{bytes_text(data['delivered_bytes'])} delivered "
            f"({bytes_text(data['ram_bytes'])} from memory)"
        )
    for root in state["files"]["roots"]:
        output.line(
            f"  {root['root']}: {count_text(root['files'])} files, "
            f"{count_text(root['copies'])} copied, {bytes_text(root['held_bytes'])} in memory, "
            f"{bytes_text(root['disk_bytes'])} on disk"
        )
    for run in state["files"]["runs"]:
        opens = run["opens"]
        output.line(
            f"  process {run['pid']} of {run['job']}: {count_text(sum(opens.values()))} opens, "
            f"{count_text(opens['ram'])} from memory, {count_text(opens['disk'])} from disk, "
            f"{count_text(opens['ahead'])} read ahead; order: {run['order'] or 'not known'}"
        )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())
