"""Results read back: the files of finished runs. What they say is not trusted to be well-formed."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["RankBlock", "RunResult", "load_run", "number_of", "rank_blocks"]

_RANK_FILE: Final = re.compile(r"(\d+)_output\.json")

_EPOCH: Final = re.compile(r"[0-9]{1,9}")

_GREATEST: Final = 1e24
"""No figure of a run is greater, in any unit."""

_SECONDS_MOST: Final = 1e9
"""No step takes 30 years."""

_CONFIGS: Final = ("dlio_config", ".hydra")
"""Where a run's configuration lies: as `mlpstorage` calls us, and hydra's default."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run.

    Attributes:
        folder: where its files are.
        summary: summary.json.
        workload: what was run, as its config.yaml has it; empty where there is none.
    """

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


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def load_run(folder: str | os.PathLike[str]) -> RunResult:
    """The run in a folder.

    Raises:
        BenchError: there is none, or it cannot be read.
    """
    path = Path(folder)
    summary = _document(path / "summary.json")
    if not isinstance(summary.get("metric"), dict):
        raise BenchError(
            f"{path / 'summary.json'} has no object `metric`: it is no run's summary.",
            path=str(path / "summary.json"),
        )
    return RunResult(str(path), summary, _workload(path))


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as e:
        raise BenchError(
            f"{path} cannot be read: {e.strerror}.",
            path=str(path),
            next_step="Give the folder of a run that ended: what ++hydra.run.dir named.",
        ) from e
    except (ValueError, RecursionError) as e:
        raise BenchError(f"{path} is not JSON: {e}.", path=str(path)) from e
    if not isinstance(document, dict):
        raise BenchError(
            f"{path} has a {type(document).__name__}, expected an object.", path=str(path)
        )
    return document


def _workload(folder: Path) -> dict[str, Any]:
    for name in _CONFIGS:
        file = folder / name / "config.yaml"
        if not file.exists():
            continue
        from headrace.bench.config.document import yaml_of

        yaml = yaml_of()
        try:
            found = yaml.safe_load(file.read_bytes())
        except (OSError, yaml.YAMLError) as e:
            raise BenchError(f"{file} cannot be read: {e}.", path=str(file)) from e
        return _mapping(_mapping(found).get("workload"))
    return {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankBlock:
    """One accelerator's steps of an epoch's training or evaluation.

    Attributes:
        name: DLIO's, within the epoch: `block1`, or `eval`; checkpoints within an epoch part blocks.
        start_s: seconds since 1970; None where the file of epochs is not there.
        load_s: (steps,) the wait for each batch.
        compute_s: (steps,) the time that each step computed.
    """

    rank: int
    epoch: int
    name: str
    kind: Literal["train", "eval"]
    start_s: float | None
    end_s: float | None
    load_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    au_percent: float | None

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return len(self.load_s)

    @property
    def process_s(self) -> NDArray[np.float64]:
        """(steps,) wait and compute."""
        return self.load_s + self.compute_s


def rank_blocks(result: RunResult) -> list[RankBlock]:
    """All blocks of all accelerators whose files are in the run's folder, by rank and epoch.

    Raises:
        BenchError: a file cannot be read.
    """
    folder = Path(result.folder)
    ranks = sorted(int(m[1]) for name in os.listdir(folder) if (m := _RANK_FILE.fullmatch(name)))
    return [block for rank in ranks for block in _of_rank(folder, rank)]


def _of_rank(folder: Path, rank: int) -> Iterator[RankBlock]:
    output = _document(folder / f"{rank}_output.json")
    path = folder / f"{rank}_per_epoch_stats.json"
    stats = _document(path) if path.exists() else {}
    for epoch in sorted((key for key in output if _EPOCH.fullmatch(key)), key=int):
        of_epoch = _mapping(output[epoch])
        for name in _mapping(of_epoch.get("load")):
            times = _mapping(_mapping(stats.get(epoch)).get(name))
            load = _seconds(_mapping(of_epoch.get("load")).get(name), folder, rank)
            compute = _seconds(_mapping(of_epoch.get("compute")).get(name), folder, rank)
            steps = min(len(load), len(compute))
            yield RankBlock(
                rank=rank,
                epoch=int(epoch),
                name=name,
                kind="eval" if name.startswith("eval") else "train",
                start_s=_moment(times.get("start")),
                end_s=_moment(times.get("end")),
                load_s=load[:steps],
                compute_s=compute[:steps],
                au_percent=number_of(_mapping(of_epoch.get("au")).get(name)),
            )


def _seconds(values: object, folder: Path, rank: int) -> NDArray[np.float64]:
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.array(math.nan)
    if found.ndim != 1 or not ((found >= 0) & (found < _SECONDS_MOST)).all():
        path = str(folder / f"{rank}_output.json")
        raise BenchError(f"{path} has steps that are no list of seconds.", path=path)
    return found


def _moment(text: object) -> float | None:
    """DLIO's timestamp, which is local time, in seconds since 1970."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
