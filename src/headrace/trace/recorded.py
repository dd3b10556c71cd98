"""Recorded: exactly what a job read, request by request: the noun that recording and replaying share.

A sidecar beside a workload's YAML (`job.requests.npz`): the files and their sizes, the samples and where
they lie in them, and the order in which every epoch asked for them; how long each of it took, where that
is known. Plain numpy arrays, never pickled; whatever stands in a damaged or hostile one is an error.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.files import replace_file
from headrace.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["SPLITS", "Recorded", "TrainingSteps", "read_recorded"]

SPLITS: Final = ("train", "valid")

_VERSION: Final = 1
_FILE_BYTES_MAX: Final = 4 << 30
_ENTRIES_MAX: Final = 200_000_000
_NAME_BYTES_MAX: Final = 4096
_SIZE_MAX: Final = 1 << 48

_ARRAYS: Final = {
    "file_bytes": "<i8", "file_split": "u1",
    "sample_file": "<i8", "sample_offset": "<i8", "sample_bytes": "<i8",
    "order": "<i8", "epoch_starts": "<i8", "valid_order": "<i8", "valid_starts": "<i8",
    "open_s": "<f4", "read_s": "<f4", "compute_s": "<f4", "wait_s": "<f4", "decode_s": "<f4",
    "begin_s": "<f8",
}  # fmt: skip
_UNREADABLE: Final = (
    OSError, ValueError, KeyError, EOFError, MemoryError, NotImplementedError, RuntimeError,
    zipfile.BadZipFile, zlib.error, SyntaxError, TypeError, AttributeError, OverflowError,
)  # fmt: skip
"""What zipfile, zlib and numpy raise over damaged archives and array headers."""
_FACTS: Final = ("batch", "workers", "ranks", "processors", "traced", "collate_s", "hand_s")
"""Single figures, as one array in this order."""


def _unknown() -> NDArray[np.float64]:
    return np.zeros(0)


@dataclass(frozen=True, kw_only=True)
class TrainingSteps:
    """How a job trains, step by step: the same for what was recorded, inferred, or is to be predicted."""

    batch: int = 0  # samples of a step of one training process; 0: not known
    workers: int = 0  # processes that read for each training process; 0: it reads by itself
    ranks: int = 1  # training processes
    compute_s: NDArray[np.floating[Any]] = field(default_factory=_unknown)
    """Float (steps,): of one training process; empty: not known."""
    wait_s: NDArray[np.floating[Any]] = field(default_factory=_unknown)
    """Float (steps,): how long it waited for data, likewise."""
    decode_s: NDArray[np.floating[Any]] = field(default_factory=_unknown)
    """Float: what those that read did besides, for each of some samples; empty: not known."""
    collate_s: float = 0.0  # what a batch took besides its samples, by those that read
    hand_s: float = 0.0
    """Of `wait_s`, on average: from a batch's arrival until training had its tensors."""

    @property
    def step_figures(self) -> dict[str, Any]:
        """These figures alone, by name."""
        return {each.name: getattr(self, each.name) for each in fields(TrainingSteps)}

    @property
    def step_s(self) -> float | None:
        """Of a step on average, waiting included; None: not known."""
        return float(self.compute_s.mean() + self.wait_s.mean()) if len(self.wait_s) else None

    @property
    def stall(self) -> float | None:
        """Share of this time that was waited; None: not known."""
        return float(self.wait_s.mean()) / self.step_s if self.step_s else None


