"""The pages served in this process, on a port of their own, and requests to them as a browser would send."""

import asyncio
import contextlib
import http.client
import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from urllib.parse import quote

import headrace as hr
from headrace.control.policy import changes, parse_policy, policy_document
from headrace.control.service.http import HttpListener, HttpServer
from headrace.web.access import Sessions, WebOptions
from headrace.web.app import CONNECTIONS_MAX, Web
from headrace.web.demo import DemoSource
from headrace.web.live import Live
from headrace.web.source import TracedRuns
from headrace.web.stores import StoreBrowser
from tests_shared import until, write_photos

WAIT_S = 20.0

PROGRAM = """
import time
import headrace as hr

with hr.open("photos") as store:
    for _ in hr.loader(store, 4, trace="runs/one"):
        time.sleep(0.01)
"""


POLICY = """
version: 1
lease_s: 10
file_systems:
  scratch: {paths: [/scratch], capacity: {bytes_per_s: 240G, reads_per_s: 900k}}
  datasets: {paths: [/datasets], capacity: {bytes_per_s: 90G}}
users:
  "*": {weight: 1}
jobs:
  clip-pretrain: {weight: 4, guarantee: {bytes_per_s: 2G}}
  wav2vec2: {priority: low, cap: {bytes_per_s: 500M}}
"""


class FakeController:
    """A controller's policy, by which nobody goes."""

    endpoint = SimpleNamespace(url="a test")

    def __init__(self):
        self._policy, self._version = parse_policy(POLICY), 7

    def document(self, method, path, body=None):
        """The answer, as `control.client.Client.document` has it."""
        if method == "GET":
            return {"version": self._version, "policy": policy_document(self._policy)}
        policy = parse_policy((body or b"").decode())
        differences = [asdict(change) for change in changes(self._policy, policy)]
        applied = bool(differences) and not path.endswith("?dry_run=1")
        if applied:
            self._policy, self._version = policy, self._version + 1
        reply = {"version": self._version, "applied": applied, "changes": differences}
        return {**reply, "unknown": []}

    def close(self):
        """Nothing is held."""


def small_demo(**given):
    return DemoSource(**{"nodes": 24, "period_s": 0.2} | given)


def traced_run(folder):
    """A folder of runs with one in it, of a loader whose steps take a while."""
    write_photos(folder / "photos")
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, check=True, timeout=120)
    return folder / "runs"


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes

    @property
    def document(self):
        return json.loads(self.body)

    @property
    def message(self):
        return self.document["error"]["message"]


class Serving:
    """A server in a thread. `tokens` are the lines of its file; None: there is none."""

    def __init__(self, folder, *, source=None, tokens=None, stores=(), policies=None, clients_max=8,
                 clock=time.time, **options):  # fmt: skip
        self.operator, self.reader = secrets.token_hex(16), secrets.token_hex(16)
        path = None
        if tokens is not None:
            path = folder / "tokens"
            path.touch(mode=0o600)
            path.write_text(tokens.format(operator=self.operator, reader=self.reader))
        self.token_file = path
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        stores = StoreBrowser([hr.open(store) for store in stores])
        source = source or small_demo()
        given = WebOptions(token_file=path, **{"public": True} | options)
        self.sessions = Sessions(path, clock)
        self.web = Web(source, self.sessions, given, stores=stores, policies=policies,
                       runs=TracedRuns(given.runs), live=Live(source, clients_max))  # fmt: skip
        self.web.port = self.port
        self.server = HttpServer(self.web.app, [HttpListener(self.sock)], CONNECTIONS_MAX)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._store_browser, self._policies = stores, policies

    async def _run(self):
        self.loop = asyncio.get_running_loop()
        looking = asyncio.create_task(self.web.live.run())
        try:
            await self.server.serve()
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.loop.call_soon_threadsafe(self.web.live.close)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.sock.close()
        self._store_browser.close()
        if self._policies is not None:
            self._policies.close()

    def ask(self, path, method="GET", body=None, *, token=None, cookie=None, **headers):
        """One request on a connection of its own; `Sec_Fetch_Site` is the header Sec-Fetch-Site."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        if cookie is not None:
            sent["Cookie"] = cookie
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            headers_of_answer = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, headers_of_answer, answer.read())
        finally:
            connection.close()

    def sign_in(self, token):
        """The answer to the form, and the cookie that it set."""
        answer = self.ask("/signin", "POST", f"token={quote(token)}".encode(),
                          Content_Type="application/x-www-form-urlencoded", Origin=self.url,
                          Sec_Fetch_Site="same-origin")  # fmt: skip
        return answer, answer.headers.get("set-cookie", "").split(";")[0]

    def listen(self, path="/api/live", **headers):
        return Stream(self.port, path, headers)


class Stream:
    """Server-sent events, read one by one."""

    def __init__(self, port, path, headers):
        self.sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.sock.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{lines}\r\n".encode())
        self.file = self.sock.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        while self.file.readline().strip():
            pass
        self.rest = b""

    def _chunk(self):
        size = int(self.file.readline() or b"0", 16)
        data = self.file.read(size)
        self.file.readline()
        return data

    def next(self):
        """Name and document of the next event."""
        while True:
            while b"\n\n" in self.rest:
                message, _, self.rest = self.rest.partition(b"\n\n")
                lines = dict(
                    line.split(b": ", 1) for line in message.split(b"\n") if b": " in line[1:]
                )
                if b"event" in lines:
                    return lines[b"event"].decode(), json.loads(lines[b"data"])
            data = self._chunk()
            if not data:
                raise EOFError
            self.rest += data

    def close(self):
        self.file.close()
        self.sock.close()
