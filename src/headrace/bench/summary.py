"""Summary: what a run left, of one rank, of all, of all repeats; and its figures as one document.

The document has DLIO's keys, and below `headrace` our own.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
import time
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import headrace
from headrace.base.text import seconds_text
from headrace.bench import metrics
from headrace.io.objects.location import is_url
from headrace.machine.host import CpuUse, mount_of, mounts, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.bench.ranks import RankGroup
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


def provenance(data_folder: str, command: list[str]) -> dict[str, Any]:
    """What one needs to know to believe a result, and to make it again."""
    mount = None if is_url(data_folder) else mount_of(os.path.abspath(data_folder), mounts())
    return {
        "headrace": headrace.__version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "kernel": platform.release(),
        "platform": platform.platform(),
        "mount": {} if mount is None else {
            "place": mount.point, "type": mount.kind, "source": mount.source,
            "options": ",".join(mount.options), "device": mount.device,
        },
        "command": command,
    }  # fmt: skip


NOT_MLPERF: Final = "This is not an MLPerf result."


@dataclass(slots=True, kw_only=True)
class BenchRecord:
    """What a run left: of one process's accelerators, or, gathered, of all of them.

    Attributes:
        blocks: epochs of repeats are counted on.
        repeats: of several runs together, each.
        ceiling: blocks of the same steps on a null store, or none.
        hosts: one document for each host.
        nbytes: that the engine delivered; 0 where it cannot tell.
        device_bytes: that the processes and their workers read from devices.
        cpu_s: user and system time of the processes and their workers.
        cpu_use: processors that they and other programs had while it ran, of all hosts together.
        checkpoints: of all ranks each is the slowest's, with the bytes of all.
        restores: those that were read back.
        checkpoint_writer: what wrote them; None when none was written or read.
        phases_s: what the time to solution went to.
        restore_residency: the share of the checkpoints in page caches before they were read.
    """

    engine: str
    formula: metrics.Formula = "mlcommons"
    start_s: float = 0.0
    accelerators: int = 1
    end_s: float = 0.0
    blocks: Sequence[metrics.Block] = ()
    repeats: Sequence[BenchRecord] = ()
    ceiling: Sequence[metrics.Block] = ()
    hosts: Sequence[dict[str, Any]] = ()
    nbytes: int = 0
    device_bytes: int = 0
    cpu_s: float = 0.0
    cpu_use: CpuUse = field(default_factory=CpuUse)
    batch_waits_s: Sequence[float] | NDArray[np.float64] = ()
    checkpoints: Sequence[metrics.CheckpointTimes] = ()
    restores: Sequence[metrics.CheckpointTimes] = ()
    checkpoint_writer: str | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    restore_residency: float | None = None
    residency: dict[str, Any] = field(default_factory=dict)
    engine_figures: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


_WAITS_MAX: Final = 200_000
"""Waits of a rank that are sent to rank 0 for percentiles, at most, evenly taken."""

_DEADLINE_S: Final = 300.0


def gather_run(group: RankGroup, record: BenchRecord) -> bool:
    """Complete rank 0's record by those of all ranks. All ranks call it; True in rank 0 alone.

    Raises:
        BenchError: a rank is gone.
    """
    waits = np.asarray(record.batch_waits_s)
    every = group.gather({
        "blocks": [_plain_block(block) for block in record.blocks],
        "ceiling": [_plain_block(block) for block in record.ceiling],
        "host": host_document(),
        "nbytes": record.nbytes, "device_bytes": record.device_bytes, "cpu_s": record.cpu_s,
        "phases": record.phases_s, "saved": record.checkpoints, "restored": record.restores,
        "cpu_use": list(record.cpu_use), "waits": waits[:: len(waits) // _WAITS_MAX + 1].tolist(),
    }, _DEADLINE_S)  # fmt: skip
    if not every:
        return False
    record.end_s = time.time()
    record.blocks = [_block_of(b) for part in every for b in part["blocks"]]
    record.ceiling = [_block_of(b) for part in every for b in part["ceiling"]]
    record.hosts = list({part["host"]["hostname"]: part["host"] for part in every}.values())
    for name in ("nbytes", "device_bytes", "cpu_s"):
        setattr(record, name, sum(part[name] for part in every))
    # Every rank of a host sees the others among the host's other programs.
    own_cpus = sum(part["cpu_use"][0] for part in every)
    busy_cpus = {part["host"]["hostname"]: sum(part["cpu_use"]) for part in every}
    record.cpu_use = CpuUse(own_cpus, max(sum(busy_cpus.values()) - own_cpus, 0.0))
    record.batch_waits_s = [wait for part in every for wait in part["waits"]]
    # Ranks meet at every block: the one that took longest is the one the others waited for.
    record.phases_s = max((part["phases"] for part in every), key=lambda each: sum(each.values()))
    record.checkpoints = _slowest([part["saved"] for part in every])
    record.restores = _slowest([part["restored"] for part in every])
    return True


def _plain_block(block: metrics.Block) -> dict[str, Any]:
    values = {entry.name: getattr(block, entry.name) for entry in fields(block)}
    return {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in values.items()}


def _block_of(plain: dict[str, Any]) -> metrics.Block:
    lists = {name: np.array(v, np.float64) for name, v in plain.items() if isinstance(v, list)}
    return metrics.Block(**(plain | lists))


def _slowest(ranks: Sequence[Sequence[Any]]) -> list[metrics.CheckpointTimes]:
    """Each checkpoint of all ranks, of which each has its own as plain values."""
    checkpoints = []
    for of_ranks in zip(*ranks, strict=True):
        parts = [metrics.CheckpointTimes(*part) for part in of_ranks]
        checkpoints.append(parts[0]._replace(
            duration_s=max(part.duration_s for part in parts),
            blocking_s=max(part.blocking_s for part in parts),
            nbytes=sum(part.nbytes for part in parts),
        ))  # fmt: skip
    return checkpoints


def together(runs: Sequence[BenchRecord]) -> BenchRecord:
    """One run of all epochs, counted on from repeat to repeat; figures are means of the repeats.

    Page cache and provenance are the first's.
    """
    blocks: list[metrics.Block] = []
    for run in runs:
        before = max((block.epoch for block in blocks), default=0)
        blocks += [replace(block, epoch=block.epoch + before) for block in run.blocks]
    means = {n: _mean([getattr(run, n) for run in runs]) for n in ("device_bytes", "cpu_s")}
    cpu_use = CpuUse(*map(_mean, zip(*(run.cpu_use for run in runs), strict=True)))
    return replace(
        runs[0], end_s=runs[-1].end_s, blocks=blocks, repeats=runs, **means, cpu_use=cpu_use,
        checkpoints=[each for run in runs for each in run.checkpoints],
    )  # fmt: skip


def _mean(values: Sequence[Any]) -> Any:
    """Of equal documents' numbers each one's mean; None where one is not known."""
    first = values[0]
    if len(values) == 1 or isinstance(first, str):
        return first
    if isinstance(first, dict):
        return {key: _mean([each[key] for each in values]) for key in first}
    if None in values:
        return None
    mean = sum(values) / len(values)
    return round(mean) if isinstance(first, int) else mean


def timestamp(seconds: float) -> str:
    """DLIO's: local time, without a zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%dT%H:%M:%S.%f")


