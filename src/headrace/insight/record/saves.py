"""Saves: the checkpoints that a program wrote, as far as writes tell."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.insight.record.visits import Visit

__all__ = ["Saves", "saves_of"]

_MODELS: Final = (
    ".pt",
    ".pth",
    ".ckpt",
    ".safetensors",
    ".distcp",
    ".h5",
    ".keras",
    ".npz",
    ".tmp",
)
_NO_MODELS: Final = (".log", ".csv", ".txt", ".json", ".jsonl", ".html", ".png", ".svg", ".pyc")
_BYTES_LEAST: Final = 16 << 10
_BYTES_OF_ANY: Final = 1 << 20
_APART_NS: Final = 200_000_000


@dataclass(frozen=True, slots=True)
class Saves:
    """Checkpoints.

    Attributes:
        count: of them.
        nbytes: of one, the median.
        files: of one, the median.
        seconds: that one was written, the median.
        begin_ns: of each.
        synced: whether the program waited for the disk.
        folder: of the first.
    """

    count: int
    nbytes: int
    files: int
    seconds: float
    begin_ns: tuple[int, ...]
    synced: bool
    folder: str


def saves_of(visits: Iterable[Visit]) -> Saves | None:
    """The checkpoints among all that was written; None: there are none."""
    wrote = sorted((v for v in visits if _is_model(v)), key=lambda v: v.begin_ns)
    groups: list[list[Visit]] = []
    for visit in wrote:
        end = max((v.end_ns for v in groups[-1]), default=0) if groups else 0
        again = bool(groups) and any(v.path == visit.path for v in groups[-1])
        if groups and not again and visit.begin_ns - end < _APART_NS:
            groups[-1].append(visit)
        else:
            groups.append([visit])
    if not groups:
        return None
    sizes = [sum(v.written for v in group) for group in groups]
    seconds = [
        (max(v.end_ns for v in group) - min(v.begin_ns for v in group)) / 1e9 for group in groups
    ]
    return Saves(
        len(groups), int(np.median(sizes)), int(np.median([len(g) for g in groups])),
        float(np.median(seconds)), tuple(min(v.begin_ns for v in g) for g in groups),
        any(v.synced for v in wrote), os.path.dirname(groups[0][0].path),
    )  # fmt: skip


def _is_model(visit: Visit) -> bool:
    path = visit.path.lower()
    if not visit.written or path.endswith(_NO_MODELS) or path.startswith(("/dev/", "/memfd:")):
        return False
    if "tfevents" in path:
        return False
    return visit.written >= (_BYTES_LEAST if path.endswith(_MODELS) else _BYTES_OF_ANY)
