"""Summary: the figures of all ranks and repeats as one document: DLIO's keys, and below `headrace` our own."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import headrace
from headrace.bench.metrics import (
    Block,
    Formula,
    StepWindow,
    confidence,
    mlperf_au,
    percentiles,
    phase_figures,
    shares_of,
    steadiness_of,
    verdict_of,
)
from headrace.machine.host import read_text
from headrace.machine.mounts import file_system_of, mounts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.bench.checkpoint_runs import CheckpointTimes
    from headrace.bench.ranks import RankGroup
    from headrace.bench.run import RunRecord
    from headrace.bench.schema import Workload


def host_document() -> dict[str, Any]:
    """This machine, ready for JSON."""
    memory = _pairs("/proc/meminfo")
    processor = _pairs("/proc/cpuinfo").get("model name") or platform.machine()
    return {
        "hostname": socket.gethostname(),
        "cpu_count": os.cpu_count() or 1,
        "processor": processor,
        "cpuinfo": {"model name": processor, "cpu_count": os.cpu_count() or 1},
        "meminfo": memory,
        "memory_gb": int(memory.get("MemTotal", "0 kB").split()[0]) / 2**20,
    }


def _pairs(path: str) -> dict[str, str]:
    lines = [line.partition(":") for line in read_text(Path(path)).splitlines()]
    return {name.strip(): value.strip() for name, _, value in lines if value.strip()}


def mount_of(path: str) -> dict[str, str]:
    """The mount that a path lies on: its place, type, source and options; empty if nobody tells."""
    place = file_system_of(os.path.abspath(path))
    for mount in reversed(mounts()):
        if mount.point == place:
            return {
                "place": place, "type": mount.kind, "source": mount.source,
                "options": ",".join(mount.options), "device": mount.device,
            }  # fmt: skip
    return {}


def provenance(data_folder: str, command: list[str]) -> dict[str, Any]:
    """What one needs to know to believe a result, and to make it again."""
    return {
        "headrace": headrace.__version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "kernel": platform.release(),
        "platform": platform.platform(),
        "mount": mount_of(data_folder),
        "command": command,
    }


NOT_MLPERF: Final = "This is not an MLPerf result."


@dataclass(slots=True, kw_only=True)
class GatheredRun:
    """What rank 0 knows of a run.

    Attributes:
        blocks: of all accelerators; epochs of repeats are counted on.
        repeats: how often the whole was run.
        ceiling: blocks of the same steps on a null store, or none.
        hosts: one document for each host.
        checkpoints: seconds and bytes of each: the slowest rank's time, all ranks' bytes.
        restores: the same of those that were read back.
        blocking_s: that training stood still for each checkpoint: the slowest rank's time.
        checkpoint_writer: what wrote them; None when none was written or read.
        phases_s: what the time to solution went to; of repeats: on average.
        restore_residency: the share of the checkpoints in page caches before they were read.
    """

    engine: str
    formula: Formula
    start_s: float
    accelerators: int
    end_s: float = 0.0
    blocks: Sequence[Block] = ()
    repeats: int = 1
    ceiling: Sequence[Block] = ()
    hosts: Sequence[dict[str, Any]] = ()
    nbytes: int = 0
    device_bytes: int = 0
    cpu_s: float = 0.0
    batch_waits_s: Sequence[float] = ()
    checkpoints: Sequence[tuple[float, int]] = ()
    restores: Sequence[tuple[float, int]] = ()
    blocking_s: Sequence[float] = ()
    checkpoint_writer: str | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    restore_residency: float | None = None
    residency: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def block_document(block: Block) -> dict[str, Any]:
    """A block for JSON."""
    values: dict[str, Any] = {entry.name: getattr(block, entry.name) for entry in fields(block)}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def block_of(document: dict[str, Any]) -> Block:
    """A block from JSON."""
    values: dict[str, Any] = {
        name: np.array(value, np.float64) if isinstance(value, list) else value
        for name, value in document.items()
    }
    return Block(**values)


def timestamp(seconds: float) -> str:
    """DLIO's: local time, without a zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%dT%H:%M:%S.%f")