def window_of(workload: Workload) -> metrics.StepWindow:
    """The steps that count."""
    output = workload.output
    return metrics.StepWindow(output.metric_exclude_start_steps, output.metric_exclude_end_steps)


def summary_document(workload: Workload, run: BenchRecord) -> dict[str, Any]:
    """summary.json."""
    data, hosts = workload.dataset, run.hosts
    first = hosts[0] if hosts else {}
    size_gb = data.num_samples("train") * data.nominal_bytes / 2**30
    per_host_gb = size_gb / max(1, len(hosts))
    own: dict[str, Any] = {"not_mlperf": NOT_MLPERF}
    if run.blocks:
        own = _of_training(workload, run)
    if run.checkpoint_writer is not None:
        saves = [each.duration_s for each in run.checkpoints]
        loads = [each.duration_s for each in run.restores]
        own["checkpoint"] = {
            "writer": run.checkpoint_writer, "saves_s": saves, "loads_s": loads,
            "save_s": metrics.percentiles(saves),
            "blocking_s": metrics.percentiles([each.blocking_s for each in run.checkpoints]),
            "load_s": metrics.percentiles(loads), "page_cache_share_before_loads": run.restore_residency,
        }  # fmt: skip
    return {
        "start": timestamp(run.start_s),
        "end": timestamp(run.end_s),
        "num_accelerators": run.accelerators,
        "num_hosts": len(hosts),
        "hostname": first.get("hostname", ""),
        "epochs": workload.train.epochs,
        "metric": _metric(workload, run),
        "num_files_train": data.num_files_train,
        "num_files_eval": data.num_files_eval,
        "num_samples_per_file": data.num_samples_per_file,
        "host_cpu_count": [host["cpu_count"] for host in hosts],
        "host_processor_name": first.get("processor", ""),
        "potential_caching": [int(host["memory_gb"] > per_host_gb) for host in hosts],
        "host_cpuinfo": first.get("cpuinfo", {}),
        "host_meminfo": first.get("meminfo", {}),
        "host_memory_GB": [host["memory_gb"] for host in hosts],
        "data_size_per_host_GB": per_host_gb,
        "headrace": own | {
            "cpu_s": run.cpu_s, "device_bytes": run.device_bytes, "provenance": run.provenance,
            "notes": list(run.notes),
        },
    }  # fmt: skip


