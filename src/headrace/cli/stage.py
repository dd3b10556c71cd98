"""`headrace stage` and `headrace job`: one data set on all nodes' local disks, for the job's duration."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.base.text import bytes_of, bytes_text, count_text
from headrace.cli import exit_codes
from headrace.cli.output import Json, Output, Quiet, Verbose
from headrace.cli.storage import StorageOptions, storage_options
from headrace.cli.writing import (
    Column,
    Extensions,
    Label,
    PrefixNames,
    Workers,
    listing_of,
    source_of,
)

if TYPE_CHECKING:
    from headrace.job.status import JobStatus

__all__ = ["job", "stage"]

Meet = Annotated[
    str | None,
    typer.Option(
        "--meet", metavar="FOLDER", envvar="HEADRACE_JOB_FOLDER",
        help="Where the job's nodes meet: a folder of its own that all of them see.",
    ),
]  # fmt: skip


def stage(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            help="What is staged: whatever `index` takes, or a store.", metavar="SOURCE..."
        ),
    ] = None,
    *,
    meet: Meet = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="How many; default: as srun, torchrun or MPI say.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of them this is.")] = None,
    local: Annotated[
        str | None, typer.Option(help="Folder on the local disk. Default: that of temporary files.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=2, help="Nodes that hold each sample: 2 survives a loss.")
    ] = 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave this node's share on the local disk, as a store.")
    ] = False,
    limit: Annotated[
        str | None, typer.Option(help="Read no more than this a second from the source (500M).")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Where the others reach this node. Default: found out.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the other nodes.")] = 600.0,
    end: Annotated[bool, typer.Option("--end", help="End the job that meets there.")] = False,
    extensions: Extensions = None,
    prefix_names: PrefixNames = False,
    column: Column = None,
    label: Label = None,
    workers: Workers = None,
    storage: StorageOptions = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Copy a data set to the nodes' local disks, each sample once, and serve it until the job ends.

    Run it once on every node (srun --ntasks-per-node=1, or plainly with --nodes and --node-rank), in the
    background of the training: `headrace.open("headrace://job")` works at once. It ends with SIGTERM, or
    when somebody says `headrace stage --end`.
    """
    from headrace.base.job import is_first_on_node, which_node
    from headrace.job.meeting import Meeting, meeting_folder
    from headrace.job.server import NodeServer, StageOptions

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    meeting = Meeting(meeting_folder(meet))
    if end:
        return _end(output, meeting)
    place = which_node(node_rank, nodes)
    if place is None:
        raise ValueError(
            "nobody says which node this is: start it by srun, torchrun or mpirun, or pass --nodes and "
            "--node-rank"
        )
    if node_rank is None and not is_first_on_node():
        output.remark("another process of this node stages: nothing to do for this one")
        return exit_codes.OK
    listing = listing_of(
        extensions=extensions,
        prefix_names=prefix_names,
        column=column,
        label=label,
        workers=workers,
    )
    options = StageOptions(
        local=local, replicas=replicas, keep=keep, address=address, port=port, meet_s=wait,
        bytes_per_s=None if limit is None else bytes_of(limit), listing=listing,
        storage_options=storage_options(storage),
    )  # fmt: skip
    given = source_of(source) if source else None
    server = NodeServer(given, meeting, place, options, output.remark)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop.set())
    from headrace.cli.progress import progress

    with server:
        server.plan()
        with progress(output, "staging") as tell:
            server.stage(tell)
        server.replicate()
        server.hold()
    if as_json:
        output.document({"action": "staged", "node": server.document})
    return exit_codes.OK


def _end(output: Output, meeting: Any) -> int:
    head = meeting.head()
    if head is None:
        if output.as_json:
            output.document({"running": False, "folder": str(meeting.folder)})
        else:
            output.line(f"no job meets in {meeting.folder}")
        return exit_codes.FINDING
    meeting.end(head["session"])
    if output.as_json:
        output.document({"session": head["session"], "ended": True})
    else:
        output.line(f"told the {head['nodes']} nodes of session {head['session']} to end")
    return exit_codes.OK


def job(*, meet: Meet = None, as_json: Json = False) -> int:
    """Show how a job's staging is doing: its nodes, what is there, and who is gone."""
    from headrace.job.meeting import Meeting, meeting_folder
    from headrace.job.status import job_status

    output = Output(as_json=as_json)
    found = job_status(Meeting(meeting_folder(meet)))
    if as_json:
        output.document({"job": found})
    else:
        _print(output, found)
    bad = any(node.state in ("gone", "failed", "missing") for node in found.nodes)
    return exit_codes.FINDING if bad else exit_codes.OK


def _print(output: Output, found: JobStatus) -> None:
    name = found.job or found.session
    output.line(
        f"job {name}: {found.state}, {count_text(found.samples)} samples of {found.source}, "
        f"{bytes_text(found.written)} of {bytes_text(found.bytes)} there, "
        f"{bytes_text(found.source_bytes)} read from the source"
    )
    for node in found.nodes:
        line = f"node {node.node}: {node.state}"
        if node.host:
            line += f", {node.host} {node.address}, {count_text(node.samples)} samples"
            line += f", {bytes_text(node.written)} of {bytes_text(node.bytes)}"
        if node.copies_of:
            line += f", copies of node {', '.join(map(str, node.copies_of))}"
        if node.why:
            line += f": {node.why}"
        output.line(line)
