"""`headrace policy`: what the controller wants of planes, and how it changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output

if TYPE_CHECKING:
    from headrace.control.client import Client

__all__ = ["app", "apply", "diff", "get"]

app = typer.Typer(
    help="Say which jobs, users and file systems may have how much.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Controller = Annotated[
    str | None,
    typer.Option(
        help="unix:PATH, http://HOST:PORT or https://HOST:PORT. Default: this user's own."
    ),
]
TokenFile = Annotated[Path | None, typer.Option(help="Holds the token for TCP.")]
Ca = Annotated[Path | None, typer.Option("--tls-ca", help="Authority of the controller.")]
Cert = Annotated[Path | None, typer.Option("--tls-cert", help="Own certificate.")]
Key = Annotated[Path | None, typer.Option("--tls-key", help="Its key.")]
Document = Annotated[Path, typer.Argument(help="YAML file; - for standard input.")]


@app.command()
def apply(
    file: Document,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    controller: Controller = None,
    token_file: TokenFile = None,
    tls_ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    as_json: Json = False,
) -> None:
    """Put a policy in force, whole: what it does not say, holds no more."""
    client = _client(controller, token_file, tls_ca, tls_cert, tls_key)
    found = _put(client, file, dry_run=dry_run)
    _print(Output(as_json=as_json), found)


@app.command()
def diff(
    file: Document,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="As always: `diff` changes nothing.")
    ] = True,
    controller: Controller = None,
    token_file: TokenFile = None,
    tls_ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    as_json: Json = False,
) -> int:
    """Say what a policy would change. Exit code 1 if it would."""
    del dry_run
    client = _client(controller, token_file, tls_ca, tls_cert, tls_key)
    found = _put(client, file, dry_run=True)
    _print(Output(as_json=as_json), found)
    return exit_codes.FINDING if found["changes"] else exit_codes.OK


@app.command()
def get(
    *,
    controller: Controller = None,
    token_file: TokenFile = None,
    tls_ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    as_json: Json = False,
) -> None:
    """Print the policy in force, as YAML that `apply` takes."""
    client = _client(controller, token_file, tls_ca, tls_cert, tls_key)
    try:
        found = client.document("GET", "/v1/policy")
    except FileNotFoundError as e:
        raise _nobody(client) from e
    finally:
        client.close()
    output = Output(as_json=as_json)
    if as_json:
        output.document(found)
    else:
        import yaml

        output.line(f"# version {found['version']}")
        text = yaml.safe_dump(_readable(found["policy"]), sort_keys=False, allow_unicode=True)
        output.line(text.rstrip())


def _client(
    controller: str | None,
    token_file: Path | None,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
) -> Client:
    from headrace.control.client import Client, Endpoint

    return Client(
        Endpoint(
            url=controller or "own", token_file=token_file, ca=ca, certificate=certificate, key=key
        )
    )


def _put(client: Client, file: Path, *, dry_run: bool) -> dict[str, Any]:
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    try:
        path = "/v1/policy?dry_run=1" if dry_run else "/v1/policy"
        return client.document("PUT", path, text.encode())
    except FileNotFoundError as e:
        raise _nobody(client) from e
    finally:
        client.close()


def _nobody(client: Client) -> Exception:
    from headrace.errors import ControlError

    return ControlError(
        f"{client.endpoint.url}: no controller listens.",
        path=client.endpoint.url,
        next_step="Start it: headrace control start.",
    )


def _print(output: Output, found: dict[str, Any]) -> None:
    if output.as_json:
        output.document(found)
        return
    for change in found["changes"]:
        before, after = change["before"], change["after"]
        if before is None:
            output.line(f"+ {change['at']}: {after}")
        elif after is None:
            output.line(f"- {change['at']}: {before}")
        else:
            output.line(f"~ {change['at']}: {before} -> {after}")
    for text in found["unknown"]:
        output.remark(f"not known now: {text}")
    if not found["changes"]:
        output.line(f"nothing changes; version {found['version']} holds")
    elif found["applied"]:
        output.line(f"version {found['version']} holds")
    else:
        output.line(f"nothing was applied; version {found['version']} holds")


def _readable(value: Any, key: str = "") -> Any:
    """Amounts as people write them."""
    from headrace.control.policy import amount_text

    if isinstance(value, dict):
        return {name: _readable(inner, name) for name, inner in value.items()}
    if key.endswith("_per_s") or key == "cache_bytes":
        return amount_text(value)
    return value
