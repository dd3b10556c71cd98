"""R18: any sequence of operations shows the same under the shim as without it, from both its roots."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Does operations, one after the other, with up to five files open; says what each gave.
ACTOR = """
import fcntl, json, mmap, os, sys
held = [None] * 5
def perform(kind, slot, path, number, flags):
    fd = held[slot]
    if kind == 'open':
        if fd is not None: os.close(fd)
        held[slot] = None
        held[slot] = os.open(path, flags)
        return fcntl.fcntl(held[slot], fcntl.F_GETFL), fcntl.fcntl(held[slot], fcntl.F_GETFD)
    if kind == 'stat': return tuple(os.stat(path)), tuple(os.lstat(path)), os.stat(path).st_mtime_ns
    if kind == 'access': return os.access(path, number % 8)
    if kind == 'whole': return hash(open(path, 'rb').read().hex()[:50]), len(open(path, 'rb').read())
    if kind == 'list': return sorted(os.listdir(os.path.dirname(path)))
    if kind == 'fork':
        r, w = os.pipe()
        if os.fork() == 0:
            os.write(w, repr(open(path, 'rb').read(9)).encode() + (os.read(fd, 3) if fd else b''))
            os._exit(0)
        os.close(w); os.wait()
        return repr(os.read(r, 99)), os.close(r)
    if fd is None: return None
    if kind == 'read': return os.read(fd, number).hex()
    if kind == 'pread': return os.pread(fd, 50, number).hex()
    if kind == 'seek': return os.lseek(fd, number, number % 3)
    if kind == 'fstat': return tuple(os.fstat(fd)), os.fstat(fd).st_blksize
    if kind == 'dup': held[(slot + 1) % 5] = os.dup(fd)
    if kind == 'close': held[slot] = os.close(fd)
    if kind == 'mmap':
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as m: return m[number:number + 30].hex(), len(m)
for line in sys.stdin:
    done = []
    for operation in json.loads(line):
        try: done.append(perform(*operation))
        except (OSError, ValueError) as e: done.append([type(e).__name__, getattr(e, 'errno', 0)])
    for fd in held:
        if fd is not None:
            try: os.close(fd)
            except OSError: pass
    held[:] = [None] * 5
    print(json.dumps(done), flush=True)
"""

KINDS = ["open", "open", "read", "pread", "seek", "fstat", "dup", "close", "mmap", "stat", "access",
         "whole", "list", "fork"]  # fmt: skip
NAMES = ["f03.bin", "f05.bin", "f11.bin", "empty", "link", "deep/er/text.txt", "folder/er/text.txt",
         "deep/../f05.bin", "./f05.bin", "f05.bin/", "none", "deep", "deep//er/.././er/text.txt"]  # fmt: skip
FLAGS = [0, 0, os.O_CLOEXEC, os.O_NOFOLLOW, os.O_DIRECTORY, os.O_NONBLOCK, os.O_PATH, os.O_WRONLY]


class _Actor:
    def __init__(self, environment):
        self._process = subprocess.Popen(
            [sys.executable, "-c", ACTOR],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment | {"PYTHONHASHSEED": "0"},
        )  # fmt: skip

    def perform(self, operations):
        self._process.stdin.write(json.dumps(operations) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(20) == 0
        self._process.stdout.close()


@pytest.mark.parametrize("immutable", [False, True])
def test_any_sequence_of_operations_shows_the_same(files, plane, tmp_path, immutable):
    other = tmp_path / "linked"
    os.symlink(files, other)
    served = plane(other, immutable=immutable)
    plain, ours = _Actor(dict(os.environ)), _Actor(served.environment)
    operation = st.tuples(
        st.sampled_from(KINDS), st.integers(0, 4),
        st.builds(os.path.join, st.sampled_from([str(files), str(other)]), st.sampled_from(NAMES)),
        st.integers(0, 9000), st.sampled_from(FLAGS),
    )  # fmt: skip
    compared = 0

    @settings(
        max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.lists(operation, min_size=1, max_size=30))
    def compare(operations):
        nonlocal compared
        outcomes, expected = ours.perform(operations), plain.perform(operations)
        for one, (kind, *_), a, b in zip(operations, operations, outcomes, expected, strict=True):
            if kind == "open" and one[4] == os.O_NOFOLLOW:
                continue  # of a copy F_GETFL does not say it
            assert a == b, one
        compared += len(operations)

    try:
        compare()
    finally:
        plain.close()
        ours.close()
    assert compared > 500
    assert served.counts["copy"] > 20  # how many operations ask for one, Hypothesis draws
    assert served.counts["refused"] == 0
