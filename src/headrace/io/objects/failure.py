"""A read that was given up, as the error that users see: object, range, status, attempts, time."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from headrace.errors import HeadraceError, SourceChanged, VolumeError, VolumeTimeout
from headrace.io.objects.fault import ERRNO, Fault
from headrace.io.objects.location import shown

_NEXT_STEPS = {
    "changed": "Index or pack the source again, or open the store anew if it was replaced.",
    "missing": "Put the object back, or index or pack the source again.",
    "expired": "Check the credentials: docs/howto/object-stores.md says where they come from.",
    "refused": "Check the credentials: docs/howto/object-stores.md says where they come from.",
    "descriptors": "Raise the limit of open files (ulimit -n).",
    "final": "Check the URL and the server.",
    "transient": "Look at the object store, or give a larger deadline_s in storage_options.",
}


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
        return errno.ETIMEDOUT if self._timed_out else ERRNO[self.fault.kind]

    @property
    def _timed_out(self) -> bool:
        return self.fault.reason.startswith(("stalled", "no answer", "connect timed out"))

    def to_error(self, prefix: str = "") -> HeadraceError:
        """The error to raise; `prefix` names the sample."""
        end = self.offset + self.length
        times = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        message = (
            f"{prefix}{shown(self.url)}: bytes {self.offset:,} to {end:,} cannot be read: "
            f"{self.fault.reason} ({times} in {self.elapsed_s:.1f} s)."
        )
        place = {"path": shown(self.url), "offset_bytes": self.offset}
        step = _NEXT_STEPS[self.fault.kind]
        facts = {
            "status": self.fault.status,
            "attempts": self.attempts,
            "elapsed_s": self.elapsed_s,
        }
        if self.fault.kind == "changed":
            return SourceChanged(message, **place, next_step=step, **facts)  # type: ignore[arg-type]
        kind = VolumeTimeout if self._timed_out else VolumeError
        return kind(message, **place, next_step=step, errno=self.errno, **facts)  # type: ignore[arg-type]
