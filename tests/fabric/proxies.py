"""Proxies that stand between a host and a target, and do harm."""

import contextlib
import socket
import threading


class Between:
    """A proxy in front of a target."""

    refusing = False

    def __init__(self, address):
        self._address = address
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._sockets = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for each in tuple(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if self.refusing:
                near.close()
                continue
            try:
                far = socket.create_connection(self._address)
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for a, b, back in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._move, args=(a, b, back))
                self._threads.append(thread)
                thread.start()

    def _move(self, a, b, back):
        try:
            while received := a.recv(1 << 16):
                b.sendall(self.change(received, back))
        except OSError:
            pass
        for each in (a, b):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def end(self):
        """Closes all connections, and refuses new ones until `again`."""
        self.refusing = True
        for each in tuple(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def again(self):
        self.refusing = False

    def change(self, received, back):
        """What is passed on of what came; `back`: from the target."""
        raise NotImplementedError


class Hole(Between):
    open = True
    swallowed = 0

    def change(self, received, back):  # noqa: ARG002 - both directions alike
        if self.open:
            return received
        self.swallowed += len(received)
        return b""


class Flipper(Between):
    """Flips a bit of what comes from the target, once in `every` bytes."""

    every = 0
    flipped = 0
    _passed = 0

    def change(self, received, back):
        if not back or not self.every:
            return received
        self._passed += len(received)
        if self._passed < self.every:
            return received
        self._passed = 0
        self.flipped += 1
        changed = bytearray(received)
        changed[self.flipped * 7919 % len(changed)] ^= 1 << self.flipped % 8
        return bytes(changed)
