"""Snapshot files: a cluster at one moment as JSON, to look at later, elsewhere, or in a test.

`{"format": ..., "snapshot": {the fields of ClusterSnapshot}, "crc32c": ...}`. Types are checked, and it is
read fast: 50,000 jobs in a fifth of a second. Needs msgspec (`headrace[cluster]`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.base.documents import seal, unseal
from headrace.cluster.snapshot import ClusterSnapshot  # noqa: TC001 - msgspec reads it
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

__all__ = ["load_snapshot", "save_snapshot", "snapshot_from_json", "snapshot_to_json"]

FORMAT: Final = "headrace-cluster-snapshot-2"
_UNCHECKED: Final = "headrace-cluster-snapshot-1"
"""Of before snapshots had a checksum."""
_WRITE_ONE: Final = "Write one with `headrace cluster queue --save FILE`."


@dataclass(frozen=True, slots=True)
class _File:
    format: str
    snapshot: ClusterSnapshot


@dataclass(frozen=True, slots=True)
class _Head:
    format: str = ""


def save_snapshot(snapshot: ClusterSnapshot, path: Path) -> None:
    """Write a snapshot; the file is the old one or the new one, nothing between.

    Raises:
        ClusterError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(snapshot_to_json(snapshot))
        part.replace(path)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise ClusterError(f"{path}: {e.strerror}.", path=str(path)) from e


def load_snapshot(path: Path) -> ClusterSnapshot:
    """Read a snapshot.

    Raises:
        ClusterError: the file cannot be read, or is none.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ClusterError(f"{path}: {e.strerror}.", path=str(path)) from e
    return snapshot_from_json(data, str(path))


def snapshot_to_json(snapshot: ClusterSnapshot) -> bytes:
    """As text."""
    text: bytes = _msgspec().json.encode(_File(FORMAT, snapshot))
    return seal(text)


def snapshot_from_json(data: bytes, name: str = "the snapshot") -> ClusterSnapshot:
    """From text; `name` is for messages.

    Raises:
        ClusterError: it is none.
    """
    msgspec = _msgspec()
    sums = unseal(data)
    if sums is not None and sums[0] != sums[1]:
        raise ClusterError(
            f"{name}: the snapshot is damaged: its checksum is {sums[0]}, expected {sums[1]}.",
            path=name,
            next_step=_WRITE_ONE,
        )
    expected = FORMAT if sums is not None else _UNCHECKED
    try:
        found: _File = msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as e:
        _refuse_format(data, name, expected)
        raise ClusterError(f"{name}: {e}.", path=name) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ClusterError(f"{name}: it is no JSON: {e}.", path=name) from e
    if found.format != expected:
        _refuse_format(data, name, expected)
    return found.snapshot


def _refuse_format(data: bytes, name: str, expected: str) -> None:
    msgspec = _msgspec()
    try:
        found = msgspec.json.decode(data, type=_Head).format
    except msgspec.ValidationError:
        found = ""
    if found == FORMAT != expected:
        raise ClusterError(
            f"{name}: the snapshot's checksum is missing or damaged.",
            path=name,
            next_step=_WRITE_ONE,
        )
    if found != expected:
        raise ClusterError(
            f"{name}: format is {found!r}, expected {FORMAT!r}.", path=name, next_step=_WRITE_ONE
        )


def _msgspec() -> ModuleType:
    try:
        import msgspec.json
    except ModuleNotFoundError as e:
        raise ClusterError(
            "snapshot files need msgspec.", next_step="pip install 'headrace[cluster]'"
        ) from e
    return msgspec
