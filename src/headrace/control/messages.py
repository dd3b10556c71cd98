"""Messages between planes and controller: JSON bodies, typed and bounded. docs/control-api.md.

A plane registers once and then reports about once a second. The answer to each is a lease: what it may
use until the lease ends, counted on the plane's own monotonic clock from when it asked.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

API = 1  # version; another one is refused
BODY_BYTES_MAX = 1 << 20
FLOWS_MAX = 4096
REFUSALS_MAX = 512

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Rate = Annotated[float, Meta(ge=0, le=1e18)]
Rates = tuple[Rate | None, Rate | None, Rate | None]
"""Bytes, reads and metadata operations a second; null: no limit."""
Amounts = tuple[Rate, Rate, Rate]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Figures = Annotated[dict[Name, Rate], Meta(max_length=64)]


class Flow(Struct, forbid_unknown_fields=True):
    """What a plane did for one job on one file system since its last report."""

    job: Name
    file_system: Name
    used: Amounts  # bytes, reads and metadata operations that came from the file system
    waiting: Amounts  # what each of the three limits holds back now
    held_s: tuple[Seconds, Seconds, Seconds]  # how long each of them held something back


class Grant(Struct, forbid_unknown_fields=True):
    """What one job may use of one file system on one plane."""

    job: Name
    file_system: Name
    rates: Rates


class PlaneState(Struct, forbid_unknown_fields=True):
    """What a plane tells for those who watch; nothing is decided by it."""

    held_bytes: Rate = 0.0  # memory of samples that are held
    ram_bytes: Rate = 0.0  # what may be held
    delivered_bytes: Figures = {}  # bytes delivered so far, by tier
    stall_s: Figures = {}  # seconds that requests waited, by cause
    sessions: Annotated[dict[Name, int], Meta(max_length=FLOWS_MAX)] = {}
    """Clients by job."""


class Register(Struct, forbid_unknown_fields=True):
    """A plane comes."""

    api: int
    name: Name  # its node
    user: Name
    pid: Annotated[int, Meta(ge=0, le=1 << 31)]
    instance: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    """Drawn by lot when the process began: one that comes again is the same plane."""
    holds: Annotated[list[Grant], Meta(max_length=FLOWS_MAX)] = []
    """Limits that it keeps to by a lease that has not ended."""


class Report(Struct, forbid_unknown_fields=True):
    """What a plane did."""

    sequence: Annotated[int, Meta(ge=1, le=1 << 60)]
    """Larger in each report."""
    seconds: Seconds  # since the last one
    flows: Annotated[list[Flow], Meta(max_length=FLOWS_MAX)]
    state: PlaneState = msgspec.field(default_factory=PlaneState)


class Place(Struct, forbid_unknown_fields=True):
    """A file system and where it is mounted."""

    name: Name
    paths: list[str]


class Lease(Struct, forbid_unknown_fields=True):
    """What a plane may use, and until when."""

    plane: str  # the plane's key, for its reports; nobody else knows it
    reign: str  # the controller's database; epochs of different ones cannot be compared
    epoch: int  # larger for each controller that rules; a lease of a smaller one is void
    sequence: int  # the report that this answers; 0: the registration
    lease_s: Seconds
    report_s: Seconds  # when to report again
    when_expired: Rates | None  # what each job may use once the lease has ended; null: no limit
    file_systems: list[Place]
    grants: list[Grant]  # of each job that was reported, or that is limited
    caches: dict[str, int]
    """Memory for samples, by job; jobs that are not named have no quota of their own."""


_T = TypeVar("_T")


def decode(kind: type[_T], body: bytes) -> _T:
    """Read a message; raises ValueError, which says where it is wrong, if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise ValueError(str(e)[:REFUSALS_MAX]) from e


def encode(message: Any) -> bytes:
    """The message as JSON."""
    return msgspec.json.encode(message)