@dataclass(frozen=True, kw_only=True)
class Recorded(TrainingSteps):
    """What a job read.

    Raises RecordError if they contradict each other, or a name would lead out of the folder.
    """

    names: Sequence[str]  # of the files, relative to their common folder, `/` between folders
    file_bytes: NDArray[np.int64]  # int64 (files,)
    file_split: NDArray[np.uint8]  # uint8 (files,): an index of `SPLITS`
    sample_file: NDArray[np.int64]  # int64 (samples,): which file a sample lies in
    sample_offset: NDArray[np.int64]  # int64 (samples,): where
    sample_bytes: NDArray[np.int64]  # int64 (samples,): how much of it was read
    order: NDArray[np.int64]
    """int64 (reads,): samples of training as they were asked for, epoch after epoch."""
    epoch_starts: NDArray[np.int64]  # int64 (epochs + 1,): where each epoch begins in `order`
    valid_order: NDArray[np.int64]  # as `order`, of evaluation
    valid_starts: NDArray[np.int64]  # as `epoch_starts`
    open_s: NDArray[np.float32]
    """float32 (reads,): what the open before a read of `order` took; empty: not known."""
    read_s: NDArray[np.float32]  # float32 (reads,): what its bytes took; empty: not known
    begin_s: NDArray[np.float64] = field(default_factory=_unknown)
    """float64 (reads,): when it began, since the first one did; empty: not known."""
    processors: int = 1  # that the training processes could use
    traced: int = 0  # 1: headrace's own loader read, and told of its steps

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_values()
        end = self.sample_offset + self.sample_bytes
        if len(end) and (end > self.file_bytes[self.sample_file]).any():
            raise RecordError("a record has a sample that ends behind its file.")
        _check_starts("epoch_starts", self.epoch_starts, len(self.order))
        _check_starts("valid_starts", self.valid_starts, len(self.valid_order))

    def _check_counts(self) -> None:
        for name in self.names:
            _check_name(name)
        files, samples = len(self.names), len(self.sample_file)
        if len(set(self.names)) < files:
            raise RecordError("a record names a file twice.")
        for name, counts in (
            ("file_bytes", (files,)), ("file_split", (files,)),
            ("sample_offset", (samples,)), ("sample_bytes", (samples,)),
            ("open_s", (0, len(self.order))), ("read_s", (0, len(self.order))),
            ("begin_s", (0, len(self.order))),
            ("wait_s", (len(self.compute_s),)),
        ):  # fmt: skip
            found = len(getattr(self, name))
            if found not in counts:
                raise RecordError(f"a record has {found:,} of {name}, expected {counts[-1]:,}.")

    def _check_values(self) -> None:
        files, samples = len(self.names), len(self.sample_file)
        for name, most in (
            ("file_bytes", _SIZE_MAX), ("file_split", len(SPLITS) - 1), ("sample_file", files - 1),
            ("sample_offset", _SIZE_MAX), ("sample_bytes", _SIZE_MAX), ("order", samples - 1),
            ("valid_order", samples - 1),
        ):  # fmt: skip
            _check_range(name, getattr(self, name), 0, most)
        for name in ("open_s", "read_s", "compute_s", "wait_s", "decode_s", "begin_s"):
            times = getattr(self, name)
            if not (np.isfinite(times) & (times >= 0)).all():
                raise RecordError(f"a record's {name} holds what is no time.")

    @property
    def epochs(self) -> int:
        """How often training went through the data, the last time perhaps not to its end."""
        return len(self.epoch_starts) - 1

    def epoch(self, number: int) -> NDArray[np.int64]:
        """The samples of an epoch, from 0, as they were asked for."""
        return self.order[self.epoch_starts[number] : self.epoch_starts[number + 1]]

    def files_of(self, split: str) -> NDArray[np.intp]:
        """Which files are of a split, in name order: DLIO's."""
        number = SPLITS.index(split)
        indices = np.flatnonzero(self.file_split == number)
        return np.array(sorted(indices.tolist(), key=lambda i: self.names[i]), np.intp)

    @property
    def call_s(self) -> NDArray[np.float64]:
        """What opening and reading took of each read, as far as that is known: float64 (reads,)."""
        total = np.zeros(len(self.order))
        for known in (self.open_s, self.read_s):
            total += known if len(known) else 0.0
        return total

    @cached_property
    def is_whole_files(self) -> bool:
        """Whether each sample is a file of its own, read from its begin to its end."""
        one_each = len(np.unique(self.sample_file)) == len(self.sample_file)
        whole = (self.sample_bytes == self.file_bytes[self.sample_file]).all()
        return bool(one_each and whole)

    def write(self, path: Path) -> None:
        """Put it into a file, at once or not at all; raises OSError if it cannot be written."""
        encoded = [os.fsencode(name) for name in self.names]
        arrays: dict[str, NDArray[Any]] = {
            "version": np.array([_VERSION], "<u4"),
            "names": np.frombuffer(b"".join(encoded), np.uint8),
            "name_ends": np.cumsum([len(name) for name in encoded], dtype="<i8"),
        }
        for name, kind in _ARRAYS.items():
            arrays[name] = np.asarray(getattr(self, name)).astype(kind)
        arrays["facts"] = np.array([getattr(self, name) for name in _FACTS], "<f8")
        out = io.BytesIO()
        np.savez_compressed(out, **arrays)  # type: ignore[arg-type]  # numpy's stub has a keyword allow_pickle
        replace_file(path, out.getvalue())


