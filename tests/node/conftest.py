"""Daemons and clients to be tested: in threads where nothing is killed, in processes where it is."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

import headrace as hr
from headrace.node import link as links
from headrace.node import reads
from headrace.node.daemon import NodeOptions, ask_status
from headrace.node.link import Link, LinkLost
from headrace.node.server import Server
from headrace.runtime import RuntimeFolder
from plane import conftest as plane_stores
from tests_shared import until

WAIT_S = 20.0
PATIENCE_S = 60.0

packed, store = plane_stores.packed, plane_stores.store


@pytest.fixture
def folder(monkeypatch):
    """A runtime folder, whose path is short; nothing may be left in it but a log."""
    parent = Path(tempfile.mkdtemp(prefix="hr-"))
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(parent / "rt"))
    monkeypatch.delenv("HEADRACE_JOB", raising=False)
    yield RuntimeFolder(parent / "rt")
    left = [str(p.relative_to(parent)) for p in parent.rglob("*") if p.name != "node.log"]
    shutil.rmtree(parent)
    assert left in ([], ["rt"])


def be_patient(patch=setattr):
    """A daemon that waits for a processor is not lost: clients of this process wait for it."""
    for module in (links, reads):
        patch(module, "ALIVE_S", PATIENCE_S)
    patch(reads, "FIRST_S", PATIENCE_S)


@pytest.fixture(autouse=True)
def _patient(request, monkeypatch):
    if "impatient" not in request.fixturenames:
        be_patient(monkeypatch.setattr)


@pytest.fixture
def impatient():
    """For tests of a daemon that does not answer: clients wait no longer than they do."""


def _in_loop(server, thread, function):
    """What the daemon's loop changes is looked at there, and not in the middle of a change."""

    @functools.wraps(function)
    def ask(*arguments):
        if threading.current_thread() is thread or not thread.is_alive():
            return function(*arguments)
        answer = Future()

        def look():
            try:
                answer.set_result(function(*arguments))
            except BaseException as e:  # noqa: BLE001 - it is the test's
                answer.set_exception(e)

        server.call_soon(look)
        return answer.result(WAIT_S)

    return ask


@contextlib.contextmanager
def serving(folder, **options):
    """A daemon in a thread of this process."""
    options = {"ram_bytes": 64 << 20, "yielding": False} | options
    claim = folder.claim()
    server = Server(claim, NodeOptions(**options))
    thread = threading.Thread(target=server.run)
    server.describe = _in_loop(server, thread, server.describe)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(WAIT_S)
        server.close()
        claim.release()
        assert not thread.is_alive()


PROGRAM = """
{limits}
import logging, sys
from headrace.errors import NodeError
from headrace.node.daemon import run
from headrace.node.daemon import NodeOptions
from headrace.runtime import runtime_folder
logging.basicConfig(level="INFO")
try:
    run(runtime_folder(), NodeOptions(**({{"ram_bytes": 64 << 20}} | {options!r})))
except NodeError as e:
    sys.exit(str(e))
"""


class DaemonProcess:
    """A daemon in a process of its own."""

    def __init__(self, folder, *, limits="", wait=True, **options):
        self.folder = folder
        self.environment = os.environ | {"HEADRACE_RUNTIME_DIR": str(folder.path)}
        program = PROGRAM.format(limits=limits, options=options)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], env=self.environment, stderr=subprocess.PIPE
        )
        if wait:
            until(self.serves)

    def serves(self):
        """Whether it is this process that rules."""
        assert self.process.poll() is None, self.process.stderr.read().decode()
        with contextlib.suppress(FileNotFoundError, LinkLost):
            return ask_status(self.folder)["pid"] == self.process.pid
        return False

    def status(self):
        return ask_status(self.folder)

    def end(self, number=None):
        """End it and return what it logged."""
        if number is None:
            self.process.terminate()
        else:
            self.process.send_signal(number)
        _, log = self.process.communicate(timeout=WAIT_S)
        return log.decode()


@pytest.fixture
def daemon(folder):
    """Starts daemons in processes; all are ended after the test."""
    started = []

    def start(**options):
        started.append(DaemonProcess(folder, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate(timeout=WAIT_S)
    with contextlib.suppress(Exception):
        folder.claim().release()


@pytest.fixture
def link(folder):
    """Makes clients that speak the protocol by themselves."""
    links = []

    def connect(job="test"):
        links.append(Link(folder, job))
        return links[-1]

    yield connect
    for one in links:
        one.close()
    links.clear()


def node_loader(store, batch=32, *, seed=3, **options):
    return hr.loader(store, batch, seed=seed, plane="node", **options)


def report_of(loader):
    """How a loader fares with the daemon."""
    (stage,) = [s for s in loader.stages if s.name == "node"]
    return stage.report()


def seen(loader):
    """Everything of an epoch that a consumer can see."""
    return [
        (b.epoch, b.position, b.indices.tolist(), b.labels.tolist(), [bytes(s) for s in b])
        for b in loader
    ]
