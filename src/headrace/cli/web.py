"""`headrace web`: live pages of a cluster, in a browser."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.cluster_options import From, Where
from headrace.cli.job_report import HistoryOption
from headrace.cli.output import Json, Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.cluster.snapshot import ClusterSnapshot
    from headrace.control.client import Client
    from headrace.web.policies import Desk
    from headrace.web.source import Source
    from headrace.web.stores import Shelf

__all__ = ["web"]


def web(
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve; port 0 is any that is free.")
    ] = "127.0.0.1:8470",
    demo: Annotated[
        bool, typer.Option("--demo", help="Play a recorded cluster of 1,000 nodes and 10,000 jobs.")
    ] = False,
    history: HistoryOption = None,
    controller: Annotated[
        str | None,
        typer.Option(help="Its planes and policy: unix:PATH, http(s)://HOST:PORT, or `own`."),
    ] = None,
    controller_token_file: Annotated[
        Path | None, typer.Option(help="Holds the controller's token, for TCP.")
    ] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Authority of its certificate.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Who may sign in: a line `operator TOKEN` or `reader TOKEN` each."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Every user of this machine may look without a token.")
    ] = False,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A name that browsers know this server by, behind a proxy. Repeat."),
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="A store that may be looked into. Repeat.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(help="A run that wrote a trace, or a folder of such. Repeat."),
    ] = None,
    executor: Where = None,
    source: From = None,
    as_json: Json = False,
) -> None:
    """Serve live pages: who waits for data and why, what weighs on file systems, policies, samples.

    The link that it prints signs you in, once; without a token nobody sees anything. Ctrl-C ends it.
    """
    options_of = _modules().options.WebOptions
    options = options_of(
        listen=listen, token_file=token_file, public=public, names=tuple(name or ()),
        stores=tuple(store or ()), runs=tuple(run or ()),
    )  # fmt: skip
    if demo and options.is_loopback and not (options.stores or options.runs):
        options = dataclasses.replace(options, public=True)  # it shows nothing of anybody's
    from headrace.web.process import serve
    from headrace.web.tokens import Doors
    from headrace.web.traced import Runs

    output = Output(as_json=as_json)
    with contextlib.ExitStack() as stack:
        doors = Doors(token_file)
        # One each: a client is asked by one thread at a time.
        clients = [_client(controller, controller_token_file, tls_ca) for _ in range(2)]
        desk = _desk(clients[0], demo)
        shelf = _shelf(stack, options.stores, demo)
        looked = _source(demo, history, clients[1], _snapshots(executor, source))

        def ready(address: str) -> None:
            token = doors.own.secret if doors.own else None
            link = f"{address}signin?once={doors.once}" if doors.once else address
            if as_json:
                output.document({"url": address, "link": link, "token": token, "demo": demo})
            else:
                what = "a recorded demo" if demo else "the cluster"
                output.line(f"{what} is at {link} (Ctrl-C ends it)")
                if token:
                    output.line(
                        f"  The link signs in once. Elsewhere: {address} with the token {token}"
                    )
            import sys

            sys.stdout.flush()

        serve(looked, doors, options, shelf=shelf, desk=desk, runs=Runs(options.runs), ready=ready)


def _modules() -> Any:
    """The package; a sentence where a package of the extra is missing."""
    try:
        import headrace.web.app
        import headrace.web.options
    except ModuleNotFoundError as e:
        from headrace.errors import ControlError

        raise ControlError(
            f"the pages need {e.name}.", next_step="pip install 'headrace[web]'"
        ) from e
    return headrace.web


def _client(controller: str | None, token_file: Path | None, ca: Path | None) -> Client | None:
    if controller is None:
        return None
    from headrace.control.client import Client, Endpoint

    return Client(Endpoint(url=controller, token_file=token_file, ca=ca))


def _desk(client: Client | None, demo: bool) -> Desk | None:
    from headrace.web.policies import ControllerDesk, DemoDesk

    if client is not None:
        return ControllerDesk(client)
    return DemoDesk() if demo else None


def _shelf(stack: contextlib.ExitStack, stores: tuple[str, ...], demo: bool) -> Shelf:
    from headrace.api import open as open_store
    from headrace.web.stores import Shelf

    paths = list(stores)
    if demo and not paths:
        import tempfile

        from headrace.web.demo.images import demo_store

        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-"))
        paths = [str(demo_store(Path(folder) / "pictures.hr"))]
    return Shelf([open_store(path) for path in paths])


def _source(
    demo: bool,
    history: str | None,
    client: Client | None,
    snapshot: Callable[[], ClusterSnapshot] | None,
) -> Source:
    if demo:
        from headrace.web.demo.source import DemoSource

        return DemoSource()
    from headrace.cli.job_report import history_of
    from headrace.web.watching import Watching

    return Watching(history_of(history), client, snapshot)


def _snapshots(executor: Any, snapshot_file: Any) -> Callable[[], ClusterSnapshot] | None:
    """Looks at the scheduler; None: there is none here."""
    from headrace.cluster.executors import executor_name

    if snapshot_file is None and executor is None and executor_name() != "slurm":
        return None
    from headrace.cli.cluster_submit import cluster_snapshot

    return lambda: cluster_snapshot(executor, snapshot_file, jobs=True)
