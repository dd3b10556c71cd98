"""Relay: connections pass through it, can be held, and are written down as a network would see them.

The record is a pcap file with TCP/IP headers of its own making: nothing is lost, no rights are needed,
and the port is the registered one, so that dissectors know what they look at.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from headrace.base.lifetime import Closing

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Recorder", "Relay"]

_RAW_IP = 101
_SYN, _ACK, _PUSH, _FIN = 2, 16, 8, 1
_SEGMENT_MAX = 8948
"""Of a jumbo frame. tshark 4.0 crashes on some segments of 64 KB with many PDUs in them."""
_TARGET_PORT = 4420


class Recorder:
    """Writes a pcap file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 18, _RAW_IP))
        self._lock = threading.Lock()
        self._ports = itertools.count(40_000)

    def connection(self) -> _Recorded:
        """A new connection, with its handshake."""
        return _Recorded(self, next(self._ports))

    def segment(
        self, *, to_target: bool, port: int, seq: int, ack: int, flags: int, data: bytes
    ) -> None:
        """One packet."""
        source, sink = (port, _TARGET_PORT) if to_target else (_TARGET_PORT, port)
        addresses = (b"\x0a\0\0\1", b"\x0a\0\0\2") if to_target else (b"\x0a\0\0\2", b"\x0a\0\0\1")
        tcp = struct.pack(
            ">HHIIBBHHH",
            source,
            sink,
            seq & 0xFFFFFFFF,
            ack & 0xFFFFFFFF,
            5 << 4,
            flags,
            65535,
            0,
            0,
        )
        size = 20 + len(tcp) + len(data)
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, size, 0, 0x4000, 64, 6, 0, *addresses)
        now = time.time_ns() // 1000
        self._file.write(struct.pack("<IIII", now // 1_000_000, now % 1_000_000, size, size))
        self._file.write(ip + tcp + data)

    @contextlib.contextmanager
    def alone(self):
        """While one thread writes."""
        with self._lock:
            yield

    def close(self) -> None:
        """Ends the file."""
        with self._lock:
            self._file.close()


class _Recorded:
    """What one connection carries."""

    def __init__(self, recorder: Recorder, port: int) -> None:
        self._recorder = recorder
        self._port = port
        self._seq = {True: 1, False: 1}
        with recorder.alone():
            self._write(to_target=True, seq=0, ack=0, flags=_SYN)
            self._write(to_target=False, seq=0, ack=1, flags=_SYN | _ACK)
            self._write(to_target=True, seq=1, ack=1, flags=_ACK)

    def sent(self, data: bytes, *, to_target: bool) -> None:
        """Bytes went one way."""
        with self._recorder.alone():
            for at in range(0, len(data), _SEGMENT_MAX):
                part = data[at : at + _SEGMENT_MAX]
                self._next(to_target=to_target, flags=_PUSH | _ACK, data=part)
                self._seq[to_target] += len(part)

    def ended(self, *, to_target: bool) -> None:
        """One way was closed."""
        with self._recorder.alone():
            self._next(to_target=to_target, flags=_FIN | _ACK)
            self._seq[to_target] += 1

    def _next(self, *, to_target: bool, flags: int, data: bytes = b"") -> None:
        seq, ack = self._seq[to_target], self._seq[not to_target]
        self._write(to_target=to_target, seq=seq, ack=ack, flags=flags, data=data)

    def _write(self, *, to_target: bool, seq: int, ack: int, flags: int, data: bytes = b"") -> None:
        self._recorder.segment(
            to_target=to_target, port=self._port, seq=seq, ack=ack, flags=flags, data=data
        )


class Relay(Closing):
    """Listens on a port of loopback and passes on to another.

    Args:
        address: where connections go on to.
        record: what passes is written there.
    """

    def __init__(self, address: tuple[str, int], record: Path | None = None) -> None:
        self._address = address
        self._recorder = Recorder(record) if record else None
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._start(self._accept)

    def hold(self) -> None:
        """Nothing passes any more."""
        self._flows.clear()

    def go_on(self) -> None:
        """What was held passes."""
        self._flows.set()

    def close(self) -> None:
        """Ends all connections, and the record."""
        self._flows.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()
        if self._recorder:
            self._recorder.close()

    def _start(self, function, *arguments) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                host, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(host)
            try:
                target = socket.create_connection(self._address)
            except OSError:
                host.close()
                continue
            self._sockets.append(target)
            self.connections += 1
            for each in (host, target):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            recorded = self._recorder.connection() if self._recorder else None
            self._start(self._pass_on, host, target, recorded, True)
            self._start(self._pass_on, target, host, recorded, False)

    def _pass_on(self, source, sink, recorded, to_target) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 17):
                self._flows.wait()
                if recorded:
                    recorded.sent(data, to_target=to_target)
                sink.sendall(data)
        if recorded:
            recorded.ended(to_target=to_target)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
