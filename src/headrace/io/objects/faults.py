"""Faults of object servers: their kinds, what is said of them, and when to try again."""

from __future__ import annotations

import email.utils
import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from headrace.errors import HeadraceError, MissingPackage, SourceChanged, VolumeError, VolumeTimeout
from headrace.io.objects.location import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

FaultKind = Literal[
    "transient", "unreachable", "expired", "changed", "missing", "refused", "descriptors", "final"
]

_CREDENTIALS = "Check the credentials: docs/howto/object-stores.md says where they come from."
_KINDS: dict[FaultKind, tuple[int, str]] = {
    "changed": (
        errno.ESTALE,
        "Index or pack the source again, or open the store anew if it was replaced.",
    ),
    "missing": (errno.ENOENT, "Put the object back, or index or pack the source again."),
    "expired": (errno.EACCES, _CREDENTIALS),
    "refused": (errno.EACCES, _CREDENTIALS),
    "descriptors": (errno.EMFILE, "Raise the limit of open files (ulimit -n)."),
    "unreachable": (
        errno.ECONNREFUSED,
        "Start the server, or correct the URL or the endpoint (storage_options, AWS_ENDPOINT_URL).",
    ),
    "final": (errno.EIO, "Check the URL and the server."),
    "transient": (
        errno.EIO,
        "Look at the object store, or give a larger deadline_s in storage_options.",
    ),
}
"""How the native reader is told, and what to do."""

_TRANSIENT = (408, 425, 429)
_EXPIRED_CODES = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "RequestTimeTooSkewed")


UNREACHABLE_S = 3.0
"""How long a server is tried that has never answered: a wrong address is known soon."""


class Fault(Exception):
    """One attempt failed.

    Args:
        kind: `transient` (again, later), `unreachable` (nobody has answered there yet: again, for
            `UNREACHABLE_S` at most), `expired` (again, with fresh credentials), `changed` (another
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
        return self.kind in ("transient", "unreachable", "descriptors")

    def budget_s(self, deadline_s: float) -> float:
        """How long a read that met this may go on, of the time that it has."""
        return min(deadline_s, UNREACHABLE_S) if self.kind == "unreachable" else deadline_s


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


@dataclass(frozen=True, slots=True)
class Failure:
    """One read that failed for good.

    Attributes:
        url: the object.
        offset: the range's first byte.
        length: the range's length.
        fault: what the last attempt met.
        attempts: how many there were.
        elapsed_s: how long all of them took.
    """

    url: str
    offset: int
    length: int
    fault: Fault
    attempts: int
    elapsed_s: float

    @property
    def errno(self) -> int:
        """What the native reader is told."""
        return errno.ETIMEDOUT if self._timed_out else _KINDS[self.fault.kind][0]

    @property
    def _timed_out(self) -> bool:
        return self.fault.reason.startswith(("stalled", "no answer", "connect timed out"))

    def to_error(self, prefix: str = "") -> HeadraceError:
        """The error to raise; `prefix` names the sample."""
        if isinstance(missing := self.fault.__cause__, MissingPackage):
            return MissingPackage(missing.message, next_step=missing.next_step)
        end = self.offset + self.length
        times = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        message = (
            f"{prefix}{shown(self.url)}: bytes {self.offset:,} to {end:,} cannot be read: "
            f"{self.fault.reason} ({times} in {self.elapsed_s:.1f} s)."
        )
        place = {"path": shown(self.url), "offset_bytes": self.offset}
        step = _KINDS[self.fault.kind][1]
        facts = {
            "status": self.fault.status,
            "attempts": self.attempts,
            "elapsed_s": self.elapsed_s,
        }
        if self.fault.kind == "changed":
            return SourceChanged(message, **place, next_step=step, **facts)  # type: ignore[arg-type]
        kind = VolumeTimeout if self._timed_out else VolumeError
        return kind(message, **place, next_step=step, errno=self.errno, **facts)  # type: ignore[arg-type]


RETRY_AFTER_MAX_S = 3600.0
"""A server that asks for more is taken to have asked for this."""


BUCKETS = 64
"""Of latencies: as in `headrace.plane.stage`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """What the engine of a store's remote volumes has done in this process, since it started.

    Attributes:
        reads: finished reads, those that were given up included.
        requests: requests sent, repeated and doubled ones included.
        bytes: bytes fetched, those between samples included.
        peer_bytes: those of them that other nodes of the job served.
        retries: requests that were repeated after a fault.
        hedges: requests that were sent a second time because the first was slow.
        hedges_won: those of them that were answered before the first.
        refreshes: times the credentials were fetched anew.
        failures: reads given up.
        in_flight: gauge: requests in flight now.
        waiting: gauge: reads that wait for their turn.
        reads_in_flight: gauge: how many may be in flight.
        faults: faults met, by what they are (`status 503`, `truncated`, ...).
        latency_us: histogram of whole reads, retries and pauses included.
    """

    reads: int = 0
    requests: int = 0
    peer_bytes: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    failures: int = 0
    bytes: int = 0
    in_flight: int = 0
    waiting: int = 0
    reads_in_flight: int = 0
    refreshes: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    latency_us: tuple[int, ...] = (0,) * BUCKETS


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait between attempts.

    Attributes:
        first_s: upper bound of the first pause; it doubles each time.
        most_s: upper bound of any pause.
    """

    first_s: float = 0.1
    most_s: float = 10.0

    def pause_s(
        self, attempt: int, elapsed_s: float, budget_s: float, luck: float, asked_s: float | None
    ) -> float | None:
        """Seconds to wait after attempt number `attempt` (1, 2, ...), or None to give up.

        Args:
            attempt: how many attempts have failed.
            elapsed_s: since the first one began.
            budget_s: what the read may take in all.
            luck: a random number from 0 to 1.
            asked_s: what the server's Retry-After said.

        A pause that would not end within the budget is not begun: the error comes at once.
        """
        bound = min(self.most_s, self.first_s * 2.0 ** min(attempt - 1, 60))
        pause = luck * bound + (asked_s or 0.0)
        return pause if elapsed_s + pause < budget_s else None


def parse_retry_after(value: str | None, now_s: float) -> float | None:
    """Seconds of a Retry-After header: a number or a date; None for none or nonsense."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), RETRY_AFTER_MAX_S)
    try:
        when = email.utils.parsedate_to_datetime(text)
        seconds = when.timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S)
