"""Checkpoints of a training job: saved while training goes on, whole or not there at all.

    import headrace as hr

    hr.checkpoint.save({"model": model.state_dict(), "step": step}, "checkpoints/", step)
    ...
    state = hr.checkpoint.load("checkpoints/").tree

`save` returns when the arrays are copied in memory; a thread writes them, and an error of it is raised by
the next call. Each rank saves its own tree; the checkpoint is whole when all have, and is loaded by as many
ranks or by others (`resharding`). `Checkpointer` is the same as an object, with a local folder that is written
first.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

from headrace.base.job import which_rank
from headrace.checkpoint.checkpointer import (
    Checkpoint,
    Checkpointer,
    CheckpointOptions,
    SaveReport,
)
from headrace.checkpoint.folder import steps
from headrace.checkpoint.tree import Sharded

__all__ = [
    "Checkpoint",
    "CheckpointOptions",
    "Checkpointer",
    "SaveReport",
    "Sharded",
    "latest",
    "load",
    "save",
    "steps",
    "wait",
]

_open: dict[tuple[str, int], Checkpointer] = {}


def _checkpointer(
    folder: str | os.PathLike[str],
    rank: int | None,
    world_size: int | None,
    local: str | os.PathLike[str] | None = None,
    options: CheckpointOptions | None = None,
) -> Checkpointer:
    """The folder's, kept from call to call; another one where the arguments are others."""
    place = which_rank(rank, world_size)
    checkpointer = Checkpointer(
        folder, rank=place.rank, world_size=place.world_size, local=local, options=options
    )
    key = (checkpointer.folder, place.rank)
    old = _open.get(key)
    if old is not None and old.pid == os.getpid():
        if old.same_as(checkpointer):
            return old
        old.wait()
    _open[key] = checkpointer
    return checkpointer


def save(
    tree: Any,
    folder: str | os.PathLike[str],
    step: int,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local: str | os.PathLike[str] | None = None,
    options: CheckpointOptions | None = None,
) -> SaveReport:
    """Saves this rank's tree, in the background.

    Args:
        tree: nested dicts, lists and tuples of numpy arrays, torch tensors, numbers, strings and None.
        folder: where the checkpoints of the job go.
        step: the checkpoint's number; larger is newer.
        rank: of this process; not given, from torchrun, MPI or Slurm.
        world_size: processes that save together; likewise.
        local: a folder on this node's disk that is written first, and read first.
        options: how to write.

    Returns:
        How long this call blocked; `wait` returns the rest.

    Raises:
        TypeError: something in the tree cannot be kept.
        CheckpointError: there is a checkpoint of this step already.
        VolumeError: the disk is full, or the system refused: the save before, or, not asynchronous, this one.
    """
    checkpointer = _checkpointer(folder, rank, world_size, local, options)
    checkpointer.save(tree, step)
    report = checkpointer.report
    assert report is not None
    return report


def load(
    folder: str | os.PathLike[str],
    step: int | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local: str | os.PathLike[str] | None = None,
    like: Any = None,
) -> Checkpoint:
    """Loads this rank's tree of the newest whole checkpoint, or of `step`; every byte is checked.

    Args:
        folder: where the checkpoints of the job are.
        step: which one.
        rank: of this process; not given, from torchrun, MPI or Slurm.
        world_size: processes that load together, as many as saved it or not; likewise.
        local: a folder on this node's disk that is read first.
        like: a tree, the model's of now for instance, whose `Sharded` leaves and DTensors say which parts
            this rank wants; DTensors come back as DTensors. It may lack leaves.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointError: other ranks saved it, and it has what nobody can share out.
        CorruptCheckpoint: its bytes are not what was saved.
        VolumeError: a save that was still running failed, or the system refuses to read.
    """
    place = which_rank(rank, world_size)
    running = _open.get((os.path.abspath(folder), place.rank))
    if running is not None and running.pid == os.getpid():
        running.wait()
    with Checkpointer(
        folder, rank=place.rank, world_size=place.world_size, local=local
    ) as checkpointer:
        return checkpointer.load(step, like=like)


def latest(folder: str | os.PathLike[str]) -> int | None:
    """The step of the newest whole checkpoint in a folder; None if there is none."""
    return max(steps(folder), default=None)


def wait() -> list[SaveReport]:
    """Waits until all saves of this process are on the disk.

    Raises:
        VolumeError: one of them failed.
    """
    reports = [c.wait() for c in list(_open.values()) if c.pid == os.getpid()]
    return [r for r in reports if r is not None]


atexit.register(wait)
