"""`headrace control`: hands policies to the planes of many nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.base.text import bytes_text
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

__all__ = ["app", "logs", "start", "status", "stop"]

app = typer.Typer(
    help="Start, stop and watch the controller, which hands policies to planes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def start(
    *,
    foreground: Foreground = False,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="unix:PATH or tcp:HOST:PORT, beside its own socket. May come again."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Tokens that are good over TCP, one a line.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, for TCP.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Whoever connects shows a certificate of this authority.")
    ] = None,
    db: Annotated[
        Path | None,
        typer.Option(help="SQLite file. Default: $XDG_STATE_HOME/headrace/control.db."),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve Prometheus there (9465).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start the controller, in the background if not told otherwise."""
    process = _process()
    from headrace.runtime import control_folder

    options = process.ControlOptions(
        database=(db or process.default_database()).absolute(),
        listen=tuple(listen or ()),
        token_file=_absolute(token_file),
        tls_cert=_absolute(tls_cert),
        tls_key=_absolute(tls_key),
        tls_ca=_absolute(tls_ca),
        metrics=metrics,
    )
    folder = control_folder()
    if foreground:
        log_to_stderr()
        process.run(folder, options)
        return
    given = {
        "--token-file": options.token_file, "--tls-cert": options.tls_cert,
        "--tls-key": options.tls_key, "--tls-ca": options.tls_ca, "--db": options.database,
        "--metrics": metrics,
    }  # fmt: skip
    arguments = arguments_of(given)
    arguments += [word for where in options.listen for word in ("--listen", where)]
    state = process.start(folder, arguments)
    output = Output(as_json=as_json)
    if as_json:
        output.document(state)
    else:
        output.line(
            f"process {state['pid']} rules with epoch {state['epoch']} of {state['database']}, "
            f"socket {folder.socket}"
        )


@app.command()
def stop(
    *,
    force: Annotated[bool, typer.Option("--force", help="Kill it if it does not end.")] = False,
    as_json: Json = False,
) -> int:
    """Stop the controller. Planes go on by their leases, then as the policy says."""
    process = _process()
    from headrace.runtime import control_folder

    folder = control_folder()
    return end(Output(as_json=as_json), folder, lambda: process.stop(folder, force=force))


@app.command()
def status(*, as_json: Json = False) -> int:
    """Say which planes there are, what they use, and what they may use."""
    process = _process()
    from headrace.runtime import control_folder

    folder = control_folder()
    return tell(Output(as_json=as_json), folder, lambda: process.ask_status(folder), _print)


@app.command()
def logs(
    *,
    lines: Lines = 50,
    as_json: Json = False,
) -> None:
    """Print the end of the log of a controller in the background."""
    from headrace.runtime import control_folder

    print_log(Output(as_json=as_json), control_folder(), lines)


def _process() -> Any:
    """The module that knows how; a sentence where a package of the extra is missing."""
    try:
        from headrace.control.service import process
    except ModuleNotFoundError as e:
        from headrace.errors import ControlError

        raise ControlError(
            f"the controller needs {e.name}.", next_step="pip install 'headrace[control]'"
        ) from e
    return process


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _print(output: Output, state: dict[str, Any]) -> None:
    output.line(
        f"process {state['pid']}, epoch {state['epoch']}, up {state['uptime_s']:.0f} s: "
        f"policy {state['policy_version']}, {len(state['planes'])} planes, "
        f"decided in {state['decide_s'] * 1e3:.1f} ms"
    )
    if state["degraded"]:
        output.line(f"  degraded: {state['degraded']}")
    for plane in state["planes"]:
        output.line(
            f"  {plane['name']} of {plane['user']}, process {plane['pid']}: "
            f"lease for {plane['lease_left_s']:.1f} s"
        )
        for flow in plane["flows"]:
            granted = flow["granted"]["bytes_per_s"]
            most = "no limit" if granted is None else f"{bytes_text(int(granted))}/s"
            output.line(
                f"    {flow['job']} on {flow['file_system']}: "
                f"{bytes_text(int(flow['used']['bytes_per_s']))}/s of {most}"
            )
