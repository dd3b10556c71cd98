"""A controller in a process of its own, and raw requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.control.messages import API
from headrace.runtime import RuntimeFolder
from tests_shared import until

WAIT_S = 30.0

PROGRAM = """
import logging, sys
from pathlib import Path
from headrace.control.service.app import ControlOptions, run
from headrace.errors import HeadraceError
from headrace.runtime import RuntimeFolder
logging.basicConfig(level="INFO")
given = {options!r}
try:
    run(RuntimeFolder(Path({folder!r}), "control"),
        ControlOptions(**{{k: Path(v) if k != "listen" else v for k, v in given.items()}}))
except (HeadraceError, ValueError) as e:
    sys.exit(str(e))
"""


class ControllerProcess:
    """A controller on a socket of its own, on TCP with a token, and on a socket for all users."""

    def __init__(self, parent, *, name="rt-control", db="control.db", wait=True, tls=None):
        self.parent = Path(parent)
        self.folder = RuntimeFolder(self.parent / name, "control")
        self.token, self.plane_token = secrets.token_hex(16), secrets.token_hex(16)
        tokens = self.parent / f"{name}.tokens"
        tokens.write_text(f"# who\n{self.token}\nplane {self.plane_token}\n")
        tokens.chmod(0o600)
        self.public = self.parent / f"{name}.sock"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        options = {
            "database": str(self.parent / db), "token_file": str(tokens),
            "listen": (f"tcp:127.0.0.1:{self.port}", f"unix:{self.public}"),
            **(tls or {}),
        }  # fmt: skip
        self.program = PROGRAM.format(options=options, folder=str(self.folder.path))
        self.start(wait=wait)

    def start(self, *, wait=True):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.program], stderr=subprocess.PIPE
        )
        if wait:
            until(self.serves)

    def serves(self):
        assert self.process.poll() is None, self.process.stderr.read().decode()
        with contextlib.suppress(OSError):
            return self.state()["pid"] == self.process.pid
        return False

    @property
    def url(self):
        return f"unix:{self.folder.socket}"

    def state(self):
        return request(self, "GET", "/v1/state")[1]

    def apply(self, text):
        status, answer = request(self, "PUT", "/v1/policy", text.encode())
        assert status == 200, answer
        return answer

    def plane(self, **fields):
        hello = {"api": API, "name": "n", "user": "u", "pid": 1, "instance": secrets.token_hex(16)}
        status, answer = request(self, "POST", "/v1/planes", json.dumps(hello | fields).encode())
        assert status == 200, answer
        return answer

    def kill(self):
        self.end(signal.SIGKILL)

    def end(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, log = self.process.communicate(timeout=WAIT_S)
        return log.decode()


class _Unix(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=WAIT_S)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(self.path)


def request(controller, method, path, body=None, *, tcp=False, token=None, public=False):
    """Status and JSON of one request on a connection of its own."""
    if tcp:
        connection = http.client.HTTPConnection("127.0.0.1", controller.port, timeout=WAIT_S)
    else:
        connection = _Unix(controller.public if public else controller.folder.socket)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


@pytest.fixture(scope="module")
def parent():
    """A folder whose path is short enough for sockets; nothing may be left in runtime folders."""
    folder = Path(tempfile.mkdtemp(prefix="hrc-"))
    folder.chmod(0o755)
    yield folder
    left = [p.name for p in folder.glob("*-control/*") if p.name != "control.log"]
    left += [p.name for p in folder.glob("*.sock")]
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture(scope="module")
def controller(parent):
    """A controller that a module's tests share: they leave it as it was, but for its policy."""
    one = ControllerProcess(parent)
    yield one
    one.end()


@pytest.fixture
def own(tmp_path):
    """Makes controllers that a test may kill; all are ended after it."""
    place = Path(tempfile.mkdtemp(prefix="hrc-"))
    place.chmod(0o755)
    processes = []

    def make(**options):
        processes.append(ControllerProcess(place, **options))
        return processes[-1]

    make.parent = place
    yield make
    for one in processes:
        one.end()
    for rest in place.glob("*-control"):
        assert [p.name for p in rest.iterdir() if p.name != "control.log"] in (
            [],
            ["lock", "socket"],
        )
    shutil.rmtree(place)


def fill_up(path):
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
        while True:
            filler.write(bytes(4096))


def uid_of_another():
    return os.geteuid() + 12345
