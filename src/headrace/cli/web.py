"""`headrace web`: live pages of a cluster, in a browser."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from headrace.cli.cluster import From, Where
from headrace.cli.options import JsonOutput
from headrace.cli.reports import HistoryOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.cluster.snapshot import ClusterSnapshot
    from headrace.control.client import Client
    from headrace.web.live import PageSource
    from headrace.web.policies import Policies
    from headrace.web.stores import StoreBrowser


def web(
    *,
    listen: str = Option(
        "127.0.0.1:8470", metavar="HOST:PORT", help="Where to serve; port 0 is any that is free."
    ),
    demo: bool = Option(
        False, "--demo", help="Play a recorded cluster of 1,000 nodes and 10,000 jobs."
    ),
    history: HistoryOption = None,
    controller: str | None = Option(
        None, help="Its planes and policy: unix:PATH, http(s)://HOST:PORT, or `own`."
    ),
    controller_token_file: Path | None = Option(
        None, help="Holds the controller's token, for TCP."
    ),
    tls_ca: Path | None = Option(None, help="Authority of its certificate."),
    token_file: Path | None = Option(
        None, help="Who may sign in: a line `operator TOKEN` or `reader TOKEN` each."
    ),
    public: bool = Option(
        False, "--public", help="Every user of this machine may look without a token."
    ),
    name: list[str] | None = Option(
        None, help="A name that browsers know this server by, behind a proxy. Repeat."
    ),
    store: list[str] | None = Option(None, help="A store that may be looked into. Repeat."),
    run: list[str] | None = Option(
        None, help="A run that wrote a trace, or a folder of such. Repeat."
    ),
    executor: Where = None,
    source: From = None,
    output: JsonOutput,
) -> None:
    """Serve live pages: who waits for data and why, what weighs on file systems, policies, samples.

    The link that it prints signs you in, once; without a token nobody sees anything. Ctrl-C ends it.
    """
    try:
        from headrace.web.access import Sessions
        from headrace.web.server import WebOptions, serve
        from headrace.web.traced import TracedRuns
    except ModuleNotFoundError as e:
        from headrace.errors import ControlError

        raise ControlError(
            f"the pages need {e.name}.", next_step="pip install 'headrace[web]'"
        ) from e
    options = WebOptions(
        listen=listen, token_file=token_file, public=public, names=tuple(name or ()),
        stores=tuple(store or ()), runs=tuple(run or ()),
    )  # fmt: skip
    if demo and options.is_loopback and not (options.stores or options.runs):
        options = dataclasses.replace(options, public=True)  # it shows nothing of anybody's

    with contextlib.ExitStack() as stack:
        sessions = Sessions(token_file)
        # One each: a client is asked by one thread at a time.
        clients = [_client(controller, controller_token_file, tls_ca) for _ in range(2)]
        policies = _policies(clients[0], demo)
        browser = _store_browser(stack, options.stores, demo)
        looked = _source(demo, history, clients[1], _snapshots(executor, source))

        def ready(address: str) -> None:
            token = sessions.own.secret if sessions.own else None
            link = f"{address}signin?once={sessions.once}" if sessions.once else address
            if output.as_json:
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

        runs = TracedRuns(options.runs)
        serve(looked, sessions, options, stores=browser, policies=policies, runs=runs, ready=ready)


def _client(controller: str | None, token_file: Path | None, ca: Path | None) -> Client | None:
    if controller is None:
        return None
    from headrace.control.client import Client, Endpoint

    return Client(Endpoint(url=controller, token_file=token_file, ca=ca))


def _policies(client: Client | None, demo: bool) -> Policies | None:
    from headrace.web.policies import ControllerPolicies, DemoPolicies

    if client is not None:
        return ControllerPolicies(client)
    return DemoPolicies() if demo else None


def _store_browser(
    stack: contextlib.ExitStack, stores: tuple[str, ...], demo: bool
) -> StoreBrowser:
    from headrace.api import open as open_store
    from headrace.web.stores import StoreBrowser

    paths = list(stores)
    if demo and not paths:
        import tempfile

        from headrace.web.demo import demo_store

        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-"))
        paths = [str(demo_store(Path(folder) / "pictures.hr"))]
    return StoreBrowser([open_store(path) for path in paths])


def _source(
    demo: bool,
    history: str | None,
    client: Client | None,
    snapshot: Callable[[], ClusterSnapshot] | None,
) -> PageSource:
    if demo:
        from headrace.web.demo import DemoSource

        return DemoSource()
    from headrace.cli.reports import history_of
    from headrace.web.watching import ClusterSource

    return ClusterSource(history_of(history), client, snapshot)


def _snapshots(executor: Any, snapshot_file: Any) -> Callable[[], ClusterSnapshot] | None:
    """Looks at the scheduler; None: there is none here."""
    from headrace.cluster.executor import executor_name

    if snapshot_file is None and executor is None and executor_name() != "slurm":
        return None
    from headrace.cli.cluster_submit import cluster_snapshot

    return lambda: cluster_snapshot(executor, snapshot_file, jobs=True)
