"""Programs as the daemon sees them: a launcher's connection, a board, and reports in a ring.

The shim is not needed: what it would write into the ring is written here, by the ring's layout.
"""

import mmap
import os
import struct
import time

import pytest

from headrace import _native
from headrace.node.link import Link
from headrace.node.wire import DaemonReport, Files, FilesAsked, FilesReady, ReplyStatus
from node.conftest import WAIT_S, daemon, folder, until

__all__ = ["Program", "daemon", "folder", "make_files", "program", "until"]

ORIGINAL, COPY, WRITING, UNKNOWN, REFUSED = (
    _native.OpenRing.ORIGINAL,
    _native.OpenRing.COPY,
    _native.OpenRing.WRITING,
    _native.OpenRing.UNKNOWN,
    _native.OpenRing.REFUSED,
)
HEAD_AT, SLOTS_AT = 64, 320
"""See native/preload/ring_layout.h."""


def make_files(root, count, size=1000, folders=5):
    """Small files, each with bytes of its own; returns their paths, sorted. Not changed just now."""
    paths = []
    for k in range(count):
        path = root / f"n{k % folders}" / f"{k:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(k, size))
        paths.append(path)
    return sorted(paths)


def content(k, size=1000):
    return (b"%08d" % k) * (size // 8)


class Program:
    """A launcher with a program that opens files; in the process of the daemon or not."""

    def __init__(self, folder, *roots, job="job", order=None, seed=None, simulate=None):
        self.link = Link(folder, job)
        self.ticket = self.link.new_ticket()
        self.link.send(
            Files(
                self.ticket, [os.fsencode(root) for root in roots],
                None if order is None else os.fsencode(order), seed, False, simulate,
            )
        )  # fmt: skip
        self.answers = []
        self._ring = None
        self._place = 0

    def ready(self):
        """Wait for a board."""
        while True:
            answer = self.link.wait(FilesReady, WAIT_S)
            self.answers.append(answer)
            if answer.status is not ReplyStatus.OK:
                return answer
            if answer.board_ino:
                board, ring = self.link.take_fds(2)
                assert os.fstat(board).st_ino == answer.board_ino
                assert os.fstat(ring).st_ino == answer.ring_ino
                os.close(board)
                if self._ring is not None:
                    self._ring.close()
                self._ring = mmap.mmap(ring, 0)
                os.close(ring)
                self._place = 0
                return answer

    def report(self):
        """The figures of the run."""
        self.link.send(FilesAsked(self.link.new_ticket()))
        import json

        return json.loads(self.link.wait(DaemonReport, WAIT_S).json)

    def opened(self, files, what=ORIGINAL):
        """Report opens, as the shim would."""
        ring = self._ring
        capacity = struct.unpack_from("<Q", ring, 16)[0]
        for file in files:
            place = struct.unpack_from("<Q", ring, HEAD_AT)[0]
            tag = (place + 1) << 32
            at = SLOTS_AT + (place % capacity) * 16
            struct.pack_into("<Q", ring, at, tag | (file & 0xFFFFFFFF))
            struct.pack_into("<Q", ring, at + 8, tag | (os.getpid() << 4 & 0xFFFFFFF0) | what)
            # Last: a report that is begun and not finished within milliseconds is given up.
            struct.pack_into("<Q", ring, HEAD_AT, place + 1)

    def seen(self, count):
        """Wait until the daemon has taken so many opens in."""

        def enough():
            report = self.report()
            return sum(report["opens"].values()) + report["written"] >= count

        until(enough)

    def close(self):
        self.link.close()
        if self._ring is not None:
            self._ring.close()


@pytest.fixture
def program(folder):
    """Makes programs."""
    programs = []

    def start(*roots, **options):
        programs.append(Program(folder, *roots, **options))
        return programs[-1]

    yield start
    for one in programs:
        one.close()


def run_of(server, nth=0):
    """A run of a daemon in this process."""
    return list(server.files._served.values())[nth].run


def copies_of(server, nth=0):
    """The copies of a root."""
    return list(server.files._roots.values())[nth].copies


def bytes_of(copy, copies):
    """What a copy holds."""
    if copy.tier == "ram":
        return os.pread(copy.fd, copy.row[2] + 1, 0)
    with open(copies.disk.path_of(copy.on_disk), "rb") as f:
        return f.read()


def keep_quotas(monkeypatch, *roots):
    """The test says how much memory roots have: the daemon, which shares it out each second, does not."""
    for root in roots:
        monkeypatch.setattr(root, "set_quota", lambda _: None)


def settle():
    """Let a file's clock tick: what was changed just now may be changed again unseen."""
    time.sleep(0.03)
