"""Messages: what loaders report to an agent, and how the agent is asked, over one datagram socket.

The socket lies in the agent's runtime folder, which only its user can reach; root's agent for all users
listens where all can. The kernel says who sent a message. Of each process only the newest message is kept
until it is taken: however much is sent, memory is bounded.

Whoever sent a message may be broken or hostile: what is not exactly a report (see `control/publishing.py`) is
refused, names are cleaned, and numbers are finite and not negative.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.base.causes import cause_of
from headrace.base.job import JobIdentity, clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MESSAGE_BYTES_MAX: Final = 1 << 14
FILE_SYSTEMS_MAX: Final = 32
NAMES_MAX: Final = 24

FigureKey = tuple[str, str, str]
"""Name of a figure, its label (a cause, a tier, ""), and the file system or ""."""

_WORD: Final = re.compile(r"[a-z][a-z0-9_ -]{0,31}")
_INSTANCE: Final = re.compile(r"[0-9a-f]{32}")
_MOST: Final = 1e18


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What a process and its loaders have done since it began.

    Attributes:
        consumer: training steps run in it; else it works for a process where they do.
        local_ranks: processes like it on this node, as its launcher said; 0: it did not.
    """

    instance: str
    pid: int
    uid: int
    identity: JobIdentity
    consumer: bool
    ended: bool
    began_s: float
    local_ranks: int
    figures: dict[FigureKey, float]


@dataclass(frozen=True, slots=True)
class JobNotice:
    """What Slurm's prolog, a task's epilog and the job's epilog say (`headrace cluster init --slurm`).

    Attributes:
        kind: `begin`, `step` or `end`.
        at_s: when, in Unix seconds of this node's clock.
        uid: whose job it is.
        sender: who says so.
        step: which one, of `step`.
        cpu_s: CPU time of all processes of that step that have ended.
    """

    kind: str
    at_s: float
    identity: JobIdentity
    uid: int
    sender: int
    step: str
    cpu_s: float


def parse_message(message: bytes, pid: int, uid: int) -> ProcessReport | JobNotice:
    """Parse a message; raises ValueError, which says where it is wrong, if it is none."""
    if not message.startswith(_NOTICE):
        return parse_report(message, pid, uid)
    document = _document(message)
    if (kind := document["notice"]) not in ("begin", "step", "end"):
        raise ValueError("notice is not begin, step or end")
    step = document.get("step", "")
    if not isinstance(step, str):
        raise ValueError("step is no text")  # noqa: TRY004 - of a message, not of a caller
    return JobNotice(
        kind, _amount(document.get("at_s"), "at_s"), _identity(document.get("job")),
        _whole(document.get("uid"), "uid", 1 << 32), uid, clean(step),
        _amount(document.get("cpu_s", 0.0), "cpu_s"),
    )  # fmt: skip


def parse_report(message: bytes, pid: int, uid: int) -> ProcessReport:
    """Parse a message; raises ValueError, which says where it is wrong, if it is no report."""
    document = _document(message)
    instance = document.get("instance")
    if not isinstance(instance, str) or not _INSTANCE.fullmatch(instance):
        raise ValueError("instance is not 32 hex digits")
    figures: dict[FigureKey, float] = {
        (name, "", ""): _amount(document.get(name), name)
        for name in ("worked_s", "batches", "samples")
    }
    systems = _table(document.get("file_systems"), "file_systems", FILE_SYSTEMS_MAX)
    for system, tables in systems.items():
        for name in ("stall_s", "tier_bytes"):
            amounts = _table(_table(tables, "file system", 8).get(name, {}), name, NAMES_MAX)
            for label, amount in amounts.items():
                if not _WORD.fullmatch(label):
                    raise ValueError(f"{name} has a name that is no word")
                word = cause_of(label).value if name == "stall_s" else label
                key = name, word, clean(system)
                figures[key] = figures.get(key, 0.0) + _amount(amount, name)
    return ProcessReport(
        instance, pid, uid, _identity(document.get("job")), figures=figures,
        consumer=document.get("consumer") is True, ended=document.get("ended") is True,
        began_s=_amount(document.get("began_s"), "began_s"),
        local_ranks=_whole(document.get("local_ranks", 0), "local_ranks", 1024),
    )  # fmt: skip


def _document(message: bytes) -> dict[str, Any]:
    if len(message) > MESSAGE_BYTES_MAX:
        raise ValueError(f"more than {MESSAGE_BYTES_MAX} bytes")
    try:
        document = json.loads(message)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"no JSON: {e}") from None
    if not isinstance(document, dict) or document.get("v") != 1:
        raise ValueError("no message of version 1")
    return document


