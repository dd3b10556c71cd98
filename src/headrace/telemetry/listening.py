"""Listening: where processes tell an agent how they fare, and where its state is asked for.

A datagram socket in the agent's runtime folder, which only its user can reach; root's agent for all users
listens where all can. The kernel says who sent what. Of each process only the newest message is kept until
it is taken: however much is sent, memory is bounded.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.telemetry.told import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Heard", "Listener", "ask_state", "ask_to_write"]

SENDERS_MAX: Final = 4096
RECEIVE_BYTES: Final = 4 << 20
ANSWER_S: Final = 2.0

_CREDENTIALS: Final = struct.Struct("3i")
_LAST: Final = b'"ended":true'
_ASK: Final = b'{"ask":"state"}'
_ASK_WRITTEN: Final = b'{"ask":"written"}'
ASKING_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Heard:
    """A datagram and who sent it."""

    message: bytes
    pid: int
    uid: int
    mono_s: float
    unix_s: float


class Listener:
    """Listens.

    Args:
        path: of the socket; there is none yet.
        public: anybody may send.

    Attributes:
        state: what is answered to whoever asks.
    """

    def __init__(self, path: Path, *, public: bool = False) -> None:
        self._path = path
        self.state: Callable[[], dict[str, Any]] = dict
        self._heard: dict[tuple[int, bytes], Heard] = {}
        self.dropped = 0
        self.urgent = False
        """A last word is among what was not taken."""
        self._asking: list[Any] = []
        self.socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            self.socket.bind(str(path))
            path.chmod(0o666 if public else 0o600)
        except BaseException:
            self.socket.close()
            raise

    def receive(self) -> None:
        """Take in what has come."""
        for _ in range(SENDERS_MAX):
            try:
                message, ancillary, _, sender = self.socket.recvmsg(
                    MESSAGE_BYTES_MAX + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            except OSError:
                return
            if message == _ASK:
                self._answer(sender)
                continue
            if message == _ASK_WRITTEN:
                if len(self._asking) < ASKING_MAX:
                    self._asking.append(sender)
                continue
            pid, uid = _sender(ancillary)
            # A process may come after another of the same number; its instance is in the message.
            key = (pid, message[:64])
            if key in self._heard or len(self._heard) < SENDERS_MAX:
                self._heard[key] = Heard(message, pid, uid, time.monotonic(), time.time())
                self.urgent = self.urgent or _LAST in message
            else:
                self.dropped += 1

    @property
    def asked_to_write(self) -> bool:
        """Whether somebody waits until what was heard is in the history."""
        return bool(self._asking)

    def written(self) -> None:
        """It is: whoever waits is told."""
        asking, self._asking = self._asking, []
        for sender in asking:
            self._answer(sender)

    @property
    def waiting(self) -> int:
        """Messages that were not taken."""
        return len(self._heard)

    def take(self) -> list[Heard]:
        """The newest message of each process since this was last asked."""
        heard, self._heard, self.urgent = self._heard, {}, False
        return list(heard.values())

    def close(self) -> None:
        """Listen no more."""
        self.socket.close()
        self._path.unlink(missing_ok=True)

    def _answer(self, sender: Any) -> None:
        if sender:
            with contextlib.suppress(OSError):
                self.socket.sendto(json.dumps(self.state()).encode(), sender)


def ask_state(path: Path) -> dict[str, Any]:
    """Ask an agent for its state.

    Raises:
        FileNotFoundError: none listens there.
        TimeoutError: it does not answer.
    """
    return _asked(path, _ASK)


def ask_to_write(path: Path) -> dict[str, Any]:
    """Ask an agent to write all that it has heard into its history; its state, when it has.

    Raises:
        FileNotFoundError: none listens there.
        TimeoutError: it does not answer.
    """
    return _asked(path, _ASK_WRITTEN)


def _asked(path: Path, question: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.bind("")  # a name that the kernel draws, and that lies in no folder
        sock.settimeout(ANSWER_S)
        try:
            sock.sendto(question, str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            raise FileNotFoundError(f"{path}: no agent listens") from None
        found = json.loads(sock.recv(1 << 16))
    if not isinstance(found, dict):
        raise TimeoutError(f"{path}: whoever listens is no agent")
    return found


def _sender(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Process and user id; -1 where the kernel does not say."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, uid, _ = _CREDENTIALS.unpack_from(data)
            return pid, uid
    return -1, -1