def _mark(au: float, workload: Workload) -> str:
    """DLIO's words for an AU in percent that is what the workload asks for, or is not."""
    return "success" if au >= workload.metric.au * 100 else "fail"


def _metric(workload: Workload, run: BenchRecord) -> dict[str, Any]:
    metric: dict[str, Any] = {}
    reader, scale = workload.reader, workload.dataset.nominal_bytes / 2**20  # DLIO's MB are MiB
    for kind, batch in (("train", reader.batch_size), ("eval", reader.batch_size_eval)):
        blocks = [block for block in run.blocks if block.kind == kind]
        if not blocks:
            continue
        phase = metrics.phase_figures(blocks, batch, window_of(workload), run.formula)
        metric |= {
            f"{kind}_au_percentage": list(phase.au_percent),
            f"{kind}_au_mean_percentage": phase.au_mean_percent,
            f"{kind}_au_meet_expectation": _mark(phase.au_mean_percent, workload),
            f"{kind}_au_stdev_percentage": phase.au_stdev_percent,
            f"{kind}_throughput_samples_per_second": list(phase.throughput),
            f"{kind}_throughput_mean_samples_per_second": phase.throughput_mean,
            f"{kind}_throughput_stdev_samples_per_second": phase.throughput_stdev,
            f"{kind}_io_mean_MB_per_second": phase.throughput_mean * scale,
            f"{kind}_io_stdev_MB_per_second": phase.throughput_stdev * scale,
        }
    for name, timed in (("save", run.checkpoints), ("load", run.restores)):
        if not timed:
            continue
        # DLIO's GB are GiB.
        rates = [each.nbytes / 2**30 / max(each.duration_s, 1e-9) for each in timed]
        durations = [each.duration_s for each in timed]
        metric |= {
            f"{name}_checkpoint_io_mean_GB_per_second": float(np.mean(rates)),
            f"{name}_checkpoint_io_stdev_GB_per_second": float(np.std(rates)),
            f"{name}_checkpoint_duration_mean_seconds": float(np.mean(durations)),
            f"{name}_checkpoint_duration_stdev_seconds": float(np.std(durations)),
            "checkpoint_size_GB": timed[-1].nbytes / 2**30,
        }
    return metric


