"""Text: what was recorded, in a few lines for people."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.record.job import Job
    from headrace.insight.record.recording import Recording

__all__ = ["document_of", "lines_of"]

_COLUMNS: Final = 68
"""Of a note, behind its label and the command's own indentation."""


def lines_of(recording: Recording) -> Iterator[str]:
    """What a person wants to know, a line each, not more than 80 columns where numbers allow."""
    job, ended = recording.job, recording.run.ended
    if recording.cut_off:
        yield "cut off: the recording did not see the end; this is what it saw"
    elif ended is not None and ended.signal:
        yield f"the command was ended by signal {ended.signal}; this is what it did until then"
    elif ended is not None and ended.status:
        yield f"the command failed (exit status {ended.status}); this is what it did until then"
    if job is not None:
        yield from _of(job)
        yield f"wrote     {recording.output}, and {_name(recording)} with the exact requests"
        yield f"next      headrace bench run --workload {recording.output} \\"
        yield "              --data-folder DIR --generate      (its reads, in DIR)"
        yield f"          headrace whatif {recording.output} --storage lustre --gpu-speed 2x"
    for note in recording.run.notes:
        yield from _folded(note)


def _folded(note: str) -> Iterator[str]:
    """A note in lines that fit."""
    for at, line in enumerate(textwrap.wrap(note, _COLUMNS, break_long_words=False) or [""]):
        yield f"{'' if at else 'note':<10}{line}"


def _name(recording: Recording) -> str:
    return recording.sidecar.name if recording.sidecar is not None else "no sidecar"


def _of(job: Job) -> Iterator[str]:
    recorded, s = job.recorded, job.statistics
    sizes = recorded.sample_bytes
    train = int((recorded.file_split == 0).sum())
    valid = len(recorded.names) - train
    files = f"{train:,} files" + (f" and {valid:,} of evaluation" if valid else "")
    total = bytes_text(float(recorded.file_bytes.sum()))
    yield f"data      {files}, {total}, {job.format} (by {job.format_by})"
    yield f"          in {job.root}"
    yield (
        f"samples   {len(sizes):,}, of {bytes_text(float(sizes.mean()))} on average "
        f"(stdev {bytes_text(float(sizes.std()))})"
    )
    new = {None: "", True: ", the same in each", False: ", new in each"}[s.same_each_epoch]
    words = {"samples": "shuffled", "files": "files shuffled", "none": "in order"}[s.shuffle]
    each = len(recorded.order) // max(1, recorded.epochs)
    epochs = "1 epoch" if recorded.epochs == 1 else f"{recorded.epochs:,} epochs"
    yield f"order     {epochs} of about {each:,} reads, {words}{new}"
    yield from _rhythm(job)
    if job.saves is not None:
        yield (
            f"saves     {job.saves.count} checkpoints of {bytes_text(job.saves.nbytes)}, "
            f"{job.saves.seconds:.2f} s each"
        )
    processes = max(1, job.rhythm.ranks * (1 + job.rhythm.workers))
    share = job.overhead_s / max(1e-9, job.wall_s * processes)
    yield (
        f"cost      logging {job.calls:,} calls took {job.overhead_s:.2f} s"
        + (f" ({share:.1%} of the run)" if job.wall_s else "")
    )
    for note in job.notes:
        yield from _folded(note)


def _rhythm(job: Job) -> Iterator[str]:
    rhythm = job.rhythm
    ranks = f"{rhythm.ranks} training processes, each with " if rhythm.ranks > 1 else ""
    who = "no workers"
    if rhythm.workers:
        who = "1 worker" if rhythm.workers == 1 else f"{rhythm.workers} workers"
    if rhythm.source == "none":
        yield f"batch     not known; {ranks}{who}"
        return
    how = {"trace": "exact", "messages": "from what workers sent", "bursts": "from pauses"}
    sure = f", {rhythm.batch_fits:.0%} of the reads agree" if rhythm.source != "trace" else ""
    yield f"batch     {rhythm.batch} ({how[rhythm.source]}{sure}); {ranks}{who}"
    if len(rhythm.compute_s):
        wait, total = rhythm.wait_s.sum(), (rhythm.wait_s + rhythm.compute_s).sum()
        yield (
            f"steps     {len(rhythm.compute_s):,} seen: computing {_ms(rhythm.compute_s)}; "
            f"{wait / max(1e-9, total):.1%} waiting"
        )
    if len(rhythm.decode_s):
        yield f"decode    {_ms(rhythm.decode_s)} a sample, between its reads"


def _ms(values: Any) -> str:
    return f"{np.mean(values) * 1e3:.2f} ms (stdev {np.std(values) * 1e3:.2f})"


def document_of(recording: Recording) -> dict[str, Any]:
    """The same for JSON."""
    job, run = recording.job, recording.run
    found: dict[str, Any] = {
        "command": run.command,
        "ended": None if run.ended is None else {"status": run.ended.status, "signal": run.ended.signal},
        "cut_off": recording.cut_off,
        "unseen": run.unseen,
        "wall_s": run.wall_s,
        "notes": [*run.notes, *(job.notes if job else ())],
        "error": None if recording.why is None else str(recording.why),
        "output": None if job is None else str(recording.output),
        "sidecar": None if recording.sidecar is None else str(recording.sidecar),
    }  # fmt: skip
    if job is not None:
        found["job"] = _job(job)
    return found


def _job(job: Job) -> dict[str, Any]:
    recorded, rhythm, saves = job.recorded, job.rhythm, job.saves
    return {
        "root": job.root, "files": len(recorded.names), "bytes": int(recorded.file_bytes.sum()),
        "samples": len(recorded.sample_file), "sample_bytes_mean": float(recorded.sample_bytes.mean()),
        "sample_bytes_stdev": float(recorded.sample_bytes.std()), "format": job.format,
        "format_by": job.format_by, "framework": job.framework, "epochs": recorded.epochs,
        "reads": len(recorded.order), "shuffle": job.statistics.shuffle,
        "order_correlation": job.statistics.correlation,
        "same_each_epoch": job.statistics.same_each_epoch, "batch": rhythm.batch,
        "batch_by": rhythm.source, "batch_fits": rhythm.batch_fits, "workers": rhythm.workers,
        "ranks": rhythm.ranks, "steps": len(rhythm.compute_s),
        "compute_s": _mean(rhythm.compute_s), "wait_s": _mean(rhythm.wait_s),
        "decode_s": _mean(rhythm.decode_s), "collate_s": rhythm.collate_s,
        "checkpoints": None if saves is None else {
            "count": saves.count, "bytes": saves.nbytes, "seconds": saves.seconds,
            "synced": saves.synced,
        },
        "recording": {"calls": job.calls, "seconds": job.overhead_s, "lost": job.lost, "blind": job.blind},
        "left_out": job.found.get("left_out", {}),
    }  # fmt: skip


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None
