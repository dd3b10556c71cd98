"""Results: the files that a run leaves, and reading them back, DLIO's own too.

OUTPUT/summary.json                      all ranks
OUTPUT/{rank}_output.json                steps of an accelerator
OUTPUT/{rank}_per_epoch_stats.json       when its epochs began and ended
OUTPUT/dlio.log                          what was printed
OUTPUT/repeats/N/...                    where the run was repeated: the first three of each repeat
OUTPUT/SUBDIR/{config,overrides,hydra}.yaml   what was run, as hydra writes it
OUTPUT/earlier/N/...                     all of that of runs that were here before

What is read back is not trusted to be well-formed.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import yaml

from headrace.base.files import replace_file
from headrace.bench.metrics import StepTimes, block_au, block_throughput
from headrace.bench.summary import timestamp
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.bench.config import CommandLine, LoadedWorkload
    from headrace.bench.metrics import Block, CheckpointTimes, Formula, StepWindow


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
    replace_file(path, (json.dumps(document, indent=4) + "\n").encode(), sync=False)


def write_log(folder: Path, name: str, lines: Sequence[str]) -> None:
    """The log of a run, appended."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(f"[OUTPUT] {timestamp(time.time())} {line}\n")


_RESULTS: Final = re.compile(
    r"summary\.json|\d+_(output|per_epoch_stats)\.json|iostat\.json|\.?trace-.*\.pfw|repeats|"
    r"DLIO_(.*_)?report\.txt"
)
"""Files of a run's folder that tell a run's results, ours or DLIO's."""

_CONFIGS: Final = ("dlio_config", ".hydra")
"""Where a run's configuration lies: as `mlpstorage` calls us, and hydra's default."""


def begin_run(folder: Path, line: CommandLine, loaded: LoadedWorkload) -> tuple[str, ...]:
    """Make room for a run's results, and write its configuration; a note if another run's were there.

    DLIO writes over what has the same name and leaves the rest: files of ranks that are no more, a summary of
    another run if this one fails. Who reads the folder then takes two runs for one.
    """
    try:
        moved = _set_aside(folder, line, loaded.workload.output.log_file)
    except OSError as e:
        raise BenchError(
            f"the results of another run in {folder} cannot be moved away: {e.strerror}.",
            path=str(folder), next_step="Give another folder: ++hydra.run.dir=DIR.",
        ) from e  # fmt: skip
    _write_configuration(folder, line, loaded)
    return () if moved is None else (f"results of an earlier run in {folder} are in {moved} now",)


def _set_aside(folder: Path, line: CommandLine, log_file: str) -> Path | None:
    """Move what a run left to a folder of its own below; None if none did."""
    here = os.listdir(folder)
    names = [name for name in here if _RESULTS.fullmatch(name)]
    if not names:
        return None
    names += {log_file, line.output_subdir, *_CONFIGS}.intersection(here)
    earlier = folder / "earlier"
    earlier.mkdir(exist_ok=True)
    number = 1 + max((int(name) for name in os.listdir(earlier) if name.isdecimal()), default=0)
    (earlier / str(number)).mkdir()
    for name in names:
        (folder / name).rename(earlier / str(number) / name)
    return earlier / str(number)


def _write_configuration(folder: Path, line: CommandLine, loaded: LoadedWorkload) -> None:
    """config.yaml, overrides.yaml and hydra.yaml."""
    where = folder / line.output_subdir
    where.mkdir(parents=True, exist_ok=True)
    hydra = {"hydra": {
        "run": {"dir": str(folder)}, "output_subdir": line.output_subdir,
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
    }}  # fmt: skip
    dump = yaml.safe_dump
    config, overrides = {"workload": dict(loaded.document)}, list(line.task_overrides)
    for name, document in (("config", config), ("overrides", overrides), ("hydra", hydra)):
        (where / f"{name}.yaml").write_text(dump(document, sort_keys=False, width=1000))


