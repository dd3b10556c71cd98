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
import socket
import struct
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from headrace.base.causes import cause_of
from headrace.base.job import JobIdentity, clean
from headrace.control.messages import decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MESSAGE_BYTES_MAX: Final = 1 << 14
FILE_SYSTEMS_MAX: Final = 32
NAMES_MAX: Final = 24

FigureKey = tuple[str, str, str]
"""Name of a figure, its label (a cause, a tier, ""), and the file system or ""."""

_Amount = Annotated[float, Meta(ge=0, le=1e18)]
_Word = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_ -]{0,31}\Z")]
_Amounts = Annotated[dict[_Word, _Amount], Meta(max_length=NAMES_MAX)]


class _Message(Struct, kw_only=True):
    v: Literal[1]
    identity: JobIdentity = msgspec.field(name="job")


class _Tables(Struct):
    """Of one file system."""

    stall_s: _Amounts = {}  # seconds by cause
    tier_bytes: _Amounts = {}


class ProcessReport(_Message, kw_only=True):
    """What a process and its loaders have done since it began."""

    instance: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    consumer: bool = False  # training steps run in it; else it works for a process where they do
    ended: bool = False
    began_s: _Amount
    local_ranks: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Processes like it on this node, as its launcher said; 0: it did not."""
    worked_s: _Amount
    batches: _Amount
    samples: _Amount
    file_systems: Annotated[dict[str, _Tables], Meta(max_length=FILE_SYSTEMS_MAX)]
    pid: int = -1  # by the kernel's word, as `uid`; whatever the message says
    uid: int = -1

    @property
    def figures(self) -> dict[FigureKey, float]:
        """All amounts; of causes and file systems that are called otherwise here, some together."""
        names = ("worked_s", "batches", "samples")
        figures: dict[FigureKey, float] = {(name, "", ""): getattr(self, name) for name in names}
        for system, tables in self.file_systems.items():
            amounts = [("stall_s", cause_of(name).value, s) for name, s in tables.stall_s.items()]
            amounts += [("tier_bytes", name, count) for name, count in tables.tier_bytes.items()]
            for name, label, amount in amounts:
                key = name, label, clean(system)
                figures[key] = figures.get(key, 0.0) + amount
        return figures


class JobNotice(_Message, kw_only=True):
    """What Slurm's prolog, a task's epilog and the job's epilog say (`headrace cluster init --slurm`)."""

    kind: Literal["begin", "step", "end"] = msgspec.field(name="notice")
    at_s: _Amount  # when, in Unix seconds of this node's clock
    uid: Annotated[int, Meta(ge=0, le=1 << 32)]  # whose job it is
    step: str = ""  # which one, of `step`
    cpu_s: _Amount = 0.0  # CPU time of all processes of that step that have ended
    sender: int = -1  # user who says so, by the kernel's word


_MessageT = TypeVar("_MessageT", bound=_Message)
_JOB_MOST: Final = {"gpus": 1024, "cpus": 1 << 16, "restarts": 1 << 16, "memory_bytes": 1 << 48}


def parse_message(message: bytes, pid: int, uid: int) -> ProcessReport | JobNotice:
    """Parse a message; raises ValueError, which says where it is wrong, if it is none."""
    if message.startswith(_NOTICE):
        notice = _parsed(JobNotice, message)
        notice.sender, notice.step = uid, clean(notice.step)
        return notice
    report = _parsed(ProcessReport, message)
    report.pid, report.uid = pid, uid
    return report


def _parsed(kind: type[_MessageT], message: bytes) -> _MessageT:
    """A message of a job whose names can be shown."""
    if len(message) > MESSAGE_BYTES_MAX:
        raise ValueError(f"more than {MESSAGE_BYTES_MAX} bytes")
    parsed = decode(kind, message)
    job = asdict(parsed.identity)
    indices, counts = job["gpu_indices"], {name: job[name] for name in _JOB_MOST}
    if min(0, *counts.values(), *indices) < 0 or len(indices) > _JOB_MOST["gpus"]:
        raise ValueError(f"job has {counts} and GPUs {indices[:9]}: no such numbers")
    job |= {name: min(count, _JOB_MOST[name]) for name, count in counts.items()}
    job |= {name: clean(value) for name, value in job.items() if isinstance(value, str)}
    if not job["job_id"]:
        raise ValueError("job.job_id is empty")
    parsed.identity = JobIdentity(**job)
    return parsed


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

    Raises FileNotFoundError if none listens there, and TimeoutError if it does not answer.
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
