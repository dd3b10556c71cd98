"""Servers on loopback in a process of their own: their Python must not hold up the loader's.

    python -m benchmarks.verdict_parts.servers http FOLDER DELAY_S BYTES_PER_S
    python -m benchmarks.verdict_parts.servers nvme FOLDER DELAY_S BYTES_PER_S

Prints the URL of the store in FOLDER, serves it with that delay and at most that rate (0: any) of
bytes over all connections, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]


class Pace:
    """A rate of bytes that all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def due_s(self, count: int, delay_s: float) -> float:
        """When so many bytes may go, if they came now."""
        with self._lock:
            now = time.monotonic()
            if self._rate > 0:
                self._free_s = max(now, self._free_s) + count / self._rate
                return self._free_s + delay_s
            return now + delay_s


def _http(folder: Path, delay_s: float, pace: Pace) -> str:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = folder / Path(self.path.lstrip("/")).name
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            first, last = 0, size - 1
            given = self.headers.get("Range")
            if given:
                begin, _, end = given.partition("=")[2].partition("-")
                first, last = int(begin), min(size - 1, int(end) if end else size - 1)
            with path.open("rb") as f:
                f.seek(first)
                data = f.read(last - first + 1) if body else b""
            time.sleep(max(0.0, pace.due_s(len(data), delay_s) - time.monotonic()))
            self.send_response(206 if given else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{size}"')
            if given:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/store.hr"


def _nvme(folder: Path, delay_s: float, pace: Pace) -> str:
    from headrace.fabric.subsystem import Subsystem
    from headrace.fabric.target import Target

    subsystem = Subsystem("nqn.2026-11.io.example:slow")
    subsystem.add_store(folder)
    target = Target([subsystem], ("127.0.0.1", 0))
    target.__enter__()
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(
        target=_between, args=(server, target.address, delay_s, pace), daemon=True
    ).start()
    return f"nvme+tcp://127.0.0.1:{server.getsockname()[1]}/{subsystem.nqn}?ns=1"


def _between(server: socket.socket, address: Any, delay_s: float, pace: Pace) -> None:
    while True:
        near, _ = server.accept()
        far = socket.create_connection(address)
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pass_on, args=(near, far, 0.0, Pace(0)), daemon=True).start()
        threading.Thread(target=_pass_on, args=(far, near, delay_s, pace), daemon=True).start()


def _pass_on(a: socket.socket, b: socket.socket, delay_s: float, pace: Pace) -> None:
    """What comes from one side goes to the other when it is due; more may come meanwhile."""
    waiting: deque[tuple[float, bytes]] = deque()
    there = threading.Semaphore(0)

    def send() -> None:
        while True:
            there.acquire()
            due_s, data = waiting.popleft()
            time.sleep(max(0.0, due_s - time.monotonic()))
            try:
                b.sendall(data)
            except OSError:
                return

    threading.Thread(target=send, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := a.recv(1 << 16):
            waiting.append((pace.due_s(len(data), delay_s), data))
            there.release()


@contextmanager
def serving(
    kind: str, folder: Path, delay_s: float = 0.0, bytes_per_s: float = 0.0
) -> Iterator[str]:
    """Serve the store in `folder` slowly, from another process; yields its URL."""
    command = [sys.executable, "-m", "benchmarks.verdict_parts.servers", kind, str(folder),
               str(delay_s), str(bytes_per_s)]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(10)


def main() -> None:
    kind, folder, delay_s, bytes_per_s = sys.argv[1:]
    serve = {"http": _http, "nvme": _nvme}[kind]
    print(serve(Path(folder), float(delay_s), Pace(float(bytes_per_s))), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
