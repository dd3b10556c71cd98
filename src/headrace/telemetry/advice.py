"""Advice: one line about what a job waited for most, and what helps. By cause; pure.

The causes are those of `headrace top`; a verdict may bring finer ones, for which the general line holds
until they are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace.telemetry.history import JobRecord

__all__ = ["CAUSES", "LITTLE", "hint_of"]

LITTLE: Final = 0.05
"""Who waits for less than this share of its time does not starve."""

CAUSES: Final = {
    "storage": ("storage", "pack it, stage it (headrace launch --stage), or keep it near (cache_dir=)"),
    "peer": ("another node's disk", "stage with more replicas, or look at the network between the nodes"),
    "network": ("the network", "stage onto local disks, or read larger samples at a time"),
    "memory": ("copies out of memory", "use larger batches"),
    "limit": ("the controller's limit", "ask for a larger share, or read less: a cache counts as nothing"),
    "window": ("room in its window", "raise --window, or keep fewer batches"),
    "direct": ("reads round the node daemon", "start the daemon, or give it more room"),
    "decode": ("its own decoding", "use more workers or threads, a cheaper decoder, or smaller images"),
}  # fmt: skip
"""By cause: what is waited for, and what helps."""


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
    cause = next(iter(record.waited), "")
    what, help_ = CAUSES.get(cause, (cause or "data", "see headrace top while it runs"))
    systems = [name for name, s in record.lost_by_file_system.items() if name and s > 0]
    where = f" on {systems[0]}" if systems and cause in ("storage", "network", "peer") else ""
    sure = "" if record.measured else ", probably"
    return f"it waited for {what}{where} {share:.0%} of its time{sure}: {help_}"
