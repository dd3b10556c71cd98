"""DLIO's files: which there are, where they lie and what they are called. The only place that knows.

OUTPUT/summary.json                      all ranks
OUTPUT/{rank}_output.json                steps of an accelerator
OUTPUT/{rank}_per_epoch_stats.json       when its epochs began and ended
OUTPUT/dlio.log                          what was printed
OUTPUT/repeats/N/...                    where the run was repeated: the first three of each repeat
OUTPUT/SUBDIR/{config,overrides,hydra}.yaml   what was run, as hydra writes it
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.config.document import yaml_of
from headrace.bench.metrics.dlio import block_au, block_throughput
from headrace.bench.results.summary import timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.config import CommandLine, LoadedWorkload
    from headrace.bench.emulate.checkpoint import Restored, Saved
    from headrace.bench.metrics.dlio import Formula
    from headrace.bench.metrics.timeline import Block, Window

__all__ = [
    "default_folder",
    "repeat_folder",
    "write_configuration",
    "write_json",
    "write_log",
    "write_rank_files",
]


def default_folder(line: CommandLine, loaded: LoadedWorkload) -> Path:
    """Where a run's results go: output.folder, or hydra's run directory, or DLIO's default."""
    workload = loaded.workload
    chosen = workload.output.folder or line.run_dir
    if chosen:
        return Path(chosen)
    return Path("hydra_log") / workload.model.name / time.strftime("%Y-%m-%d-%H-%M-%S")


def repeat_folder(folder: Path, number: int) -> Path:
    """Where a repeat's own results go; `number` is from 1."""
    return folder / "repeats" / str(number)


def write_json(path: Path, document: Any) -> None:
    """A whole document or none: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(document, indent=4) + "\n")
    partial.replace(path)


def write_log(folder: Path, name: str, lines: Sequence[str]) -> None:
    """The log of a run, appended."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(f"[OUTPUT] {timestamp(time.time())} {line}\n")


def write_configuration(folder: Path, line: CommandLine, loaded: LoadedWorkload) -> None:
    """config.yaml, overrides.yaml and hydra.yaml."""
    where = folder / line.output_subdir
    where.mkdir(parents=True, exist_ok=True)
    hydra = {
        "hydra": {
            "run": {"dir": str(folder)},
            "output_subdir": line.output_subdir,
            "overrides": {"hydra": list(line.hydra_overrides), "task": list(line.task_overrides)},
            "job": {
                "name": "dlio_benchmark", "chdir": False, "config_name": "config",
                "override_dirname": ",".join(line.task_overrides),
            },
            "runtime": {
                "cwd": str(Path.cwd()), "output_dir": str(folder.absolute()),
                "choices": {"workload": line.workload},
            },
            "mode": "RUN",
        }
    }  # fmt: skip
    dump = yaml_of().safe_dump
    documents = {
        "config": {"workload": _plain(loaded.document)},
        "overrides": list(line.task_overrides),
        "hydra": hydra,
    }
    for name, document in documents.items():
        (where / f"{name}.yaml").write_text(dump(document, sort_keys=False, width=1000))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _ends(of_epoch: dict[str, Any], end_s: float) -> None:
    """An epoch ends with the last of what belongs to it."""
    end_s = max(end_s, of_epoch["_to"])
    of_epoch |= {
        "_to": end_s, "end": timestamp(end_s), "duration": f"{end_s - of_epoch['_from']:.2f}"
    }  # fmt: skip


def write_rank_files(
    folder: Path,
    rank: int,
    blocks: Sequence[Block],
    *,
    offset_s: float,
    batches: tuple[int, int],
    window: Window,
    formula: Formula,
    host: dict[str, Any],
    saved: Sequence[Saved] = (),
    restored: Sequence[Restored] = (),
) -> None:
    """{rank}_output.json and {rank}_per_epoch_stats.json of one accelerator.

    Args:
        folder: the run's.
        rank: the accelerator's number among all processes'.
        blocks: its own.
        offset_s: what turns the blocks' times into seconds since 1970.
        batches: samples of a step of training and of evaluation.
        window: the steps that count.
        formula: of throughput.
        host: this machine's document.
        saved: the checkpoints of this process.
        restored: those that it read back.
    """
    output: dict[str, Any] = {
        "hostname": host.get("hostname", ""),
        "host_cpuinfo": host.get("cpuinfo", {}),
        "host_meminfo": host.get("meminfo", {}),
    }
    stats: dict[str, Any] = {}
    for block in blocks:
        epoch = output.setdefault(str(block.epoch), {
            "load": {}, "proc": {}, "throughput": {}, "au": {}, "compute": {},
            "host_meminfo": host.get("meminfo", {}),
        })  # fmt: skip
        name = f"block{block.number}" if block.kind == "train" else "eval"
        batch = batches[0] if block.kind == "train" else batches[1]
        start, end = block.start_s + offset_s, block.end_s + offset_s
        epoch["load"][name] = block.load_s.tolist()
        epoch["proc"][name] = block.process_s.tolist()
        epoch["compute"][name] = block.compute_s.tolist()
        epoch["throughput"][name] = block_throughput(block, batch, window, formula)
        epoch["au"][name] = block_au(block, window)
        epoch["end"] = timestamp(end)
        of_epoch = stats.setdefault(
            str(block.epoch), {"start": timestamp(start), "_from": start, "_to": 0.0}
        )
        _ends(of_epoch, end)
        of_epoch[name] = {
            "start": timestamp(start), "end": timestamp(end), "duration": f"{end - start:.2f}",
        }  # fmt: skip
    for kind, done in (("save", saved), ("load", restored)):
        for one in done:
            end_s = one.start_s + one.duration_s
            of_epoch = stats.setdefault(
                str(one.epoch), {"start": timestamp(one.start_s), "_from": one.start_s, "_to": 0.0}
            )
            of_epoch[f"{kind}_ckpt{one.number}"] = {
                "start": timestamp(one.start_s), "end": timestamp(end_s),
                "duration": one.duration_s, "throughput": one.nbytes / 2**30 / one.duration_s,
            }  # fmt: skip
            _ends(of_epoch, end_s)
    for of_epoch in stats.values():
        del of_epoch["_from"], of_epoch["_to"]
    write_json(folder / f"{rank}_output.json", output)
    write_json(folder / f"{rank}_per_epoch_stats.json", stats)
