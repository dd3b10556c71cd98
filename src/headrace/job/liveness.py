"""Liveness: whether a node's server still answers, asked by its own protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import FabricError
from headrace.fabric.host import Host, HostOptions
from headrace.job.engine import identity_of

if TYPE_CHECKING:
    from headrace.job.document import NodeDocument

__all__ = ["answers"]

_TIMEOUT_S = 1.0


def answers(document: NodeDocument) -> bool:
    """Whether the server that a document speaks of, and no other, listens at its address."""
    host, _, port = document.address.rpartition(":")
    try:
        options = HostOptions(
            timeout_s=_TIMEOUT_S, kato_ms=0, dhchap_secret=None, dhchap_controller_secret=None
        )
        with Host(
            (host.strip("[]"), int(port)), document.nqn, identity_of(document.session), options
        ):
            return True
    except (FabricError, ValueError):
        return False