def write_rank_files(
    folder: Path, rank: int, blocks: Sequence[Block], *, offset_s: float, batches: tuple[int, int],
    window: StepWindow, formula: Formula, host: dict[str, Any],
    saved: Sequence[CheckpointTimes] = (), restored: Sequence[CheckpointTimes] = (),
) -> None:  # fmt: skip
    """{rank}_output.json and {rank}_per_epoch_stats.json of one accelerator."""
    memory = host.get("meminfo", {})
    output: dict[str, Any] = {
        "hostname": host.get("hostname", ""), "host_memory_GB": host.get("memory_gb", 0.0),
        "host_cpu_count": host.get("cpu_count", 0), "host_processor_name": host.get("processor", ""),
        "potential_caching": host.get("potential_caching", 0),
        "host_cpuinfo": host.get("cpuinfo", {}), "host_meminfo": memory,
    }  # fmt: skip
    spans: dict[int, list[tuple[str, float, float, dict[str, Any]]]] = {}
    for block in blocks:
        train = block.kind == "train"
        name, batch = (f"block{block.number}", batches[0]) if train else ("eval", batches[1])
        start_s, end_s = block.start_s + offset_s, block.end_s + offset_s
        figures = {
            "load": block.load_s.tolist(), "proc": block.process_s.tolist(),
            "throughput": block_throughput(block, batch, window, formula),
            "au": block_au(block, window), "compute": block.compute_s.tolist(),
        }  # fmt: skip
        epoch = output.setdefault(str(block.epoch), {key: {} for key in figures})
        for key, figure in figures.items():
            epoch[key][name] = figure
        epoch |= {"host_meminfo": memory, "end": timestamp(end_s)}
        spans.setdefault(block.epoch, []).append((name, start_s, end_s, {}))
    for kind, done in (("save", saved), ("load", restored)):
        for one in done:
            rate = one.nbytes / 2**30 / one.duration_s
            took = {"duration": one.duration_s, "throughput": rate}
            span_s = one.start_s, one.start_s + one.duration_s
            spans.setdefault(one.epoch, []).append((f"{kind}_ckpt{one.number}", *span_s, took))
    stats: dict[str, Any] = {}
    for number, parts in spans.items():
        # An epoch ends with the last of what belongs to it.
        span = _span(parts[0][1], max(end_s for _, _, end_s, _ in parts))
        each = {name: _span(start_s, end_s) | more for name, start_s, end_s, more in parts}
        stats[str(number)] = span | each
    write_json(folder / f"{rank}_output.json", output)
    write_json(folder / f"{rank}_per_epoch_stats.json", stats)


def _span(start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "start": timestamp(start_s), "end": timestamp(end_s), "duration": f"{end_s - start_s:.2f}",
    }  # fmt: skip


_RANK_FILE: Final = re.compile(r"(\d+)_output\.json")

_EPOCH: Final = re.compile(r"[0-9]{1,9}")

_GREATEST: Final = 1e24
"""No figure of a run is greater, in any unit."""

_SECONDS_MOST: Final = 1e9
"""No step takes 30 years."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run."""

    folder: str
    summary: dict[str, Any]
    workload: dict[str, Any]

    @property
    def own(self) -> dict[str, Any]:
        """What only headrace writes; empty in DLIO's results."""
        return _mapping(self.summary.get("headrace"))

    @property
    def metric(self) -> dict[str, Any]:
        """DLIO's figures."""
        return _mapping(self.summary["metric"])

    @property
    def provenance(self) -> dict[str, Any]:
        """Where and with what it ran."""
        return _mapping(self.own.get("provenance"))

    @property
    def au_target_percent(self) -> float | None:
        """The AU that the workload asks for."""
        target = number_of(_mapping(self.workload.get("metric")).get("au"))
        return None if target is None else target * 100