def read_recorded(path: Path) -> Recorded:
    """Read a sidecar; raises RecordError if it is not there, or damaged, or of another version."""
    try:
        stored = _arrays(path)
        names = _names(stored["names"], stored["name_ends"])
        facts = _facts(stored["facts"])
        arrays: dict[str, Any] = {name: stored[name] for name in _ARRAYS}
        return Recorded(names=names, **facts, **arrays)
    except FileNotFoundError as e:
        raise RecordError(
            f"{path}: there is no such file.",
            path=str(path),
            next_step="It lies beside the workload that `headrace record` wrote; keep the two together.",
        ) from e
    except _UNREADABLE as e:
        what = f"lacks {e}" if isinstance(e, KeyError) else f"cannot be read: {e}"
        raise RecordError(
            f"{path}: {what}.", path=str(path), next_step="Record the job again (headrace record)."
        ) from e
    except RecordError as e:
        raise RecordError(f"{path}: {e.message}", path=str(path), next_step=e.next_step) from e


def _facts(found: NDArray[np.float64]) -> dict[str, Any]:
    values = found.tolist()
    if len(values) != len(_FACTS) or not (np.isfinite(found) & (found >= 0)).all():
        raise RecordError(f"a record's facts are {values}, expected {len(_FACTS)} numbers.")
    return {
        name: value if name.endswith("_s") else int(value)
        for name, value in zip(_FACTS, values, strict=True)
    }


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """What the archive holds, looked at before anything is unpacked."""
    wanted = {"version": "<u4", "names": "u1", "name_ends": "<i8", "facts": "<f8", **_ARRAYS}
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > _FILE_BYTES_MAX:
        raise ValueError(f"its arrays have {total:,} bytes, expected at most {_FILE_BYTES_MAX:,}")
    arrays: dict[str, NDArray[Any]] = {}
    with np.load(path, allow_pickle=False) as archive:
        for name, kind in wanted.items():
            array = archive[name]
            if array.dtype != np.dtype(kind) or array.ndim != 1 or len(array) > _ENTRIES_MAX:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, expected {kind} (n,)")
            arrays[name] = array
            if name == "version" and array.tolist() != [_VERSION]:
                raise RecordError(f"has version {array.tolist()}, expected {_VERSION}.")
    return arrays


def _names(text: NDArray[np.uint8], ends: NDArray[np.int64]) -> list[str]:
    data = text.tobytes()
    begins = [0, *ends.tolist()[:-1]]
    if (np.diff(ends, prepend=0) < 0).any() or (len(ends) and int(ends[-1]) != len(data)):
        raise RecordError("the names of its files overlap.")
    return [os.fsdecode(data[a:b]) for a, b in zip(begins, ends.tolist(), strict=False)]


def _check_name(name: str) -> None:
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise RecordError(f"a record names the file {name!r}, expected a path below a folder.")
    if len(os.fsencode(name)) > _NAME_BYTES_MAX:
        raise RecordError(f"a record names a file of more than {_NAME_BYTES_MAX:,} bytes.")


def _check_range(name: str, values: NDArray[Any], least: int, most: int) -> None:
    if len(values) and not least <= int(values.min()) <= int(values.max()) <= most:
        raise RecordError(f"a record's {name} are not all from {least:,} to {most:,}.")


def _check_starts(name: str, starts: NDArray[np.int64], count: int) -> None:
    if not len(starts) or starts[0] != 0 or starts[-1] != count or (np.diff(starts) < 0).any():
        raise RecordError(f"a record's {name} do not divide its {count:,} reads.")
