"""Live: the verdict on a loader of this process, and one line about each of its epochs.

The line goes to the logger `headrace.epoch` at level INFO, and to standard error where HEADRACE_VERDICT=1.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.control.controller import EPOCH_LOG, wants_epochs
from headrace.control.knob_limits import READS_MAX
from headrace.control.stalls.verdict import Verdict, verdict_line, verdict_of
from headrace.control.stalls.waits import Evidence
from headrace.io.objects.location import shown
from headrace.machine.host import cpu_quota, file_system_of, read_host
from headrace.order import Order
from headrace.order.order import unit_of
from headrace.plane.interpreter import Contention, contention
from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.control.controller import Change, Plane
    from headrace.control.stalls.waits import Source
    from headrace.plane.batch_trace import PassMark, StepLog
    from headrace.plane.stage import StageStats

_PEERS = ("headrace://", "nvme+tcp://")


def verdict_on(loader: Any, *, epoch: int | None = None) -> Verdict:
    """Say why the consumer of a loader (of `headrace.loader`, torch, TensorFlow or Grain) waited.

    With `epoch` only in this one, as far as it is still remembered. Raises TypeError if it is no loader of
    ours.
    """
    stats = getattr(_figures(loader), "stats", None)
    log: StepLog | None = getattr(stats, "steps", None)
    if log is None:
        raise TypeError(f"{type(loader).__name__} is no loader of headrace's: it counts no steps")
    marks = list(log.marks)
    if epoch is not None:
        marks = [mark for mark in marks if mark.epoch == epoch]
    steps, _ = log.since(marks[0].added if epoch is not None and marks else 0)
    if epoch is not None:
        steps = steps[steps["epoch"] == epoch]
    return verdict_of(steps, evidence_of(loader, marks[0] if marks else None))


def evidence_of(loader: Any, since: PassMark | None = None) -> Evidence:
    """What is known of a loader beside its steps.

    Of what is counted, only with the mark `since` when it began.
    """
    inner = getattr(loader, "_loader", loader)
    stages: Sequence[StageStats] = tuple(dict(_figures(loader).stats.stages).values())
    plane: Plane | None = getattr(inner, "tuning", None)
    source = str(getattr(getattr(inner, "source", None), "path", "") or "")
    simulation = _simulation(stages)
    by_node = any(stage.name == "node" and stage.samples for stage in stages)
    remote = next((stage.remote for stage in stages if stage.remote is not None), None)
    quota, cpus = cpu_quota(Path("/")), len(os.sched_getaffinity(0))
    live = _figures(inner).stats.stages_now()
    knobs = [stage.knobs() for stage in live]
    turned = dict(pair for each in knobs for pair in each.items())
    native = turned.get("decode_threads", 0)
    # The drop-in has workers, or else decodes in the training's own thread; other adapters do not say.
    alone = 1 if hasattr(loader, "num_workers") else 0
    decoders = native or getattr(
        loader, "decode_threads", getattr(loader, "num_workers", 0) or alone
    )
    now_s = time.perf_counter()
    host = read_host(now_s).since(since.host) if since is not None else None
    seen: Contention = contention().since(since.contention) if since is not None else Contention()
    return Evidence(
        source=source_kind(source, remote=remote is not None),
        file_system=simulation or (file_system_of(source) if source else ""),
        interpreter_looks=seen.looks,
        interpreter_contended=seen.contended,
        decode_threads=decoders if isinstance(decoders, int) else 0,
        in_process=not hasattr(loader, "decode_threads") and getattr(loader, "num_workers", 1) == 0,
        native_decode=native > 0 or getattr(loader, "decode", None) == "native",
        kept_decoded=any(getattr(getattr(each, "images", None), "keep", None) for each in live),
        cpus=max(1, min(cpus, round(quota))) if quota else cpus,
        cpu_share=host.cpu_share if host else math.nan,
        io_pressure=host.io_pressure if host else math.nan,
        remote_retries=remote.retries if remote else 0,
        remote_requests=remote.requests if remote else 0,
        simulation=simulation,
        without_storage=getattr(_figures(loader), "without_storage", ""),
        # Of what the node daemon reads, its own knobs are what counts.
        reads_allowed=0 if by_node else turned.get("reads_in_flight", 0),
        buffer_bytes=0 if by_node else turned.get("buffer_bytes", 0),
        limit_bytes_per_s=float(max((each.get("bytes_per_s", 0) for each in knobs), default=0)),
        **({} if plane is None else _tuned(plane)),
    )


def _figures(loader: Any) -> Any:
    """What has a loader's `stats`: subclasses of the drop-in may have others under that name."""
    return getattr(loader, "_headrace", loader)