def number_of(value: object) -> float | None:
    """The value if it is a number that a run can have, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _GREATEST else None


def number_at(document: Any, path: str) -> float | None:
    """The number that a document has at `key.of.key`, if it is one that a run can have."""
    for key in path.split("."):
        document = _mapping(document).get(key)
    return number_of(document)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def load_run(folder: str | os.PathLike[str]) -> RunResult:
    """The run in a folder. Raises BenchError if there is none, or it cannot be read."""
    path = Path(folder)
    summary = _document(path / "summary.json")
    if not isinstance(summary.get("metric"), dict):
        file = str(path / "summary.json")
        raise BenchError(f"{file} has no object `metric`: it is no run's summary.", path=file)
    return RunResult(str(path), summary, _workload(path))


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as e:
        raise BenchError(
            f"{path} cannot be read: {e.strerror}.", path=str(path),
            next_step="Give the folder of a run that ended: what ++hydra.run.dir named.",
        ) from e  # fmt: skip
    except (ValueError, RecursionError) as e:
        raise BenchError(f"{path} is not JSON: {e}.", path=str(path)) from e
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise BenchError(f"{path} has a {kind}, expected an object.", path=str(path))
    return document


def _workload(folder: Path) -> dict[str, Any]:
    for name in _CONFIGS:
        file = folder / name / "config.yaml"
        if not file.exists():
            continue
        try:
            config = yaml.safe_load(file.read_bytes())
        except (OSError, yaml.YAMLError) as e:
            raise BenchError(f"{file} cannot be read: {e}.", path=str(file)) from e
        return _mapping(_mapping(config).get("workload"))
    return {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankBlock(StepTimes):
    """One accelerator's steps of an epoch's training or evaluation.

    Attributes:
        name: DLIO's, within the epoch: `block1`, or `eval`; checkpoints within an epoch part blocks.
        start_s: seconds since 1970; None where the file of epochs is not there.
        processed_s: of all steps; in DLIO's runs more than waits and computing, as its own work is in it.
    """

    rank: int
    epoch: int
    name: str
    kind: Literal["train", "eval"]
    start_s: float | None
    end_s: float | None
    au_percent: float | None
    processed_s: float


def rank_blocks(result: RunResult) -> list[RankBlock]:
    """All blocks of all accelerators whose files are in the run's folder, by rank and epoch.

    Raises:
        BenchError: a file cannot be read.
    """
    folder = Path(result.folder)
    ranks = sorted(int(m[1]) for name in os.listdir(folder) if (m := _RANK_FILE.fullmatch(name)))
    return [block for rank in ranks for block in blocks_of_rank(folder, rank)]


def blocks_of_rank(folder: Path, rank: int) -> Iterator[RankBlock]:
    """Those of one accelerator; errors as for `rank_blocks`."""
    output = _document(folder / f"{rank}_output.json")
    path = folder / f"{rank}_per_epoch_stats.json"
    stats = _document(path) if path.exists() else {}
    for epoch in sorted((key for key in output if _EPOCH.fullmatch(key)), key=int):
        of_epoch = _mapping(output[epoch])
        loads, computes, processed, aus = (
            _mapping(of_epoch.get(key)) for key in ("load", "compute", "proc", "au")
        )
        for name in loads:
            times = _mapping(_mapping(stats.get(epoch)).get(name))
            load = _seconds(loads[name], folder, rank)
            compute = _seconds(computes.get(name), folder, rank)
            steps = min(len(load), len(compute))
            process = _seconds(processed.get(name, [load.sum(), compute.sum()]), folder, rank)
            yield RankBlock(
                rank=rank, epoch=int(epoch), name=name,
                kind="eval" if name.startswith("eval") else "train",
                start_s=_moment(times.get("start")), end_s=_moment(times.get("end")),
                load_s=load[:steps], compute_s=compute[:steps], au_percent=number_of(aus.get(name)),
                processed_s=float(process.sum()),
            )  # fmt: skip


def _seconds(values: object, folder: Path, rank: int) -> NDArray[np.float64]:
    try:
        seconds = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        seconds = np.array(math.nan)
    if seconds.ndim != 1 or not ((seconds >= 0) & (seconds < _SECONDS_MOST)).all():
        path = str(folder / f"{rank}_output.json")
        raise BenchError(f"{path} has steps that are no list of seconds.", path=path)
    return seconds


def _moment(text: object) -> float | None:
    """DLIO's timestamp, which is local time, in seconds since 1970."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


