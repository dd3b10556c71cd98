"""A client that behaves badly in one way until it is killed; prints a dot when it has begun to.

python -m soak.bad_client WAY DATA FINGERPRINT
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import socket
import sys
import time

import numpy as np

from headrace.node.link import Link
from headrace.node.wire import Ask, Hurry, Open, Opened, StatusAsked, encode
from headrace.runtime import runtime_folder

WAYS = ("hoards", "floods", "deaf", "garbage", "connections", "comes and goes")
SAMPLES = 601


def main() -> None:
    way, data, fingerprint = sys.argv[1:4]
    {
        "hoards": hoard, "floods": flood, "deaf": deaf, "garbage": garbage,
        "connections": connections, "comes and goes": come_and_go,
    }[way](data, fingerprint)  # fmt: skip


def opened(data: str, fingerprint: str) -> tuple[Link, int]:
    link = Link(runtime_folder(), "bad")
    link.send(Open(link.new_ticket(), os.fsencode(data), 1, fingerprint, [""], None))
    return link, link.wait(Opened, 20).dataset


def begun() -> None:
    print(".", flush=True)


def batch(rng: random.Random, size: int = 64) -> bytes:
    return np.array([rng.randrange(SAMPLES) for _ in range(size)], np.int64).tobytes()


def hoard(data: str, fingerprint: str) -> None:
    """Asks and never gives back."""
    link, number = opened(data, fingerprint)
    rng = random.Random(1)
    for count in itertools.count():
        with contextlib.suppress(Exception):
            if count < 2000:
                link.send(Ask(link.new_ticket(), number, batch(rng), []))
                link.send(Hurry(link._ticket))
            link.receive(0.0)
        if count == 20:
            begun()
        time.sleep(0.001)


def flood(data: str, fingerprint: str) -> None:
    """As many small messages as go down the line; its answers are read."""
    link, _ = opened(data, fingerprint)
    for count in itertools.count():
        link.send(StatusAsked(link.new_ticket()))
        while link.receive(0.0):
            pass
        link._kept.clear()
        if count == 20:
            begun()


def deaf(data: str, fingerprint: str) -> None:
    """The same, and answers are not read."""
    link, _ = opened(data, fingerprint)
    link._sock.setblocking(True)
    for count in itertools.count():
        link._sock.sendall(encode(StatusAsked(link.new_ticket())))
        if count == 20:
            begun()


def garbage(data: str, fingerprint: str) -> None:
    rng = random.Random(1)
    for count in itertools.count():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1)
            sock.connect(str(runtime_folder().socket))
            sock.sendall(rng.randbytes(rng.randint(1, 5000)))
            sock.recv(100)
        if count == 20:
            begun()


def connections(data: str, fingerprint: str) -> None:
    """A thousand, which are held."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = []
    for count in itertools.count():
        with contextlib.suppress(Exception):
            if count < 1000:
                held.append(Link(runtime_folder(), "bad"))
        if count == 900:
            begun()
        if count >= 1000:
            time.sleep(0.1)


def come_and_go(data: str, fingerprint: str) -> None:
    """Asks for much, and is gone before it comes."""
    rng = random.Random(1)
    for count in itertools.count():
        with contextlib.suppress(Exception):
            link, number = opened(data, fingerprint)
            for _ in range(20):
                link.send(Ask(link.new_ticket(), number, batch(rng), []))
            link._sock.close()
        if count == 5:
            begun()


if __name__ == "__main__":
    main()