def summary_document(workload: Workload, run: GatheredRun) -> dict[str, Any]:
    """summary.json."""
    data, hosts = workload.dataset, run.hosts
    first = hosts[0] if hosts else {}
    size_gb = data.num_samples("train") * data.nominal_bytes / 2**30
    per_host_gb = size_gb / max(1, len(run.hosts))
    return {
        "start": timestamp(run.start_s),
        "end": timestamp(run.end_s),
        "num_accelerators": run.accelerators,
        "num_hosts": len(run.hosts),
        "hostname": first.get("hostname", ""),
        "epochs": workload.train.epochs,
        "metric": _metric(workload, run),
        "num_files_train": data.num_files_train,
        "num_files_eval": data.num_files_eval,
        "num_samples_per_file": data.num_samples_per_file,
        "host_cpu_count": [host["cpu_count"] for host in run.hosts],
        "host_processor_name": first.get("processor", ""),
        "potential_caching": [int(h["memory_gb"] > per_host_gb) for h in run.hosts],
        "host_cpuinfo": first.get("cpuinfo", {}),
        "host_meminfo": first.get("meminfo", {}),
        "host_memory_GB": [host["memory_gb"] for host in run.hosts],
        "data_size_per_host_GB": per_host_gb,
        "headrace": _own(workload, run),
    }


def window_of(workload: Workload) -> StepWindow:
    """The steps that count."""
    output = workload.output
    return StepWindow(output.metric_exclude_start_steps, output.metric_exclude_end_steps)


def _mark(au: float, workload: Workload) -> str:
    """DLIO's words for an AU in percent that is what the workload asks for, or is not."""
    return "success" if au >= workload.metric.au * 100 else "fail"


def _metric(workload: Workload, run: GatheredRun) -> dict[str, Any]:
    metric: dict[str, Any] = {}
    reader = workload.reader
    for kind, batch in (("train", reader.batch_size), ("eval", reader.batch_size_eval)):
        blocks = [block for block in run.blocks if block.kind == kind]
        if not blocks:
            continue
        phase = phase_figures(blocks, batch, window_of(workload), run.formula)
        io_mean, io_stdev = phase.mb_per_s(workload.dataset.nominal_bytes)
        metric |= {
            f"{kind}_au_percentage": list(phase.au_percent),
            f"{kind}_au_mean_percentage": phase.au_mean_percent,
            f"{kind}_au_meet_expectation": _mark(phase.au_mean_percent, workload),
            f"{kind}_au_stdev_percentage": phase.au_stdev_percent,
            f"{kind}_throughput_samples_per_second": list(phase.throughput),
            f"{kind}_throughput_mean_samples_per_second": phase.throughput_mean,
            f"{kind}_throughput_stdev_samples_per_second": phase.throughput_stdev,
            f"{kind}_io_mean_MB_per_second": io_mean,
            f"{kind}_io_stdev_MB_per_second": io_stdev,
        }
    for name, timed in (("save", run.checkpoints), ("load", run.restores)):
        if not timed:
            continue
        # DLIO's GB are GiB.
        rates = [nbytes / 2**30 / max(seconds, 1e-9) for seconds, nbytes in timed]
        durations = [seconds for seconds, _ in timed]
        metric |= {
            f"{name}_checkpoint_io_mean_GB_per_second": float(np.mean(rates)),
            f"{name}_checkpoint_io_stdev_GB_per_second": float(np.std(rates)),
            f"{name}_checkpoint_duration_mean_seconds": float(np.mean(durations)),
            f"{name}_checkpoint_duration_stdev_seconds": float(np.std(durations)),
            "checkpoint_size_GB": timed[-1][1] / 2**30,
        }
    return metric


def _own(workload: Workload, run: GatheredRun) -> dict[str, Any]:
    """What DLIO has no names for."""
    own: dict[str, Any] = {"not_mlperf": NOT_MLPERF}
    if run.blocks:
        own = _of_training(workload, run)
    if run.checkpoint_writer is not None:
        saves, loads = ([s for s, _ in timed] for timed in (run.checkpoints, run.restores))
        own["checkpoint"] = {
            "writer": run.checkpoint_writer,
            "saves_s": saves,
            "loads_s": loads,
            "save_s": percentiles(saves),
            "blocking_s": percentiles(run.blocking_s),
            "load_s": percentiles(loads),
            "page_cache_share_before_loads": run.restore_residency,
        }
    return own | {
        "cpu_s": run.cpu_s,
        "device_bytes": run.device_bytes,
        "provenance": run.provenance,
        "notes": list(run.notes),
    }