_IGNORED: Final = ("output.", "checkpoint.checkpoint_folder", "workflow.generate_data")
"""Keys of workloads that say nothing about what was measured."""

_REPEATS_MOST: Final = 10_000
"""A summary that claims more is not believed."""


def load_runs(folder: str | os.PathLike[str]) -> list[RunResult]:
    """The run in a folder, or its repeats; if results are in folders below, all of these: repeats of one run.

    Raises:
        BenchError: there is none, one cannot be read, or they are not the same.
    """
    path = Path(folder)
    if (path / "summary.json").exists():
        whole = load_run(path)
        return _repeats_of(whole, path) or [whole]
    folders = sorted(each.parent for each in path.glob("*/summary.json"))
    if not folders:
        raise BenchError(
            f"{path} has no summary.json, and neither have the folders in it: no run ended there.",
            path=str(path), next_step="Give the folder of a run: what ++hydra.run.dir named.",
        )  # fmt: skip
    runs = [load_run(each) for each in folders]
    for run in runs[1:]:
        for key, first, other in _differing(_task(runs[0]), _task(run)):
            raise BenchError(
                f"the runs in {path} are not repeats: {key} is {first} in {runs[0].folder}, {other} in "
                f"{run.folder}.",
                path=str(path), next_step="Give the folder of one run.",
            )  # fmt: skip
    return runs


def _repeats_of(whole: RunResult, path: Path) -> list[RunResult]:
    """The repeats that a run has kept, in their order; none of one that was run once.

    An earlier run may have left more of them in the folder: the summary knows how many are its own.
    """
    count = int(number_of(whole.own.get("repeats")) or 1)
    folders = [repeat_folder(path, number) for number in range(1, min(count, _REPEATS_MOST) + 1)]
    if count < 2 or not all((folder / "summary.json").exists() for folder in folders):
        return []
    return [replace(load_run(folder), workload=whole.workload) for folder in folders]


def differences(a: RunResult, b: RunResult) -> Iterator[tuple[str, str, str]]:
    """(what, in a, in b) of how two runs were made."""
    for key, left, right in _differing(_circumstances(a), _circumstances(b)):
        yield key, left or "-", right or "-"


def _differing(
    a: dict[str, str], b: dict[str, str]
) -> Iterator[tuple[str, str | None, str | None]]:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            yield key, a.get(key), b.get(key)


def _circumstances(run: RunResult) -> dict[str, str]:
    """What was run, where and with what."""
    own, ran = run.own, run.provenance
    given = {key: own.get(key) for key in ("throughput_formula", "data_loader")}
    given |= {key: ran.get(key) for key in ("headrace", "kernel", "python", "simulated")}
    given |= flat(ran.get("mount"), "mount.")
    given["cold"] = _mapping(own.get("residency_before")).get("cold")
    given["processor"] = run.summary.get("host_processor_name")
    return _task(run) | {key: str(value) for key, value in given.items() if value is not None}


def _task(run: RunResult) -> dict[str, str]:
    """What was run: repeats have the same."""
    accelerators, engine = run.summary.get("num_accelerators"), run.own.get("engine")
    task = {"num_accelerators": accelerators, "engine": engine}
    task |= {k: v for k, v in flat(run.workload).items() if not k.startswith(_IGNORED)}
    return {key: str(value) for key, value in task.items() if value is not None}


def flat(document: object, prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their full names; of what is none: nothing."""
    values: dict[str, Any] = {}
    for key, value in _mapping(document).items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