def _simulation(stages: Sequence[StageStats]) -> str:
    return next((stage.simulation for stage in stages if stage.simulation), "")


def seen_of(plane: Plane) -> Evidence:
    """What is known of a plane beside its steps, without asking its stages again."""
    remote = any(stage.remote is not None for stage in plane.stages)
    return Evidence(
        source=source_kind(plane.source, remote=remote),
        reads_allowed=plane.knobs.reads_in_flight,
        buffer_bytes=plane.knobs.buffer_bytes,
        simulation=_simulation(plane.stages),
        **_tuned(plane),
    )


def _tuned(plane: Plane) -> dict[str, Any]:
    memory = plane.history.memory
    frozen = "reads_in_flight" in plane.frozen
    return {
        "reads_set": frozen,
        "reads_possible": READS_MAX if frozen else plane.limits.reads_in_flight.high,
        "more_reads_in_vain": memory is not None and "reads_in_flight" in memory.ceilings,
    }


def source_kind(path: str, *, remote: bool = False) -> Source:
    """What kind of storage a path or URL names."""
    if path.startswith(_PEERS):
        return "peer"
    return "network" if remote or "://" in path else "local"


def tell_epoch(loader: Any, seen: int = 0, changes: Sequence[Change] = ()) -> int:
    """Tell whoever wants to know of the epoch that has ended, and what was tuned. Never fails.

    Steps before `seen` were told of already; returns what to say next time.
    """
    on_stderr, in_log = wants_epochs()
    if sys.is_finalizing() or not (on_stderr or in_log):
        return seen
    try:
        steps, seen = _figures(loader).stats.steps.since(seen)
        if not len(steps):
            return seen
        epoch = int(steps["epoch"][-1])
        kept = [change for change in changes if change.action == "keep"]
        verdict = verdict_on(loader, epoch=epoch)
        whose, unit = _about(loader)
        line = epoch_line(
            f"epoch {epoch}{whose}", steps[steps["epoch"] == epoch], verdict, kept, unit
        )
    except Exception:  # noqa: BLE001 - what says how training fares must not end it
        EPOCH_LOG.exception("nothing can be said of this epoch")
        return seen
    EPOCH_LOG.info("%s", line)
    if on_stderr:
        sys.stderr.write(f"{line}\n")
    return seen


def _about(loader: Any) -> tuple[str, str]:
    """Whose epochs they are, else a training's and a validation's lines look alike; and what they count."""
    inner = getattr(loader, "_loader", loader)
    path = shown(str(getattr(getattr(inner, "source", None), "path", "") or ""))
    data, order = getattr(loader, "dataset", None), getattr(inner, "order", None)
    name = Path(path).name or ("" if data is None else type(data).__name__)
    unit = unit_of(order.describe() if isinstance(order, Order) else {})
    return f" of {name}" if name else "", unit


def epoch_line(
    whose: str, steps: NDArray[np.void], verdict: Verdict, changes: Sequence[Change] = (),
    unit: str = "samples",
) -> str:  # fmt: skip
    """A pass in a line; `whose`: `epoch 2 of photos.hr`."""
    samples = int(steps["samples"].sum()) - int(steps["left_out"].sum())
    parts = [f"headrace: {whose}", f"{samples:,} {unit}"]
    if verdict.seconds > 0.0:
        parts.append(f"{samples / verdict.seconds:,.0f}/s")
    parts.append(verdict_line(verdict))
    sums = steps["bytes"].astype(np.float64).sum(axis=0)
    if (total := float(sums.sum())) > 0.0:
        shares = [(name, float(sums[at]) / total) for at, name in enumerate(TIERS)]
        parts.append(" ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005))
    if changes:
        last = changes[-1]
        parts.append(f"tuner: {f'{turned} kept' if (turned := last.turned()) else last.reason}")
    return " | ".join(parts)
