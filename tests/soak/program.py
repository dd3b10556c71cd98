"""A program that nobody changed for headrace: opens, looks at and reads files, and checks every byte.

headrace run --root FOLDER -- python -m soak.program '{"page": ..., "folder": ...}'
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from soak.page import CALLS, Page
from soak.samples import SAMPLES, content

ended = threading.Event()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    options = json.loads(sys.argv[1])
    page = Page(Path(options["page"]))
    files = sorted(str(p) for p in Path(options["folder"]).rglob("*.bin"))
    assert len(files) == SAMPLES
    rng = random.Random(1)  # the same order in each epoch of each life: it can be learned
    order = rng.sample(range(SAMPLES), SAMPLES)
    while not ended.is_set():
        for count, index in enumerate(order):
            if ended.is_set():
                return
            data = timed(page, "open and read a file", read, files[index], count % 3)
            size = timed(page, "stat", os.stat, files[index]).st_size
            expected = content(index)
            if data != expected or size != len(expected):
                page.wrong += 1
                print(f"WRONG: {files[index]}", file=sys.stderr, flush=True)
            page.samples += 1
            if count % 32 == 0:
                page.batches += 1
                time.sleep(0.004)
        page.epochs += 1


def read(path: str, way: int) -> bytes:
    """By read, by pread in pieces, by mmap."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if way == 0 or not size:
            with os.fdopen(os.dup(fd), "rb") as f:
                return f.read()
        if way == 1:
            return b"".join(os.pread(fd, 4096, at) for at in range(0, size, 4096))
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            return bytes(mapped)
    finally:
        os.close(fd)


def timed(page: Page, name: str, function, *arguments):
    """Do something within the sight of the watchdog."""
    page.call, page.call_stopped_ns = CALLS.index(name), page.stopped_ns
    page.call_began_ns = time.monotonic_ns()
    try:
        return function(*arguments)
    finally:
        took = time.monotonic_ns() - page.call_began_ns - (page.stopped_ns - page.call_stopped_ns)
        page.call_began_ns = 0
        if took > page.longest_ns:
            page.longest_ns, page.longest_call = took, page.call


if __name__ == "__main__":
    main()
