"""Advice: one line about what a job waited for most, and what helps. By cause; pure.

The causes are those of the verdict; and `storage`, `memory`, `window` and `direct` of those who know less,
or of the node daemon.
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
    "policy": ("a rate limit", "ask for a larger share, or read less: a cache counts as nothing"),
    "metadata": ("opening files", "pack them into a store (headrace pack), or stage it"),
    "latency": ("slow answers", "let headrace tune the reads in flight, pack small files, or stage it"),
    "bandwidth": ("storage at its full rate", "keep it near (cache_dir=), stage it, or read less"),
    "python": ("Python code of its own", "decode in workers, and keep other threads out of Python"),
    "collate": ("its own collating", "a cheaper collate_fn, or let workers do it"),
    "transfer": ("copies to the device", "pin_memory and non_blocking, one batch ahead"),
    "slow_rank": ("a slower rank", "look at what that rank waits for"),
    "other": ("something unknown", "see headrace report on a run with trace="),
    "direct": ("reads round the node daemon", "start the daemon, or give it more room"),
    "decode": ("its own decoding", "use more workers or threads, a cheaper decoder, or smaller images"),
}  # fmt: skip
"""By cause: what is waited for, and what helps."""

_STAGED: Final = "headrace://"
"""What a job's staged data are known by, as a file system."""

_STAGED_HELP: Final = (
    "its data are staged: what the first epoch waited for, the next need not; after that, keep samples in "
    "memory (ram_bytes=)"
)
_NEARER: Final = ("storage", "metadata", "latency", "bandwidth", "network")
"""Where CAUSES would have the data staged."""

_FROM_STORAGE: Final = ("storage", "metadata", "latency", "bandwidth", "network", "peer")


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
    # Where the job had no GPU, no hours of one were lost anywhere.
    on = record.lost_by_file_system or record.by_file_system(
        "stall_s" if record.measured else "inferred_s"
    )
    systems = [name for name, s in on.items() if name and s > 0]
    where = f" on {systems[0]}" if systems and cause in _FROM_STORAGE else ""
    if cause in _NEARER and systems and systems[0].startswith(_STAGED):
        help_ = _STAGED_HELP
    sure = "" if record.measured else ", probably"
    return f"it waited for {what}{where} {share:.0%} of its time{sure}: {help_}"
