"""Ranks: this process among the others of a run, with barrier, gather and broadcast. No MPI is needed.

Rank and world come from the environment of torchrun, srun or mpirun. Rank 0 listens, and writes where into
a file in the run's folder, which all ranks share; the others connect. Every wait has a deadline and names the
ranks that are missing; a rank that dies is seen at once, because its connection breaks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Group", "Place", "join", "place_of"]

_ENVIRONMENTS: Final = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)  # fmt: skip
_JOB_KEYS: Final = (
    "TORCHELASTIC_RUN_ID", "MASTER_PORT", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_ID",
    "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip
_MESSAGE_BYTES_MAX: Final = 1 << 30
_LENGTH: Final = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands in its run."""

    rank: int = 0
    world: int = 1
    launcher: str = "none"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def place_of(environ: Mapping[str, str]) -> Place:
    """Read the launcher's environment.

    Raises:
        BenchError: its variables make no sense.
    """
    for launcher, rank_key, world_key, *_ in _ENVIRONMENTS:
        if rank_key in environ and world_key in environ:
            given = (environ[rank_key], environ[world_key])
            if not all(value.isdecimal() for value in given) or int(given[0]) >= int(given[1]):
                raise BenchError(
                    f"{rank_key}={given[0]!r} and {world_key}={given[1]!r} make no sense, expected a rank "
                    f"below the world's size ({launcher})."
                )
            return Place(int(given[0]), int(given[1]), launcher)
    return Place()


def join(place: Place, folder: Path, deadline_s: float = 60.0) -> Group:
    """Meet the other ranks. At once in a world of one.

    Args:
        place: this process.
        folder: where rank 0 leaves its address; seen by all ranks.
        deadline_s: how long to wait for the others.

    Raises:
        BenchError: a rank is missing after `deadline_s`.
    """
    if place.world == 1:
        return Group(place, {}, deadline_s)
    key = hashlib.sha256(
        "\0".join(os.environ.get(name, "") for name in _JOB_KEYS).encode()
    ).hexdigest()
    meeting = folder / f".meeting-{key[:12]}.json"
    if place.is_first:
        return _listen(place, meeting, deadline_s)
    return _connect(place, meeting, deadline_s)


def _listen(place: Place, meeting: Path, deadline_s: float) -> Group:
    meeting.parent.mkdir(parents=True, exist_ok=True)
    token = os.urandom(16).hex()
    peers: dict[int, socket.socket] = {}
    until = time.monotonic() + deadline_s
    with socket.create_server(("", 0), backlog=place.world) as server:
        address = {"host": socket.gethostname(), "port": server.getsockname()[1], "token": token}
        partial = meeting.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(address))
        partial.replace(meeting)
        try:
            while len(peers) < place.world - 1:
                server.settimeout(max(0.01, until - time.monotonic()))
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, place.world)) - set(peers))
                    raise _missing(missing, deadline_s) from None
                rank = _greet(peer, token)
                if rank is None or not 0 < rank < place.world or rank in peers:
                    peer.close()
                else:
                    peers[rank] = peer
        except BaseException:
            for peer in peers.values():
                peer.close()
            raise
        finally:
            meeting.unlink(missing_ok=True)
    for peer in peers.values():
        _send(peer, "all here")
    return Group(place, peers, deadline_s)


def _greet(peer: socket.socket, token: str) -> int | None:
    """The rank of who connects; None for a stranger."""
    peer.settimeout(5.0)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, ValueError, BenchError):
        said = _receive(peer, most=4096)
        if isinstance(said, dict) and said.get("token") == token:
            return int(said["rank"])
    return None


def _connect(place: Place, meeting: Path, deadline_s: float) -> Group:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, KeyError):
            address = json.loads(meeting.read_text())
            peer = socket.create_connection((address["host"], address["port"]), 5.0)
            try:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _send(peer, {"rank": place.rank, "token": address["token"]})
                peer.settimeout(max(0.1, until - time.monotonic()))
                if _receive(peer) == "all here":
                    return Group(place, {0: peer}, deadline_s)
            except (OSError, BenchError):
                peer.close()
        time.sleep(0.05)
    raise _missing([0], deadline_s)


def _missing(ranks: list[int], deadline_s: float) -> BenchError:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return BenchError(
        f"rank {shown} did not come within {deadline_s:g} s.",
        next_step="Look at what it printed; all ranks must see the same output folder.",
    )


class Group:
    """All ranks of a run. Calls must come in the same order in every rank.

    Args:
        place: this process.
        peers: open connections: in rank 0 to all others, in the others to rank 0.
        deadline_s: how long a call waits for the slowest rank.
    """

    def __init__(self, place: Place, peers: Mapping[int, socket.socket], deadline_s: float) -> None:
        self.place = place
        self._peers = peers
        self._deadline_s = deadline_s

    def gather(self, value: Any, deadline_s: float | None = None) -> list[Any]:
        """Every rank's value by rank, in rank 0; an empty list in the others.

        Args:
            value: anything that JSON has.
            deadline_s: for the slowest rank; not given, the group's.

        Raises:
            BenchError: a rank died, or did not come within the deadline.
        """
        if not self.place.is_first:
            self._call(0, deadline_s, lambda peer: _send(peer, value))
            return []
        rest = (self._call(rank, deadline_s, _receive) for rank in range(1, self.place.world))
        return [value, *rest]

    def broadcast(self, value: Any, deadline_s: float | None = None) -> Any:
        """Rank 0's value, in every rank; errors as for `gather`."""
        if not self.place.is_first:
            return self._call(0, deadline_s, _receive)
        for rank in range(1, self.place.world):
            self._call(rank, deadline_s, lambda peer: _send(peer, value))
        return value

    def barrier(self, deadline_s: float | None = None) -> None:
        """Wait for all ranks; errors as for `gather`."""
        if self.place.world > 1:
            self.gather(None, deadline_s)
            self.broadcast(None, deadline_s)

    def close(self) -> None:
        """End the connections; others' waits end with an error that names this rank."""
        for peer in self._peers.values():
            peer.close()

    def _call(self, rank: int, deadline_s: float | None, do: Any) -> Any:
        peer = self._peers[rank]
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        try:
            peer.settimeout(wait_s)
            return do(peer)
        except TimeoutError as e:
            raise BenchError(f"rank {rank} did not answer within {wait_s:g} s.") from e
        except OSError as e:
            raise BenchError(
                f"rank {rank} is gone ({e}).", next_step="Look at what that rank printed."
            ) from e


def _send(peer: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    peer.sendall(_LENGTH.pack(len(data)) + data)


def _receive(peer: socket.socket, most: int = _MESSAGE_BYTES_MAX) -> Any:
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    if length > most:
        raise BenchError(f"a rank sent {length} bytes, expected at most {most}.")
    return json.loads(_exactly(peer, length))


def _exactly(peer: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = peer.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("its connection ended")
        parts += part
    return bytes(parts)
