"""Advice: one line about what a job waited for most, and what helps. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause

if TYPE_CHECKING:
    from headrace.telemetry.history import JobRecord

__all__ = ["LITTLE", "hint_of"]

LITTLE: Final = 0.05
"""Who waits for less than this share of its time does not starve."""

_STAGED: Final = "headrace://"
"""What a job's staged data are known by, as a file system."""

_STAGED_HELP: Final = (
    "its data are staged: what the first epoch waited for, the next need not; after that, keep samples in "
    "memory (ram_bytes=)"
)
_NEARER: Final = (Cause.STORAGE, Cause.METADATA, Cause.LATENCY, Cause.BANDWIDTH, Cause.NETWORK)
"""Whose remedy is to have the data staged."""

_FROM_STORAGE: Final = (*_NEARER, Cause.PEER)


def hint_of(record: JobRecord) -> str:
    """What to do about a job's waiting."""
    share = record.stall
    if share is None:
        return (
            "nothing is known of its steps: read through headrace (hr.loader, headrace.torch.DataLoader, "
            "headrace run) to have stalls measured"
        )
    use = record.gpu_use
    if share < LITTLE:
        if use is not None and use < 0.5:
            return (
                f"data were there in time, yet the GPUs worked {use:.0%} of the time: "
                "the step itself is the limit (batch size, host-side work, synchronisation)"
            )
        return "data were there in time; nothing to do"
    cause = next(iter(record.waited), Cause.OTHER)
    remedy = cause.remedy
    # Where the job had no GPU, no hours of one were lost anywhere.
    on = record.lost_by_file_system or record.by_file_system(
        "stall_s" if record.measured else "inferred_s"
    )
    systems = [name for name, s in on.items() if name and s > 0]
    where = f" on {systems[0]}" if systems and cause in _FROM_STORAGE else ""
    if cause in _NEARER and systems and systems[0].startswith(_STAGED):
        remedy = _STAGED_HELP
    sure = "" if record.measured else ", probably"
    return f"it waited for {cause.phrase}{where} {share:.0%} of its time{sure}: {remedy}"
