"""Who a host is: its NQN and its identifier."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostIdentity", "check_nqn"]

_NQN = re.compile(r"nqn\.\d{4}-\d{2}\.[a-z0-9][a-z0-9.\-]*(:.+)?", re.IGNORECASE)
_NQN_BYTES_MAX = 223
_UUID_NQN = "nqn.2014-08.org.nvmexpress:uuid:"
_ID_BYTES = 16


def check_nqn(nqn: str) -> str:
    """Returns an NQN that keeps to the form.

    Raises:
        ValueError: it does not.
    """
    if len(nqn.encode()) > _NQN_BYTES_MAX or not _NQN.fullmatch(nqn) or "\0" in nqn:
        raise ValueError(f"{nqn!r} is no NQN, expected nqn.YYYY-MM.reversed.domain:name")
    return nqn


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """A host's NQN and its 16 bytes of identifier.

    Raises:
        ValueError: one of them does not keep to the form.
    """

    nqn: str
    id: bytes

    def __post_init__(self) -> None:
        check_nqn(self.nqn)
        if len(self.id) != _ID_BYTES or self.id == bytes(_ID_BYTES):
            raise ValueError(
                f"host identifier is {self.id.hex()}, expected 16 bytes that are not all 0"
            )

    @classmethod
    def of_machine(cls) -> HostIdentity:
        """What is the same on this machine after every start: made from its machine-id."""
        try:
            seed = Path("/etc/machine-id").read_text().strip()
        except OSError:
            seed = f"{uuid.getnode():x}"
        # Not the machine-id itself: systemd asks that it stays on the machine.
        own = uuid.uuid5(uuid.NAMESPACE_OID, f"headrace host {seed}")
        return cls(f"{_UUID_NQN}{own}", own.bytes)
