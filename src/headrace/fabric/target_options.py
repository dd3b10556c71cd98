"""TargetOptions: what a target takes, and what it spends on its hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.fabric.chap_host import GROUPS, HASHES

if TYPE_CHECKING:
    from headrace.fabric.dh import DhGroup
    from headrace.fabric.secret import Hash

__all__ = ["TargetOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """What a target takes and spends."""

    digests: bool = True
    """Agree to digests that a host offers."""
    associations_max: int = 256
    """Hosts connected at once."""
    handshakes_max: int = 512
    """Connections that have not passed Connect and authentication; the oldest goes when there are more."""
    authentication_s: float = 30.0
    """From a connection's beginning to its host's proof. An emulated CPU needs seconds for ffdhe8192."""
    dhchap_hashes: tuple[Hash, ...] = HASHES
    """Taken for the proofs; the first that a host offers is chosen."""
    dhchap_groups: tuple[DhGroup, ...] = GROUPS
    """Taken for the exchange; the first that a host offers is chosen."""
    loops: int = 1
    """Threads that move data."""
    readers: int = 16
    """Threads that read what is not in the page cache."""
    cache_bytes: int | None = None
    """Exports that are larger together are read past the page cache where they are not in it, since they
    would not stay there; None: half of the machine's memory."""
