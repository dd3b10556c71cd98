"""What one attempt at reading an object can meet, and whether another attempt makes sense.

Every transport turns its own errors into a `Fault`, so that the engine decides alike for all of them.
"""

from __future__ import annotations

import errno
from typing import Literal

FaultKind = Literal["transient", "expired", "changed", "missing", "refused", "descriptors", "final"]

ERRNO: dict[FaultKind, int] = {
    "transient": errno.EIO,
    "expired": errno.EACCES,
    "changed": errno.ESTALE,
    "missing": errno.ENOENT,
    "refused": errno.EACCES,
    "descriptors": errno.EMFILE,
    "final": errno.EIO,
}
"""How the native reader is told."""

_TRANSIENT = (408, 425, 429)
_EXPIRED_CODES = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "RequestTimeTooSkewed")


class Fault(Exception):
    """One attempt failed.

    Args:
        kind: `transient` (again, later), `expired` (again, with fresh credentials), `changed` (another
            object stands there), `missing`, `refused`, `descriptors` (none were left), `final`.
        reason: what happened, in words.
        status: the HTTP status, where there was one.
        retry_after_s: how long the server asks to wait.
    """

    def __init__(
        self,
        kind: FaultKind,
        reason: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def again(self) -> bool:
        """Whether the same request may succeed later."""
        return self.kind in ("transient", "descriptors")


def status_fault(status: int, body: str, retry_after_s: float | None = None) -> Fault:
    """The fault for an HTTP status that is no success."""
    detail = " ".join(body.split())[:200]
    reason = f"status {status}{': ' + detail if detail else ''}"
    kind: FaultKind
    if status >= 500 or status in _TRANSIENT:
        kind = "transient"
    elif status in (401, 403) or (status == 400 and any(c in body for c in _EXPIRED_CODES)):
        kind = "expired"
    elif status in (404, 410):
        kind = "missing"
    elif status in (412, 416):
        kind = "changed"
    else:
        kind = "final"
    return Fault(kind, reason, status=status, retry_after_s=retry_after_s)