def _of_training(workload: Workload, run: GatheredRun) -> dict[str, Any]:
    window, batch = window_of(workload), workload.reader.batch_size
    train = [block for block in run.blocks if block.kind == "train"]
    step_s = workload.train.computation_time.mean_s
    shares = shares_of(train, window)
    late = percentiles(np.concatenate([b.late_s for b in run.blocks])) if train else {}
    steady = steadiness_of(train, window)
    repeats = _repeats(train, run.repeats)
    aus = [phase_figures(r, batch, window, run.formula).au_mean_percent for r in repeats]
    au_mlperf = float(np.mean([mlperf_au(each, step_s) for each in repeats]))
    ceiling_au = None
    if run.ceiling:
        ceiling_au = phase_figures(run.ceiling, batch, window, "mlcommons").au_mean_percent
    au = float(np.mean(aus)) if aus else 0.0
    verdict = verdict_of(au, ceiling_au, shares, late.get("p99", 0.0), step_s)
    formulas: tuple[Formula, ...] = ("upstream", "mlcommons")
    return {
        "engine": run.engine,
        "data_loader": workload.reader.data_loader,
        "not_mlperf": NOT_MLPERF,
        "throughput_formula": run.formula,
        "throughput_by_formula_samples_per_s": {
            formula: phase_figures(train, batch, window, formula).throughput_mean
            for formula in formulas
        },
        "au_mlperf_percent": au_mlperf,
        "au_mlperf_meet_expectation": _mark(au_mlperf, workload),
        "au_percent": confidence(aus).document(),
        "ceiling_au_percent": ceiling_au,
        "bound": verdict.bound,
        "bound_reason": verdict.reason,
        "repeats": run.repeats,
        "time_to_solution": time_to_solution(run.phases_s),
        "time": asdict(shares),
        "wait_s": percentiles(
            [wait for b in train for wait in b.load_s[window.bounds(b.steps)].tolist()]
        ),
        "batch_wait_s": percentiles(run.batch_waits_s),
        "late_s": late,
        "steady": steady.steady,
        "drift": steady.drift,
        "bytes": run.nbytes,
        "page_cache_bytes": max(0, run.nbytes - run.device_bytes),
        "cpu_s_per_gb": run.cpu_s / (run.nbytes / 1e9) if run.nbytes else None,
        "residency_before": run.residency,
    }


def _repeats(train: Sequence[Block], count: int) -> list[list[Block]]:
    """The blocks of each repeat: all have as many epochs."""
    last = max((block.epoch for block in train), default=0)
    epochs = last // count if count else 0
    return [
        [block for block in train if n * epochs < block.epoch <= (n + 1) * epochs]
        for n in range(count)
    ]


def time_to_solution(phases_s: Mapping[str, float]) -> dict[str, float]:
    """`total_s` and what it is made of, `staging_s` and so on; empty where it was not recorded."""
    if not phases_s:
        return {}
    parts = {f"{phase}_s": seconds for phase, seconds in phases_s.items()}
    return {"total_s": sum(parts.values())} | parts


def metric_lines(summary: dict[str, Any]) -> list[str]:
    """The `[METRIC]` lines that DLIO logs at the end."""
    metric, line = summary["metric"], "=" * 58
    lines = ["Averaged metric over all steps/epochs", f"[METRIC] {line}"]
    lines.append(f"[METRIC] Number of Simulated Accelerators: {summary['num_accelerators']} ")

    def show(title: str, name: str) -> None:
        """A figure's mean and deviation; `name` has `{}` for which of both."""
        mean, deviation = metric[name.format("mean")], metric[name.format("stdev")]
        lines.append(f"[METRIC] {title}: {mean:.4f} ({deviation:.4f})")

    for kind, name, io in (
        ("train", "Training", "Training I/O Throughput"),
        ("eval", "Eval", "Eval Throughput"),
    ):
        if f"{kind}_au_mean_percentage" in metric:
            show(f"{name} Accelerator Utilization [AU] (%)", f"{kind}_au_{{}}_percentage")
            show(
                f"{name} Throughput (samples/second)", f"{kind}_throughput_{{}}_samples_per_second"
            )
            show(f"{io} (MB/second)", f"{kind}_io_{{}}_MB_per_second")
            passed = f"{kind}_au_meet_expectation"
            lines.append(f"[METRIC] {passed}: {metric[passed]}")
    for name in ("save", "load"):
        title, key = f"Checkpoint {name}", f"{name}_checkpoint"
        if f"{key}_duration_mean_seconds" in metric:
            show(f"{title} duration (seconds)", f"{key}_duration_{{}}_seconds")
            show(f"{title} I/O Throughput (GB/second)", f"{key}_io_{{}}_GB_per_second")
    return [*lines, f"[METRIC] {line}"]


