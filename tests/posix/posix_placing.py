"""A plane in the test's own process: a board of all files below a root, with copies in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from headrace import _native
from headrace.posix.attachment import Page
from headrace.posix.launch import library

NS = 1_000_000_000


def rows_of(paths):
    """What a board wants to know of files."""
    stats, full = [], []
    for path in paths:
        s = os.stat(path)
        stats.append((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns))
        full.append(
            (
                s.st_mode,
                s.st_nlink,
                s.st_uid,
                s.st_gid,
                s.st_atime_ns,
                s.st_ctime_ns,
                s.st_blocks,
                s.st_blksize,
                os.path.islink(path),
            )
        )
    return np.array(stats, np.int64).reshape(-1, 4), np.array(full, np.int64).reshape(-1, 9)


def sealed_copy(data):
    """A memfd that nobody can change."""
    import fcntl

    fd = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 15)  # SEAL, SHRINK, GROW, WRITE
    return fd


class Plane:
    """Serves a root to child processes, from memory or from a tier's folder.

    Args:
        root: a folder.
        immutable: as the board's.
        tier: a folder to keep copies in, instead of in memory.
        content: what a copy holds, by path; the file's bytes if not given.
    """

    def __init__(self, root, *, immutable=False, tier=None, content=None):
        self.root = Path(root)
        self.page = Page([str(root)])
        self.paths = sorted(p for p in Path(os.path.realpath(root)).rglob("*") if p.is_file())
        stats, full = rows_of(self.paths)
        tiers = [] if tier is None else [os.fsencode(tier)]
        real = os.path.realpath(root)
        spelled = {str(root), real}
        self.board = _native.FileBoard(
            [os.fsencode(p) for p in self.paths],
            stats,
            full,
            roots=[(os.fsencode(s), os.fsencode(real)) for s in spelled],
            tiers=tiers,
            immutable=immutable,
        )
        self.ring = _native.OpenRing(1 << 12)
        self.fds = []
        for number, path in enumerate(self.paths):
            data = path.read_bytes() if content is None else content(path)
            if tier is None:
                self.fds.append(sealed_copy(data))
                self.board.place(number, self.fds[-1])
            else:
                copy = Path(tier) / f"{number}.copy"
                copy.write_bytes(data)
                self.board.place_path(number, os.fsencode(copy))
        self.publish()

    def publish(self):
        """Name the board and the ring on the page."""
        self.page.publish(
            os.getpid(),
            (os.dup(self.board.fd), self.board.inode),
            (os.dup(self.ring.fd), self.ring.inode),
        )

    def number(self, path):
        return self.board.find(os.fsencode(os.path.realpath(path)))

    @property
    def environment(self):
        return os.environ | {
            "LD_PRELOAD": str(library("preload")),
            "HEADRACE_RUN": self.page.address,
        }

    @property
    def counts(self):
        return self.ring.counts

    def run(self, command, **options):
        """Run a command under the shim."""
        return run(command, env=self.environment, **options)

    def python(self, program, *arguments, **options):
        """Run a Python program under the shim."""
        return self.run([sys.executable, "-c", program, *map(str, arguments)], **options)

    def close(self):
        self.page.close()
        for fd in self.fds:
            os.close(fd)
        self.__dict__.clear()  # board and ring too, whoever holds the plane


def run(command, **options):
    """A command's end: status, output, errors."""
    options = {"timeout": 120, "stdin": subprocess.DEVNULL} | options
    ended = subprocess.run(command, capture_output=True, check=False, **options)
    return ended.returncode, ended.stdout, ended.stderr