def _identity(value: Any) -> JobIdentity:
    job = _table(value, "job", 16)
    values: dict[str, Any] = {}
    for name in ("job_id", "alias", "name", "user", "account", "node", "partition"):
        if not isinstance(text := job.get(name, ""), str):
            raise ValueError(f"job.{name} is no text")  # noqa: TRY004 - of a message, not of a caller
        values[name] = clean(text)
    if not values["job_id"]:
        raise ValueError("job.job_id is empty")
    for name, most in (
        ("gpus", 1024),
        ("cpus", 1 << 16),
        ("restarts", 1 << 16),
        ("memory_bytes", 1 << 48),
    ):
        values[name] = _whole(job.get(name, 0), f"job.{name}", most)
    indices = job.get("gpu_indices", [])
    if not isinstance(indices, list) or len(indices) > 1024:
        raise ValueError("job.gpu_indices is no list of numbers")
    indices = tuple(_whole(each, "job.gpu_indices", 1024) for each in indices)
    return JobIdentity(**values, gpu_indices=indices)


def _whole(value: Any, name: str, most: int) -> int:
    return int(min(most, _amount(value, name)))


def _table(value: Any, name: str, most: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > most:
        raise ValueError(f"{name} is no table of at most {most} entries")
    return value


def _amount(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is no number")  # noqa: TRY004 - of a message, not of a caller
    if not (math.isfinite(value) and 0 <= value <= _MOST):
        raise ValueError(f"{name} is out of bounds")
    return float(value)


SENDERS_MAX: Final = 4096
RECEIVE_BYTES: Final = 4 << 20
ANSWER_S: Final = 2.0

_CREDENTIALS: Final = struct.Struct("3i")
_URGENT: Final = (b'"ended":true', b'"notice":')
"""Whoever sends these may be gone within a second, or has just begun."""
_NOTICE: Final = b'{"v":1,"notice":'
_ASK: Final = b'{"ask":"state"}'
_ASK_WRITTEN: Final = b'{"ask":"written"}'
ASKING_MAX: Final = 64


class Datagram(NamedTuple):
    """A message and who sent it."""

    message: bytes
    pid: int
    uid: int
    mono_s: float
    unix_s: float


class Listener:
    """The agent's socket."""

    def __init__(self, path: Path, *, public: bool = False) -> None:
        self._path = path
        self.state: Callable[[], dict[str, Any]] = dict
        self._newest: dict[tuple[int, bytes], Datagram] = {}
        self.dropped = 0
        self.urgent = False
        """A process's last report, or a notice, is among those that were not taken."""
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
        """Receive what was sent."""
        for _ in range(SENDERS_MAX):
            try:
                message, ancillary, _, sender = self.socket.recvmsg(
                    MESSAGE_BYTES_MAX + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:  # BlockingIOError too: that was all
                return
            pid, uid = _sender(ancillary)
            # A process may come after another of the same number; its instance is in the message.
            key = (pid, message[:64])
            if message == _ASK:
                self._answer(sender)
            elif message == _ASK_WRITTEN:
                if len(self._asking) < ASKING_MAX:
                    self._asking.append(sender)
            elif key in self._newest or len(self._newest) < SENDERS_MAX:
                self._newest[key] = Datagram(message, pid, uid, time.monotonic(), time.time())
                self.urgent = self.urgent or any(word in message for word in _URGENT)
            else:
                self.dropped += 1

    @property
    def asked_to_write(self) -> bool:
        """Whether somebody waits until what was received is in the history."""
        return bool(self._asking)

    def written(self) -> None:
        """Answer whoever waits: it is."""
        asking, self._asking = self._asking, []
        for sender in asking:
            self._answer(sender)

    @property
    def waiting(self) -> int:
        """Messages that were not taken."""
        return len(self._newest)

    def take(self) -> list[Datagram]:
        """The newest message of each process since this was last asked."""
        newest, self._newest, self.urgent = self._newest, {}, False
        return list(newest.values())

    def close(self) -> None:
        """Close the socket and remove it."""
        self.socket.close()
        self._path.unlink(missing_ok=True)

    def _answer(self, sender: Any) -> None:
        if sender:
            with contextlib.suppress(OSError):
                self.socket.sendto(json.dumps(self.state()).encode(), sender)


def ask_state(path: Path, *, written: bool = False) -> dict[str, Any]:
    """Ask an agent for its state; with `written`, when all that it has received is in its history.

    Raises:
        FileNotFoundError: none listens there.
        TimeoutError: it does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.bind("")  # a name that the kernel draws, and that lies in no folder
        sock.settimeout(ANSWER_S)
        try:
            sock.sendto(_ASK_WRITTEN if written else _ASK, str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            raise FileNotFoundError(f"{path}: no agent listens") from None
        state = json.loads(sock.recv(1 << 16))
    if not isinstance(state, dict):
        raise TimeoutError(f"{path}: whoever listens is no agent")
    return state


def _sender(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Process and user id; -1 where the kernel does not say."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, uid, _ = _CREDENTIALS.unpack_from(data)
            return pid, uid
    return -1, -1
