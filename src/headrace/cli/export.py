"""`headrace export`: files, devices and stores for other nodes, over NVMe/TCP."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.base.text import bytes_text, count_text
from headrace.cli.daemons import log_to_stderr
from headrace.cli.output import Json, Output

if TYPE_CHECKING:
    from headrace.fabric.confinement import Confinement
    from headrace.fabric.secret import HostSecret
    from headrace.fabric.subsystem import Subsystem
    from headrace.fabric.target import Target
    from headrace.fabric.target_options import TargetOptions

__all__ = ["export"]

_PORT = 4420
_PORT_MAX = 65535


def export(
    things: Annotated[
        list[str],
        typer.Argument(
            metavar="STORE|FILE|DEVICE...",
            help="Each file or block device is a namespace; a store is one and one more per file.",
        ),
    ],
    *,
    nqn: Annotated[
        str | None,
        typer.Option(
            help="Name of the subsystem. Default: made of this machine and what it exports."
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="Port 0: a free one.", metavar="ADDR:PORT")
    ] = f"127.0.0.1:{_PORT}",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A host that may connect; may be repeated. Default: all.", metavar="HOSTNQN"
        ),
    ] = None,
    secrets: Annotated[
        str | None,
        typer.Option(
            help="Hosts that may connect and what they authenticate with (DH-HMAC-CHAP): a line each, "
            "HOSTNQN SECRET [CONTROLLER'S SECRET].",
            metavar="FILE",
        ),
    ] = None,
    require_dh: Annotated[
        bool,
        typer.Option(
            "--require-dh",
            help="Refuse hosts that would authenticate without a Diffie-Hellman exchange: who records "
            "theirs can guess at a weak secret.",
        ),
    ] = False,
    digests: Annotated[
        bool, typer.Option("--digests/--no-digests", help="Agree to digests that a host offers.")
    ] = True,
    confine: Annotated[
        bool,
        typer.Option(
            "--confine/--no-confine", help="Give up, once serving, all that serving does not take."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Export files, block devices or stores, read-only, until SIGTERM or Ctrl-C."""
    address = _address(listen)
    # Before there are threads: they take the mask over, and signals wait for `sigwait`.
    ends = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        log_to_stderr()
        subsystem = _subsystem(things, nqn, _hosts(allow, secrets))
        target, walls = _serve(
            subsystem, address, _options(digests=digests, require_dh=require_dh), confine=confine
        )
        with target:
            _tell(Output(as_json=as_json), subsystem, target.address, walls)
            signal.sigwait(ends)
            figures = target.figures()
        subsystem.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if not as_json:
        served = f"{count_text(figures['reads'])} reads, {bytes_text(figures['bytes'])}"
        print(f"served {served}", file=sys.stderr)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _PORT_MAX:
        raise ValueError(f"--listen is {text!r}, expected ADDR:PORT, as in 0.0.0.0:{_PORT}")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 - ":4420" asks for it


def _hosts(allow: list[str] | None, secrets: str | None) -> dict[str, HostSecret | None] | None:
    """Who may connect, and with what; None: everybody."""
    from headrace.fabric.secret import read_host_secrets

    if not allow and secrets is None:
        return None
    named: dict[str, HostSecret | None] = dict.fromkeys(allow or ())
    return named if secrets is None else {**named, **read_host_secrets(secrets)}


def _subsystem(
    things: list[str], nqn: str | None, hosts: dict[str, HostSecret | None] | None
) -> Subsystem:
    from headrace.fabric.identity import HostIdentity
    from headrace.fabric.subsystem import Subsystem

    if nqn is None:
        # The same after each start on this machine, so that hosts find it again.
        paths = "\n".join(str(Path(thing).resolve()) for thing in things)
        own = uuid.uuid5(uuid.UUID(bytes=HostIdentity.of_machine().id), paths)
        nqn = f"nqn.2014-08.org.nvmexpress:uuid:{own}"
    subsystem = Subsystem(nqn, hosts)
    for thing in things:
        if Path(thing).is_dir():
            subsystem.add_store(thing)
        else:
            subsystem.add(thing)
    return subsystem


def _options(*, digests: bool, require_dh: bool) -> TargetOptions:
    from headrace.fabric.target_options import TargetOptions

    options = TargetOptions(digests=digests)
    if not require_dh:
        return options
    return replace(options, dhchap_groups=tuple(group for group in options.dhchap_groups if group))


def _serve(
    subsystem: Subsystem, address: tuple[str, int], options: TargetOptions, *, confine: bool
) -> tuple[Target, Confinement | None]:
    """A target and the walls around it, in the order that the kernel asks for."""
    from headrace.fabric.confinement import confine_calls, confine_files
    from headrace.fabric.target import Target

    if not confine:
        return Target([subsystem], address, options), None
    files = confine_files()
    target = Target([subsystem], address, options)
    return target, confine_calls(files)


def _tell(
    output: Output, subsystem: Subsystem, address: tuple[str, int], walls: Confinement | None
) -> None:
    host, port = address
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    url = f"nvme+tcp://{where}/{subsystem.nqn}"
    namespaces = subsystem.namespaces.values()
    if output.as_json:
        exported = [
            {"nsid": n.nsid, "path": n.path, "bytes": n.bytes, "url": f"{url}?ns={n.nsid}"}
            for n in namespaces
        ]
        document = {"url": url, "nqn": subsystem.nqn, "address": [host, port], "pid": os.getpid()}
        output.document({"export": {**document, "namespaces": exported, "confinement": walls}})
    else:
        total = bytes_text(sum(namespace.bytes for namespace in namespaces))
        held = "not confined" if walls is None else f"confined: {walls}"
        output.line(f"{url} exports {total} in {len(namespaces)} namespaces; {held}")
    sys.stdout.flush()
