"""`headrace export`, `image`, `stage`, `job`: data of this node for other nodes."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from headrace.base.text import bytes_of, bytes_text, count_text
from headrace.cli import exit_codes
from headrace.cli.options import FullOutput, JsonOutput, StorageOptions
from headrace.cli.pack import StageReading, source_of
from headrace.cli.printing import Output, log_to_stderr

if TYPE_CHECKING:
    from headrace.fabric.confinement import Confinement
    from headrace.fabric.identity import HostSecret
    from headrace.fabric.subsystem import Subsystem
    from headrace.job.nodes import StagingStatus


def image(
    store: str = Argument(..., help="The packed store's folder."),
    out: str = Argument(..., help="A file or block device to write."),
    *,
    force: bool = Option(False, "--force", help="Write over a file or device that is not empty."),
    output: FullOutput,
) -> None:
    """Write a packed store as one image, which any NVMe target can export as a namespace.

    Read it with headrace.open("nvme+tcp://host:port/nqn?ns=1").
    """
    from headrace.cli.progress import progress
    from headrace.fabric.image import write_image

    with progress(output, "writing") as tell:
        report = write_image(
            store, out, force=force,
            progress=None if tell is None else lambda done, total: tell(0, None, done, total),
        )  # fmt: skip
    what = f"wrote {report.files} files, {bytes_text(report.bytes)}: {report.path}"
    output.result(dataclasses.asdict(report), what)


_PORT = 4420
_PORT_MAX = 65535


def export(
    things: list[str] = Argument(
        ...,
        metavar="STORE|FILE|DEVICE...",
        help="Each file or block device is a namespace; a store is one and one more per file.",
    ),
    *,
    nqn: str | None = Option(
        None,
        help="Name of the subsystem.",
        show_default="made of this machine and what it exports",
        metavar="NQN",
    ),
    listen: str = Option(f"127.0.0.1:{_PORT}", help="Port 0: a free one.", metavar="ADDR:PORT"),
    allow: list[str] | None = Option(
        None,
        help="A host that may connect.",
        show_default="all",
        metavar="HOSTNQN",
    ),
    secrets: str | None = Option(
        None,
        help="Hosts that may connect and what they authenticate with (DH-HMAC-CHAP): a line each, "
        "HOSTNQN SECRET [CONTROLLER'S SECRET].",
        metavar="FILE",
    ),
    require_dh: bool = Option(
        False,
        "--require-dh",
        help="Refuse hosts that would authenticate without a Diffie-Hellman exchange: who records "
        "theirs can guess at a weak secret.",
    ),
    digests: bool = Option(
        True, "--digests/--no-digests", help="Agree to digests that a host offers."
    ),
    confine: bool = Option(
        True,
        "--confine/--no-confine",
        help="Give up, once serving, all that serving does not take.",
    ),
    output: JsonOutput,
) -> None:
    """Export files, block devices or stores, read-only, until SIGTERM or Ctrl-C."""
    from headrace.fabric.confinement import confine_calls, confine_files
    from headrace.fabric.identity import read_host_secrets
    from headrace.fabric.target import Target, TargetOptions

    address = _address(listen)
    # Before there are threads: they take the mask over, and signals wait for `sigwait`.
    ends = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        log_to_stderr()
        hosts: dict[str, HostSecret | None] | None = None
        if allow or secrets is not None:
            hosts = dict.fromkeys(allow or ())
            hosts |= read_host_secrets(secrets) if secrets is not None else {}
        subsystem = _subsystem(things, nqn, hosts)
        options = TargetOptions(digests=digests)
        if require_dh:
            groups = tuple(group for group in options.dhchap_groups if group)
            options = replace(options, dhchap_groups=groups)
        # The kernel asks for this order.
        files = confine_files() if confine else None
        target = Target([subsystem], address, options)
        walls = confine_calls(files) if files is not None else None
        with target:
            _print_export(output, subsystem, target.address, walls)
            signal.sigwait(ends)
            figures = target.figures()
        subsystem.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if not output.as_json:
        served = f"{count_text(figures['reads'])} reads, {bytes_text(figures['bytes'])}"
        print(f"served {served}", file=sys.stderr)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _PORT_MAX:
        raise ValueError(f"--listen is {text!r}, expected ADDR:PORT, as in 0.0.0.0:{_PORT}")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 - ":4420" asks for it


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


def _print_export(
    output: Output, subsystem: Subsystem, address: tuple[str, int], walls: Confinement | None
) -> None:
    host, port = address
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    url = f"nvme+tcp://{where}/{subsystem.nqn}"
    namespaces = subsystem.namespaces.values()
    exported = [
        {"nsid": n.nsid, "path": n.path, "bytes": n.bytes, "url": f"{url}?ns={n.nsid}"}
        for n in namespaces
    ]
    document = {"url": url, "nqn": subsystem.nqn, "address": [host, port], "pid": os.getpid()}
    total = bytes_text(sum(namespace.bytes for namespace in namespaces))
    held = "not confined" if walls is None else f"confined: {walls}"
    output.result(
        {"export": {**document, "namespaces": exported, "confinement": walls}},
        f"{url} exports {total} in {len(namespaces)} namespaces; {held}",
    )
    sys.stdout.flush()


Meet = Annotated[
    str | None,
    Option(
        "--meet", metavar="DIR", envvar="HEADRACE_JOB_FOLDER",
        help="Where the job's nodes meet: a folder of its own that all of them see.",
    ),
]  # fmt: skip


def stage(
    source: list[str] | None = Argument(
        None, help="What is staged: whatever `index` takes, or a store.", metavar="SOURCE..."
    ),
    *,
    meet: Meet = None,
    nodes: int | None = Option(
        None, min=1, help="How many.", show_default="as srun, torchrun or MPI say"
    ),
    node_rank: int | None = Option(None, min=0, help="Which of them this is."),
    local: str | None = Option(
        None,
        help="Folder on the local disk.",
        show_default="that of temporary files",
        metavar="DIR",
    ),
    replicas: int = Option(1, min=1, max=2, help="Nodes that hold each sample: 2 survives a loss."),
    keep: bool = Option(
        False, "--keep", help="Leave this node's share on the local disk, as a store."
    ),
    limit: str | None = Option(
        None, help="Read no more than this a second from the source (500M).", metavar="SIZE"
    ),
    address: str | None = Option(
        None, help="Where the others reach this node.", show_default="found out", metavar="ADDRESS"
    ),
    port: int = Option(0, min=0, max=65535, help="0: any that is free."),
    wait: float = Option(600.0, help="Seconds to wait for the other nodes.", metavar="SECONDS"),
    end: bool = Option(False, "--end", help="End the job that meets there."),
    reading: StageReading,
    storage: StorageOptions,
    output: FullOutput,
) -> int:
    """Copy a data set to the nodes' local disks, each sample once, and serve it until the job ends.

    Run it once on every node (srun --ntasks-per-node=1, or plainly with --nodes and --node-rank), in the
    background of the training: `headrace.open("headrace://job")` works at once. It ends with SIGTERM, or
    when somebody says `headrace stage --end`.
    """
    from headrace.base.job import is_first_on_node, which_node
    from headrace.job.meeting import Meeting, meeting_folder
    from headrace.job.server import NodeServer, StageOptions
    from headrace.runtime import end_signals

    meeting = Meeting(meeting_folder(meet))
    if end:
        return _end_job(output, meeting)
    place = which_node(node_rank, nodes)
    if place is None:
        how = "start it by srun, torchrun or mpirun, or pass --nodes and --node-rank"
        raise ValueError(f"nobody says which node this is: {how}")
    if node_rank is None and not is_first_on_node():
        output.remark("another process of this node stages: nothing to do for this one")
        return exit_codes.OK
    options = StageOptions(
        local=local, replicas=replicas, keep=keep, address=address, port=port, meet_s=wait,
        bytes_per_s=None if limit is None else bytes_of(limit), listing=reading,
        storage_options=storage,
    )  # fmt: skip
    given = source_of(source) if source else None
    server = NodeServer(given, meeting, place, options, output.remark)
    for number in end_signals():
        signal.signal(number, lambda *_: server.stop.set())
    from headrace.cli.progress import progress

    with server:
        server.plan()
        with progress(output, "staging") as tell:
            server.stage(tell)
        server.replicate()
        server.hold()
    if output.as_json:
        output.document({"action": "staged", "node": server.document})
    return exit_codes.OK


def _end_job(output: Output, meeting: Any) -> int:
    head = meeting.head()
    if head is None:
        folder = str(meeting.folder)
        output.result({"running": False, "folder": folder}, f"no job meets in {folder}")
        return exit_codes.FINDING
    meeting.end(session := head["session"])
    what = f"told the {head['nodes']} nodes of session {session} to end"
    output.result({"session": session, "ended": True}, what)
    return exit_codes.OK


def job(*, meet: Meet = None, output: JsonOutput) -> int:
    """Show how a job's staging is doing: its nodes, what is there, and who is gone."""
    from headrace.job.meeting import Meeting, meeting_folder
    from headrace.job.nodes import job_status

    status = job_status(Meeting(meeting_folder(meet)))
    if output.as_json:
        output.document({"job": status})
    else:
        _print_job(output, status)
    bad = any(node.state in ("gone", "failed", "missing") for node in status.nodes)
    return exit_codes.FINDING if bad else exit_codes.OK


def _print_job(output: Output, status: StagingStatus) -> None:
    name = status.job or status.session
    output.line(
        f"job {name}: {status.state}, {count_text(status.samples)} samples of {status.source}, "
        f"{bytes_text(status.written)} of {bytes_text(status.bytes)} there, "
        f"{bytes_text(status.source_bytes)} read from the source"
    )
    for node in status.nodes:
        line = f"node {node.node}: {node.state}"
        if node.host:
            line += f", {node.host} {node.address}, {count_text(node.samples)} samples"
            line += f", {bytes_text(node.written)} of {bytes_text(node.bytes)}"
        if node.copies_of:
            line += f", copies of node {', '.join(map(str, node.copies_of))}"
        if node.why:
            line += f": {node.why}"
        output.line(line)
