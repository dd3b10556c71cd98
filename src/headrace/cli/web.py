"""`headrace web`: live pages of a cluster, in a browser."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from headrace.cli.cluster import From, Where
from headrace.cli.options import JsonOutput, controller_options
from headrace.cli.reports import HistoryOption, history_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.web.views import ClusterLayout


_CONTROLLER = controller_options(
    "Its planes and policy: unix:PATH, http(s)://HOST:PORT, or `own`.",
    "--controller-token-file", "--tls-ca",
)  # fmt: skip


def web(
    *,
    listen: str = Option(
        "127.0.0.1:8470", metavar="HOST:PORT", help="Where to serve; port 0 is any that is free."
    ),
    demo: bool = Option(
        False, "--demo", help="Play a recorded cluster of 1,000 nodes and 10,000 jobs."
    ),
    history: HistoryOption = None,
    controller: Annotated[Any, _CONTROLLER],
    token_file: Path | None = Option(
        None,
        help="Who may sign in: a line `operator TOKEN` or `reader TOKEN` each.",
        metavar="FILE",
    ),
    public: bool = Option(
        False, "--public", help="Every user of this machine may look without a token."
    ),
    name: list[str] | None = Option(
        None,
        help="A name that browsers know this server by, behind a proxy.",
        metavar="NAME",
    ),
    store: list[str] | None = Option(
        None, help="A store that may be looked into.", metavar="STORE"
    ),
    run: list[str] | None = Option(
        None, help="A run that wrote a trace, or a folder of such.", metavar="DIR"
    ),
    executor: Where = None,
    source: From = None,
    output: JsonOutput,
) -> None:
    """Serve live pages: who waits for data and why, what weighs on file systems, policies, samples.

    The link that it prints signs you in, once; without a token nobody sees anything. Ctrl-C ends it.
    """
    from headrace.api import open as open_store
    from headrace.control.client import Client
    from headrace.web.access import Sessions, WebOptions
    from headrace.web.app import serve
    from headrace.web.demo import DemoSource
    from headrace.web.source import ClusterSource, ControllerPolicies, TracedRuns
    from headrace.web.stores import StoreBrowser

    options = WebOptions(
        listen=listen, token_file=token_file, public=public, names=tuple(name or ()),
        stores=tuple(store or ()), runs=tuple(run or ()),
    )  # fmt: skip
    if demo and options.address.loopback and not (options.stores or options.runs):
        options = dataclasses.replace(options, public=True)  # it shows nothing of anybody's

    with contextlib.ExitStack() as stack:
        sessions = Sessions(token_file)
        policies = state = None
        if controller is not None:
            # One each: a client is asked by one thread at a time.
            policies, client = ControllerPolicies(Client(controller)), Client(controller)
            stack.callback(client.close)
            state = functools.partial(client.document, "GET", "/v1/state")
        browser = StoreBrowser([open_store(path) for path in options.stores])
        if demo:
            looked: ClusterSource = DemoSource()
        else:
            looked = ClusterSource(
                history_of(history), state, _layouts(executor, source), folder_of=_folders(executor)
            )

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
            sys.stdout.flush()

        runs = TracedRuns(options.runs)
        serve(looked, sessions, options, stores=browser, policies=policies, runs=runs, ready=ready)


def _layouts(executor: Any, snapshot_file: Any) -> Callable[[], ClusterLayout] | None:
    """Looks at the scheduler; None: there is none here."""
    from headrace.cluster.executor import executor_name

    if snapshot_file is None and executor is None and executor_name() != "slurm":
        return None
    from headrace.cluster.plan import cluster_snapshot
    from headrace.web.views import nodes_of_scheduler

    return lambda: nodes_of_scheduler(cluster_snapshot(executor, snapshot_file, jobs=True))


_FOLDERS_KEPT_S = 60.0


def _folders(executor: Any) -> Callable[[str], Path | None]:
    """Asks the scheduler for a job's working directory, at most once a minute: it may not know the job yet."""
    from headrace.cluster.executor import executor as executor_named
    from headrace.errors import HeadraceError

    @functools.lru_cache(maxsize=1024)
    def asked(job: str, _minute: float) -> Path | None:
        try:
            statuses = executor_named(executor).status([job])[job]
        except HeadraceError:  # no such scheduler here
            return None
        return next((status.folder for status in statuses), None)

    return lambda job: asked(job, time.monotonic() // _FOLDERS_KEPT_S)