def _of_training(workload: Workload, run: BenchRecord) -> dict[str, Any]:
    """What DLIO has no names for."""
    window, batch = window_of(workload), workload.reader.batch_size
    each = [_of_repeat(workload, one) for one in run.repeats or [run]]
    own: dict[str, Any] = _mean(each) | {"page_cache_share": _cached_share(run)}
    # Of the mean time the mean share, as reports have it: else the longest repeat would count most.
    total_s, shares = own["time"]["total_s"], [metrics.TimeShares(**one["time"]) for one in each]
    for part in ("compute", "wait", "harness", "barrier"):
        own["time"][f"{part}_s"] = total_s * _mean([share.of(part) for share in shares])
    au = metrics.confidence([one["au_percent"] for one in each])
    ceiling_au = None
    if run.ceiling:
        ceiling_au = metrics.phase_figures(run.ceiling, batch, window, "mlcommons").au_mean_percent
    if len(run.repeats) > 1:
        of_repeats = [_of_training(workload, one) for one in run.repeats]
        own["bound_of_repeats"] = [
            {name: one[name] for name in ("bound", "bound_reason")} for one in of_repeats
        ]
    verdict = metrics.verdict_of(
        au.mean, ceiling_au, metrics.TimeShares(**own["time"]), own["late_s"],
        workload.train.computation_time.mean_s, run.accelerators, own["page_cache_share"], run.cpu_use,
        sum(host["cpu_count"] for host in run.hosts),
    )  # fmt: skip
    return own | {
        "engine": run.engine,
        "data_loader": workload.reader.data_loader,
        "not_mlperf": NOT_MLPERF,
        "throughput_formula": run.formula,
        "au_mlperf_meet_expectation": _mark(own["au_mlperf_percent"], workload),
        "au_percent": au.document(),
        "ceiling_au_percent": ceiling_au,
        "bound": verdict.bound,
        "bound_reason": verdict.reason,
        "repeats": len(each),
        "other_cpus": None if math.isnan(run.cpu_use.others) else run.cpu_use.others,
        "residency_before": run.residency,
    }


def _of_repeat(workload: Workload, run: BenchRecord) -> dict[str, Any]:
    """The figures of one repeat, of which those of several are means."""
    window, batch = window_of(workload), workload.reader.batch_size
    train = [block for block in run.blocks if block.kind == "train"]
    late = np.concatenate([block.late_s for block in run.blocks]) if train else ()
    waits = [block.load_s[window.bounds(block.steps)] for block in train]
    formulas: tuple[metrics.Formula, ...] = ("upstream", "mlcommons")
    return {
        "throughput_by_formula_samples_per_s": {
            formula: metrics.phase_figures(train, batch, window, formula).throughput_mean
            for formula in formulas
        },
        "au_mlperf_percent": metrics.mlperf_au(train, workload.train.computation_time.mean_s),
        "au_percent": metrics.phase_figures(train, batch, window, run.formula).au_mean_percent,
        "time_to_solution": time_to_solution(run.phases_s),
        "time": metrics.shares_of(train, window)._asdict(),
        "uncounted": metrics.uncounted_of(train, window)._asdict(),
        "wait_s": metrics.percentiles(np.concatenate(waits) if waits else ()),
        "batch_wait_s": metrics.percentiles(run.batch_waits_s),
        "late_s": metrics.percentiles(late),
        "bytes": run.nbytes,
        "page_cache_bytes": max(0, run.nbytes - run.device_bytes),
        "cpu_s_per_gb": run.cpu_s / (run.nbytes / 1e9) if run.nbytes else None,
    }


def _cached_share(run: BenchRecord) -> float | None:
    """Of all repeats together: what was in memory is known before the first alone."""
    resident = run.residency.get("share")
    if run.provenance.get("simulated") is not None:  # it lies in the page cache, and is slowed down
        resident = None
    each = run.repeats or [run]
    passes = sum(max((b.epoch for b in one.blocks if b.kind == "train"), default=0) for one in each)
    nbytes, from_device = sum(one.nbytes for one in each), sum(one.device_bytes for one in each)
    return metrics.cached_share(nbytes, from_device, resident, passes)


