"""`headrace control` and `headrace policy`: the controller of many nodes' planes, and what it wants of them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from headrace import runtime
from headrace.base.files import state_folder
from headrace.base.text import bytes_text, counted
from headrace.cli import exit_codes
from headrace.cli.daemons import Foreground, Lines, end, print_log, tell, words_of
from headrace.cli.options import CommandGroup, JsonOutput, controller_options
from headrace.cli.printing import Output, log_to_stderr

if TYPE_CHECKING:
    from headrace.control.client import Endpoint

control_app = CommandGroup("Start, stop and watch the controller, which hands policies to planes.")


@control_app.command("start")
def control_start(
    context: typer.Context,
    *,
    foreground: Foreground = False,
    listen: list[str] | None = Option(
        None, metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT, beside its own socket."
    ),
    token_file: Path | None = Option(
        None, help="Tokens that are good over TCP, one a line.", metavar="FILE"
    ),
    tls_cert: Path | None = Option(None, help="Certificate, for TCP.", metavar="FILE"),
    tls_key: Path | None = Option(None, help="Its key.", metavar="FILE"),
    tls_ca: Path | None = Option(
        None, help="Whoever connects shows a certificate of this authority.", metavar="FILE"
    ),
    db: Path | None = Option(
        None,
        help="SQLite file.",
        show_default="$XDG_STATE_HOME/headrace/control.db",
        metavar="FILE",
    ),
    metrics: str | None = Option(
        None, metavar="[HOST:]PORT", help="Serve Prometheus there (9465)."
    ),
    output: JsonOutput,
) -> None:
    """Start the controller, in the background if not told otherwise."""
    from headrace.control.service import app as service

    options = service.ControlOptions(
        database=(db or state_folder() / "control.db").absolute(), listen=tuple(listen or ()),
        token_file=token_file, tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca, metrics=metrics,
    )  # fmt: skip
    folder = runtime.control_folder()
    if foreground:
        log_to_stderr()
        service.run(folder, options)
        return
    words = words_of(context, db=options.database)
    state = runtime.launch(folder, words, lambda: service.ask_status(folder))
    text = f"process {state['pid']} shares file systems out by {state['database']}"
    output.result(state, f"{text}, socket {folder.socket}")


@control_app.command("stop")
def control_stop(
    *,
    force: bool = Option(False, "--force", help="Kill it if it does not end."),
    output: JsonOutput,
) -> int:
    """Stop the controller. Planes go on by their leases, then as the policy says."""
    folder, kill = runtime.control_folder(), "Kill it: headrace control stop --force."
    return end(output, folder, lambda: runtime.end(folder, kill, force=force))


@control_app.command("status")
def control_status(*, output: JsonOutput) -> int:
    """Say which planes there are, what they use, and what they may use."""
    from headrace.control.service import app as service

    folder = runtime.control_folder()
    return tell(output, folder, lambda: service.ask_status(folder), _print_control)


@control_app.command("logs")
def control_logs(*, lines: Lines = 50, output: JsonOutput) -> None:
    """Print the end of the log of a controller in the background."""
    print_log(output, runtime.control_folder(), lines)


def _print_control(output: Output, state: dict[str, Any]) -> None:
    output.line(
        f"process {state['pid']}, epoch {state['epoch']}, up {state['uptime_s']:.0f} s: "
        f"policy {state['policy_version']}, {counted(len(state['planes']), 'plane')}, "
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


policy_app = CommandGroup("Say which jobs, users and file systems may have how much.")


_ASKED = controller_options(
    "unix:PATH, http://HOST:PORT, https://HOST:PORT, or `own`.",
    "--token-file", "--tls-ca", "--tls-cert", "--tls-key", own=True,
)  # fmt: skip
ControllerEndpoint = Annotated[Any, _ASKED]
Document = Annotated[Path, Argument(help="YAML file; - for standard input.")]


@policy_app.command("apply")
def policy_apply(
    file: Document,
    *,
    dry_run: bool = Option(False, "--dry-run", help="Only say what would change."),
    controller: ControllerEndpoint,
    output: JsonOutput,
) -> None:
    """Put a policy in force, in place of all of the one before."""
    outcome = _put(controller, file, dry_run=dry_run)
    _print_policy(output, outcome)


@policy_app.command("diff")
def policy_diff(
    file: Document,
    *,
    dry_run: bool = Option(True, "--dry-run", help="As always: `diff` changes nothing."),
    controller: ControllerEndpoint,
    output: JsonOutput,
) -> int:
    """Say what a policy would change. Exit code 1 if it would."""
    del dry_run
    outcome = _put(controller, file, dry_run=True)
    _print_policy(output, outcome)
    return exit_codes.FINDING if outcome["changes"] else exit_codes.OK


@policy_app.command("get")
def policy_get(*, controller: ControllerEndpoint, output: JsonOutput) -> None:
    """Print the policy in force, as YAML that `apply` takes."""
    from headrace.control.client import Client

    with contextlib.closing(Client(controller)) as client:
        document = client.document("GET", "/v1/policy")
    if output.as_json:
        output.document(document)
    else:
        from headrace.control.policy import policy_yaml

        output.line(f"# version {document['version']}")
        output.line(policy_yaml(document["policy"]).rstrip())


def _put(controller: Endpoint, file: Path, *, dry_run: bool) -> dict[str, Any]:
    from headrace.control.client import Client

    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    path = "/v1/policy?dry_run=1" if dry_run else "/v1/policy"
    with contextlib.closing(Client(controller)) as client:
        return client.document("PUT", path, text.encode())


def _print_policy(output: Output, reply: dict[str, Any]) -> None:
    if output.as_json:
        output.document(reply)
        return
    for change in reply["changes"]:
        before, after = change["before"], change["after"]
        sign = "+" if before is None else "-" if after is None else "~"
        values = " -> ".join(value for value in (before, after) if value is not None)
        output.line(f"{sign} {change['at']}: {values}")
    for text in reply["unknown"]:
        output.remark(f"not known now: {text}")
    applied = "" if reply["applied"] else "nothing was applied; "
    outcome = applied if reply["changes"] else "nothing changes; "
    output.line(f"{outcome}version {reply['version']} holds")
