"""What listens: HTTP routes with who may use them, metrics, the C library, and messages between processes."""

from __future__ import annotations

import asyncio
import enum
import http.client
import re
import secrets
import typing
from typing import TYPE_CHECKING, Any

import msgspec

from headrace import capi
from headrace.base.causes import Cause
from headrace.base.peers import address_of
from headrace.control import messages
from headrace.control.prometheus import MetricsServer
from headrace.control.service import app as control_metrics
from headrace.control.service.app import ControlService
from headrace.control.service.auth import TokenFile
from headrace.control.service.database import Database
from headrace.node import daemon as node_daemon
from headrace.node import wire
from headrace.telemetry import metrics as agent_metrics
from headrace.web.access import Sessions, WebOptions
from headrace.web.app import Web
from headrace.web.demo import DemoSource
from headrace.web.stores import StoreBrowser

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

METHODS = ("GET", "POST", "PUT", "DELETE")


def metrics_text() -> str:
    """Each metric of each daemon, its kind and labels, and what a cause is called."""
    tables = {
        "headrace agent": agent_metrics.TABLE,
        "headrace control": control_metrics.TABLE,
        "headrace node": node_daemon.TABLE,
    }
    lines = []
    for daemon, table in tables.items():
        rows = sorted((m.name, m.kind, ",".join(m.labels) or "-") for m in table)
        lines += [daemon, *(f"  {' '.join(row)}" for row in rows), ""]
    lines += ["The label `cause`", *(f"  {cause}: {cause.phrase}" for cause in Cause), ""]
    return "\n".join(lines)


def routes_text(folder: Path) -> str:
    """Each route, and the status that callers with different rights get for a request without a body."""
    lines = [
        "headrace web --public: whoever asks, a reader's token, an operator's; the same without --public"
    ]
    web = [_web(folder / "open", public=True), _web(folder / "private", public=False)]
    lines += _asked([(app, tokens) for app, tokens in web])
    lines += ["", "headrace control: whoever asks, a plane's token, an operator's"]
    database = Database(folder / "control.db")
    lines += _asked([_control(folder / "control", database)])
    database.close()
    lines += ["", "--metrics of headrace agent, control and node"]
    lines += _metrics_server()
    return "\n".join([*lines, ""])


def _tokens(folder: Path, *roles: str) -> tuple[Path, list[str | None]]:
    """A file of tokens, and what callers show: nothing, or the token of each role."""
    folder.mkdir()
    tokens = {role: secrets.token_hex(16) for role in roles}
    path = folder / "tokens"
    path.touch(mode=0o600)
    path.write_text("".join(f"{role} {token}\n" for role, token in tokens.items()))
    return path, [None, *tokens.values()]


def _web(folder: Path, *, public: bool) -> tuple[Any, list[str | None]]:
    path, tokens = _tokens(folder, "reader", "operator")
    options = WebOptions(token_file=path, public=public)
    source = DemoSource(nodes=24, period_s=3600.0)
    return Web(source, Sessions(path), options, stores=StoreBrowser([])).app, tokens


def _control(folder: Path, database: Database) -> tuple[Any, list[str | None]]:
    path, tokens = _tokens(folder, "plane", "operator")
    return ControlService(database, tokens=TokenFile(path, ("operator", "plane"))).app, tokens


def _asked(servers: list[tuple[Any, list[str | None]]]) -> Iterator[str]:
    routes = getattr(servers[0][0], "app", servers[0][0]).routes
    for path, methods in sorted((r.path, sorted(set(r.methods) - {"HEAD"})) for r in routes):
        for method in methods:
            statuses = [
                str(asyncio.run(_status(app, method, path, token)))
                for app, tokens in servers
                for token in tokens
            ]
            yield f"  {method} {path} {' '.join(statuses)}"


async def _status(app: Any, method: str, path: str, token: str | None) -> int:
    """The status of the answer of an ASGI application; what comes after it is not waited for."""
    target = re.sub(r"\{[^}]*\}", "0", path)
    headers = [(b"host", b"127.0.0.1:8470"), (b"x-headrace", b"1")]
    if token is not None:
        headers.append((b"authorization", f"Bearer {token}".encode()))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "path": target, "raw_path": target.encode(), "query_string": b"", "headers": headers,
        "scheme": "http", "server": ("127.0.0.1", 8470), "client": ("127.0.0.1", 1), "root_path": "",
        "state": {},
    }  # fmt: skip
    status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    bodies = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if bodies:
            return bodies.pop()
        await status
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and not status.done():
            status.set_result(message["status"])

    task = asyncio.create_task(app(scope, receive, send))
    await asyncio.wait({task, status}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return status.result()


def _metrics_server() -> Iterator[str]:
    server = MetricsServer(address_of("127.0.0.1:0"), lambda: b"", lambda: True)
    try:
        for path in ("/", "/healthz", "/metrics"):
            for method in METHODS:
                connection = http.client.HTTPConnection(
                    server.address.host, server.address.port, timeout=20
                )
                connection.request(method, path)
                yield f"  {method} {path} {connection.getresponse().status}"
                connection.close()
    finally:
        server.close()


def c_text() -> str:
    """The header without its comments, and the library's version."""
    header = (capi.include_dir() / "headrace.h").read_text()
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", header, flags=re.DOTALL)
    lines = (re.sub(r"\s+", " ", line).rstrip() for line in code.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def messages_text() -> str:
    """Each message between processes: its tag, fields, types and defaults."""
    lines = [f"node, protocol {wire.PROTOCOL}", *_structs(wire), ""]
    lines += [f"control, API {messages.API}", *_structs(messages), ""]
    return "\n".join(lines)


def _structs(module: Any) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if (
            isinstance(value, type)
            and issubclass(value, enum.Enum)
            and value.__module__ == module.__name__
        ):
            yield f"  {name}: {', '.join(f'{each.name}={each.value}' for each in value)}"
        if not (isinstance(value, type) and issubclass(value, msgspec.Struct)):
            continue
        if value.__module__ != module.__name__:
            continue
        config = value.__struct_config__
        tag = f" tag {config.tag!r}" if config.tag is not None else ""
        yield f"  {name}{tag}{' array' if config.array_like else ''}"
        for field in msgspec.structs.fields(value):
            default = "" if field.required else f" = {_default(field)}"
            yield f"    {field.encode_name}: {_type(field.type)}{default}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return repr(field.default)
    return f"{getattr(field.default_factory, '__name__', field.default_factory)}()"


def _type(kind: Any) -> str:
    """A type as the reader of a diff wants it: without modules."""
    bounds = [m for m in getattr(kind, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
    origin = typing.get_origin(kind)
    text = (
        _type(typing.get_args(kind)[0])
        if bounds
        else kind.__name__
        if isinstance(kind, type) and origin is None
        else re.sub(r"\b[\w.]+\.(?=\w)", "", str(kind))
        if not typing.get_args(kind)
        else f"{getattr(origin, '__name__', 'Union')}[{', '.join(map(_type, typing.get_args(kind)))}]"
    )
    limits = [
        f"{name} {value}"
        for meta in bounds
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
        if (value := getattr(meta, name)) is not None
    ]
    return f"{text} ({', '.join(limits)})" if limits else text