def time_to_solution(phases_s: Mapping[str, float]) -> dict[str, float]:
    """`total_s` and what it is made of, `staging_s` and so on; empty where it was not recorded."""
    if not phases_s:
        return {}
    parts = {f"{phase}_s": seconds for phase, seconds in phases_s.items()}
    return {"total_s": sum(parts.values())} | parts


OTHERS_MANY: Final = 0.25
"""Of the processors: if other programs have so many, figures are no longer those of a storage alone."""

UNCOUNTED_MANY: Final = 0.2
"""Of the time of training: if more of it does not count, that is told."""

_METRIC_LINES: Final = (
    ("Training Accelerator Utilization [AU] (%)", "train_au_{}_percentage"),
    ("Training Throughput (samples/second)", "train_throughput_{}_samples_per_second"),
    ("Training I/O Throughput (MB/second)", "train_io_{}_MB_per_second"),
    ("", "train_au_meet_expectation"),
    ("Eval Accelerator Utilization [AU] (%)", "eval_au_{}_percentage"),
    ("Eval Throughput (samples/second)", "eval_throughput_{}_samples_per_second"),
    ("Eval Throughput (MB/second)", "eval_io_{}_MB_per_second"),
    ("", "eval_au_meet_expectation"),
    ("Checkpoint save duration (seconds)", "save_checkpoint_duration_{}_seconds"),
    ("Checkpoint save I/O Throughput (GB/second)", "save_checkpoint_io_{}_GB_per_second"),
    ("Checkpoint load duration (seconds)", "load_checkpoint_duration_{}_seconds"),
    ("Checkpoint load I/O Throughput (GB/second)", "load_checkpoint_io_{}_GB_per_second"),
)
"""Figures with a mean and a deviation, `{}` in their names; a mark has no title."""


def metric_lines(summary: dict[str, Any]) -> list[str]:
    """The `[METRIC]` lines that DLIO logs at the end, and what bounded the run."""
    metric, rule = summary["metric"], f"[METRIC] {'=' * 58}"
    lines = ["Averaged metric over all steps/epochs", rule]
    lines.append(f"[METRIC] Number of Simulated Accelerators: {summary['num_accelerators']} ")
    for title, name in _METRIC_LINES:
        if not title and name in metric:
            lines.append(f"[METRIC] {name}: {metric[name]}")
        elif name.format("mean") in metric:
            mean, deviation = metric[name.format("mean")], metric[name.format("stdev")]
            lines.append(f"[METRIC] {title}: {mean:.4f} ({deviation:.4f})")
    lines.append(rule)
    if "bound" in (own := summary["headrace"]):
        lines += [bound.line for bound in metrics.bounds_of([own])]
        time = metrics.UncountedTime(**own["uncounted"])
        if time.uncounted_s > UNCOUNTED_MANY * time.all_s:
            lines.append(
                f"{seconds_text(time.uncounted_s)} of {seconds_text(time.all_s)} were steps that do not count, "
                f"as in DLIO the first of each epoch; they waited {seconds_text(time.wait_s)} for data"
            )
        late = [
            f"{own['late_s'][p] * 1e3:.2f} ms late ({p})" for p in ("p50", "p99") if own["late_s"]
        ]
        lines += [f"ends of steps were noticed {', '.join(late)}"] if late else []
        others, cpus = own["other_cpus"] or 0.0, sum(summary["host_cpu_count"])
        if (
            own["bound"] not in {"compute", "processors", "unknown"}
            and others >= OTHERS_MANY * cpus
        ):
            waited = "a wait for data may have been one for a processor"
            lines.append(f"other programs had {others:.1f} of {cpus} processors: {waited}")
    return lines
