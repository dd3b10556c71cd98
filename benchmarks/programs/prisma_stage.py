"""PRISMA's published stage, written anew from its description: producers, a bounded buffer, its autotuner.

Paths are given in the order of all epochs. A producer waits for room and for its turn in that order, inserts
an empty entry, lets the next one go, and reads the file; consumers ask by name and wait for the whole file;
everybody is woken at each change. What is not as published: it is Python; replies of the socket carry their
length, without which a short file would hang a client; and the tuner's blind start can be shortened.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from benchmarks.plane_parts import prisma_tuner as published

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME_BYTES = 1000
REQUEST = struct.Struct(f"<{NAME_BYTES}sQQ")
LENGTH = struct.Struct("<Q")


def read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as f:
        return f.read()


class Prisma:
    """The stage in one process. `read` may be called from any number of threads."""

    def __init__(self, paths: Sequence[str], warm_up_s: float) -> None:
        self._paths = iter(paths)
        self._changed = threading.Condition()
        self._entries: dict[str, bytes | None] = {}
        self._expected: collections.Counter[str] = collections.Counter()
        self._producers = 0
        self._threads, self._files = published.THREADS_FIRST, published.FILES_FIRST
        self._occupancy: list[float] = []
        self._warm_up_s = warm_up_s
        self._begin_producers()
        threading.Thread(target=self._tune, daemon=True).start()

    def read(self, path: str) -> bytes:
        """The file, once it is in the buffer; it leaves with its last expected read."""
        with self._changed:
            while (data := self._entries.get(path)) is None:
                self._changed.wait()
            self._expected[path] -= 1
            if not self._expected[path]:
                del self._entries[path], self._expected[path]
                self._look()
            self._changed.notify_all()
            return data

    def _look(self) -> None:
        self._occupancy.append(100 * len(self._entries) / self._files)

    def _begin_producers(self) -> None:
        while self._producers < self._threads:
            self._producers += 1
            threading.Thread(target=self._produce, daemon=True).start()

    def _produce(self) -> None:
        while True:
            with self._changed:
                while len(self._entries) >= self._files:
                    self._changed.wait()
                path = next(self._paths, None)
                if path is None:
                    return
                self._expected[path] += 1
                if path in self._entries:
                    continue
                self._entries[path] = None
                self._look()
            data = read_file(path)
            with self._changed:
                self._entries[path] = data
                self._changed.notify_all()

    def _tune(self) -> None:
        time.sleep(self._warm_up_s)
        with self._changed:
            self._occupancy.clear()
        while True:
            time.sleep(published.INTERVAL_S)
            with self._changed:
                if len(self._occupancy) < published.SAMPLES_MIN:
                    continue
                turned = published.decide(self._occupancy, self._threads, self._files)
                self._occupancy.clear()
                if turned is None:
                    return
                self._threads, self._files = turned
                self._begin_producers()
                self._changed.notify_all()


class Server:
    """The stage in a process of its own behind a UNIX socket, as PyTorch's workers use it."""

    def __init__(self, paths: Sequence[str], warm_up_s: float, address: str) -> None:
        self._address = address
        self._clients: dict[int, socket.socket] = {}
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(50)
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(listener, paths, warm_up_s), daemon=True
        )
        self._process.start()
        listener.close()

    def close(self) -> None:
        """End the process; workers must have ended."""
        self._process.terminate()
        self._process.join()
        for client in self._clients.values():
            client.close()

    def read(self, path: str) -> bytes:
        """Asks from whatever process this is, over a connection of its own."""
        client = self._clients.get(os.getpid())
        if client is None:
            client = self._clients[os.getpid()] = socket.socket(socket.AF_UNIX)
            client.connect(self._address)
        client.sendall(REQUEST.pack(path.encode(), 0, 0))
        (length,) = LENGTH.unpack(client.recv(LENGTH.size, socket.MSG_WAITALL))
        data = bytearray(length)
        with memoryview(data) as rest:
            at = 0
            while at < length:
                at += client.recv_into(rest[at:])
        return bytes(data)


def _serve(listener: socket.socket, paths: Sequence[str], warm_up_s: float) -> None:
    prisma = Prisma(paths, warm_up_s)

    def answer(client: socket.socket) -> None:
        while len(request := client.recv(REQUEST.size, socket.MSG_WAITALL)) == REQUEST.size:
            data = prisma.read(REQUEST.unpack(request)[0].rstrip(b"\0").decode())
            client.sendall(LENGTH.pack(len(data)))
            client.sendall(data)

    while True:
        client, _ = listener.accept()
        threading.Thread(target=answer, args=(client,), daemon=True).start()