def together(runs: Sequence[GatheredRun]) -> GatheredRun:
    """One run of all epochs, counted on from repeat to repeat.

    Bytes and CPU are sums, the phases' times means; page cache and provenance are the first's.
    """
    first, last = runs[0], runs[-1]
    if len(runs) == 1:
        return first
    blocks, before = [], 0
    for run in runs:
        blocks += [replace(block, epoch=block.epoch + before) for block in run.blocks]
        before = max((block.epoch for block in blocks), default=before)
    return replace(
        first,
        end_s=last.end_s,
        blocks=blocks,
        repeats=len(runs),
        nbytes=sum(run.nbytes for run in runs),
        device_bytes=sum(run.device_bytes for run in runs),
        cpu_s=sum(run.cpu_s for run in runs),
        batch_waits_s=[wait for run in runs for wait in run.batch_waits_s],
        checkpoints=[each for run in runs for each in run.checkpoints],
        restores=[each for run in runs for each in run.restores],
        blocking_s=[each for run in runs for each in run.blocking_s],
        phases_s={
            phase: sum(run.phases_s[phase] for run in runs) / len(runs) for phase in first.phases_s
        },
    )


_WAITS_MAX: Final = 200_000
"""Waits of a rank that are sent to rank 0 for percentiles, at most, evenly taken."""

_DEADLINE_S: Final = 300.0


def gather_run(
    group: RankGroup,
    run: GatheredRun,
    recorded: RunRecord,
    ceiling: RunRecord | None = None,
    restored: Sequence[CheckpointTimes] = (),
) -> bool:
    """Complete a run's figures by what all ranks recorded. All ranks call it; True in rank 0 alone.

    Raises:
        BenchError: a rank is gone.
    """
    waits = [float(wait) for part in recorded.batch_waits_s for wait in part]
    every = group.gather({
        "blocks": [block_document(block) for block in recorded.blocks],
        "ceiling": [block_document(block) for block in ceiling.blocks] if ceiling else [],
        "host": host_document(),
        "nbytes": recorded.nbytes, "device_bytes": recorded.device_bytes, "cpu_s": recorded.cpu_s,
        "phases": recorded.phases_s,
        "saved": [asdict(saved) for saved in recorded.checkpoints],
        "restored": [asdict(each) for each in restored],
        "waits": waits[:: len(waits) // _WAITS_MAX + 1],
    }, _DEADLINE_S)  # fmt: skip
    if not every:
        return False
    run.end_s = time.time()
    run.blocks = [block_of(b) for part in every for b in part["blocks"]]
    run.ceiling = [block_of(b) for part in every for b in part["ceiling"]]
    run.hosts = list({part["host"]["hostname"]: part["host"] for part in every}.values())
    run.nbytes = sum(part["nbytes"] for part in every)
    run.device_bytes = sum(part["device_bytes"] for part in every)
    run.cpu_s = sum(part["cpu_s"] for part in every)
    run.batch_waits_s = [wait for part in every for wait in part["waits"]]
    # Ranks meet at every block: the one that took longest is the one the others waited for.
    run.phases_s = max((part["phases"] for part in every), key=lambda each: sum(each.values()))
    run.checkpoints = _slowest([part["saved"] for part in every])
    run.restores = _slowest([part["restored"] for part in every])
    run.blocking_s = [
        max(saved["blocking_s"] for saved in of_all)
        for of_all in zip(*(part["saved"] for part in every), strict=True)
    ]
    return True


def _slowest(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[float, int]]:
    """Of each checkpoint: the slowest rank's time, and all ranks' bytes."""
    return [
        (max(one["duration_s"] for one in of_all), sum(one["nbytes"] for one in of_all))
        for of_all in zip(*ranks, strict=True)
    ]
