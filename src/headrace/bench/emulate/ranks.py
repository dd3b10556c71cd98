"""Ranks: how the processes of a run, on one host or several, find each other. No MPI is needed.

Rank 0 listens, and writes where into
a file in the run's folder, which all ranks share; the others connect. Every wait has a deadline and names the
ranks that are missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

from headrace.base.documents import DocumentKind
from headrace.base.job import start_of_job
from headrace.bench.emulate.group import Group, Line
from headrace.errors import BenchError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.base.job import Rank

__all__ = ["Group", "join"]

_GREETING_BYTES_MAX: Final = 4096
_GREETING_S: Final = 5.0
_CONNECT_S: Final = 1.0
_ADDRESS: Final = DocumentKind(
    name="the address of rank 0",
    version=1,
    error=BenchError,
    next_step="Start all ranks again.",
)
"""To try one of rank 0's addresses; those of other networks do not answer."""

_SIOCGIFADDR: Final = 0x8915


def join(place: Rank, folder: Path, deadline_s: float = 60.0) -> Group:
    """Meet the other ranks. At once in a world of one.

    Args:
        place: this process.
        folder: where rank 0 leaves its address; seen by all ranks.
        deadline_s: how long to wait for the others.

    Raises:
        BenchError: a rank is missing after `deadline_s`.
    """
    if place.world_size == 1:
        return Group(place, {}, deadline_s)
    key = hashlib.sha256(start_of_job().encode()).hexdigest()
    meeting = folder / f".meeting-{key[:12]}.json"
    if place.is_first:
        return _listen(place, meeting, deadline_s)
    return _connect(place, meeting, deadline_s)


def _listen(place: Rank, meeting: Path, deadline_s: float) -> Group:
    meeting.parent.mkdir(parents=True, exist_ok=True)
    token = os.urandom(16).hex()
    lines: dict[int, Line] = {}
    until = time.monotonic() + deadline_s
    with socket.create_server(("", 0), backlog=place.world_size) as server:
        address = {"hosts": _addresses(), "port": server.getsockname()[1], "token": token}
        partial = meeting.with_suffix(f".{os.getpid()}")
        partial.write_bytes(_ADDRESS.encode(address))
        partial.replace(meeting)
        try:
            while len(lines) < place.world_size - 1:
                server.settimeout(max(0.01, until - time.monotonic()))
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, place.world_size)) - set(lines))
                    raise _missing(missing, deadline_s) from None
                line = Line(peer)
                rank = _greet(line, token)
                if rank is None or not 0 < rank < place.world_size or rank in lines:
                    line.close()
                else:
                    lines[rank] = line
        except BaseException:
            for line in lines.values():
                line.close()
            raise
        finally:
            meeting.unlink(missing_ok=True)
    group = Group(place, lines, deadline_s)
    group.broadcast("all here")
    return group


def _greet(line: Line, token: str) -> int | None:
    """The rank of who connects; None for a stranger."""
    with contextlib.suppress(OSError, ValueError, KeyError, BenchError):
        said = line.receive(_GREETING_S, _GREETING_BYTES_MAX)
        if isinstance(said, dict) and said.get("token") == token:
            line.send("welcome", _GREETING_S)
            return int(said["rank"])
    return None


def _connect(place: Rank, meeting: Path, deadline_s: float) -> Group:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError, BenchError, ValueError, KeyError, TypeError):
            address = _ADDRESS.decode(meeting.read_bytes(), str(meeting)).plain()
            for host in address["hosts"]:
                line = _reach(str(host), int(address["port"]), str(address["token"]), place.rank)
                if line is None:
                    continue
                group = Group(place, {0: line}, deadline_s)
                try:
                    if group.broadcast(None, max(0.1, until - time.monotonic())) == "all here":
                        return group
                except BenchError:  # another run's, which ended; ours may come yet
                    group.close()
        time.sleep(0.05)
    raise _missing([0], deadline_s)


def _reach(host: str, port: int, token: str, rank: int) -> Line | None:
    """Rank 0 at one of its addresses; None where it is not, or somebody else is."""
    try:
        line = Line(socket.create_connection((host, port), _CONNECT_S))
    except OSError:
        return None
    with contextlib.suppress(OSError, ValueError, BenchError):
        line.send({"rank": rank, "token": token}, _GREETING_S)
        if line.receive(_GREETING_S, _GREETING_BYTES_MAX) == "welcome":
            return line
    line.close()
    return None


def _addresses() -> list[str]:
    """Where this host may be reached, the likeliest first: its name may be known here alone."""
    found = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    found.append(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in sorted(socket.if_nameindex(), key=lambda each: each[1] == "lo"):
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, asked)
                found.append(socket.inet_ntoa(answer[20:24]))
    return list(dict.fromkeys(found))


def _missing(ranks: list[int], deadline_s: float) -> BenchError:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return BenchError(
        f"rank {shown} did not come within {deadline_s:g} s.",
        next_step="Look at what it printed; all ranks must see the same output folder.",
    )
