"""A packer that dies: run as a script, it packs and is killed at the n-th step of a kind.

    python packer.py SOURCE TARGET KIND N

KIND is a function of `os` (pwrite, fdatasync, fsync, ...), `renameat2`, or `none`. At its N-th call the
process kills itself with SIGKILL, half-way: a write has then written half of its bytes.
Many deaths are made from one process by forking before anything is started.
"""

from __future__ import annotations

import os
import signal
import sys

from headrace.base import files
from headrace.store.pack import append, pack
from headrace.store.packing import PackOptions

OPTIONS = PackOptions(volume_bytes=40_000, batch_bytes=6000, journal_bytes=12_000, workers=2)


def items():
    """A repeatable iterable."""
    for i in range(60):
        yield f"item{i:03d}", bytes([i]) * (i * 37 % 3000), i % 3


def arm(kind: str, n: int) -> None:
    """Makes the n-th call of `kind` deadly."""
    calls = 0

    def count() -> bool:
        nonlocal calls
        calls += 1
        return calls == n

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if kind == "pwrite":
        pwrite = os.pwrite

        def write(fd, data, offset):
            if count():
                pwrite(fd, bytes(data)[: len(data) // 2], offset)
                die()
            return pwrite(fd, data, offset)

        os.pwrite = write
    elif kind != "none":
        where, name = (files, "_renameat2") if kind == "renameat2" else (os, kind)
        call = getattr(where, name)

        def other(*args, **kwargs):
            if count():
                die()
            return call(*args, **kwargs)

        setattr(where, name, other)


def run(source: str, target: str, what: str) -> None:
    data = items if source == "ITEMS" else source
    if what == "append":
        append(data, target, options=OPTIONS)
    else:
        shuffle = 7 if what == "shuffle" else None
        pack(data, target, options=OPTIONS, overwrite=what == "overwrite", shuffle=shuffle)


def main() -> None:
    """Reads lines `what source target kind n`, forks for each, and prints how the child ended."""
    for line in sys.stdin:
        what, source, target, kind, n = line.split()
        child = os.fork()
        if child == 0:
            arm(kind, int(n))
            try:
                run(source, target, what)
            except BaseException as e:  # noqa: BLE001 - the parent shows it
                print(type(e).__name__, e, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
