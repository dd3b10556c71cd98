"""Checkpoints of a training job: saved while training goes on, whole or not there at all.

    import headrace as hr

    hr.checkpoint.save({"model": model.state_dict(), "step": step}, "checkpoints/", step)
    ...
    state = hr.checkpoint.load("checkpoints/").tree

`save` blocks for a copy in memory. A thread then writes it to the local folder, if there is one, and to
the target, and makes it whole in one before it begins the other. One checkpoint is written at a time: a
`save` that comes sooner waits, so that memory is bounded by one copy. An error of the thread is raised
by the next call, whatever that is; nothing is lost silently.

Each rank saves its own tree; the checkpoint is whole when all have, and is loaded by as many ranks or by
others (`resharding`). `Checkpointer` is the object; the functions keep one for each folder.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.base.files import make_folder, remove_leftovers, sync_folder
from headrace.base.job import start_of_job, which_rank
from headrace.base.lifetime import Closing
from headrace.checkpoint.folder import (
    Durability,
    RankRecord,
    ShardRecord,
    check_new,
    commit,
    damaged,
    read_manifest,
    read_record,
    remove_old,
    shard_name,
    step_folder,
    steps,
    withdraw,
    write_shard,
)
from headrace.checkpoint.resharding import PartsElsewhereError, Resharding
from headrace.checkpoint.tree import Sharded, TreeSnapshot, part_of, take_apart
from headrace.errors import CheckpointNotFound, HeadraceError, VolumeError
from headrace.store.output_file import WriteBuffer, write_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.checkpoint.folder import CheckpointManifest
    from headrace.checkpoint.tree import Leaf

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


_SHARD_BYTES_MIN = 16 << 20  # smaller shards gain nothing from being written side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """How checkpoints are written. None of it changes what is loaded.

    Raises:
        ValueError: a value is out of bounds.
    """

    keep: int | None = 3
    """Whole checkpoints to keep in each folder; None keeps all."""
    asynchronous: bool = True
    """Whether `save` returns when the copy in memory is made. False: when all is on the disk, and without
    the copy."""
    durability: Durability = "direct"
    """`direct` writes past the page cache, `fsync` through it; both wait for the disk. `none` does not: a
    power cut may lose checkpoints that seemed whole; checksums tell."""
    writers: int = 2
    """Shards that are written side by side. Two reach an NVMe's bandwidth; file systems over a network
    want more."""

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}, expected at least 1, or None for all")
        if self.durability not in ("none", "fsync", "direct"):
            raise ValueError(f"durability is {self.durability!r}, expected none, fsync or direct")
        if not 1 <= self.writers <= 256:
            raise ValueError(f"writers is {self.writers}, expected 1 to 256")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save took. Figures of a save that is still running are not final."""

    step: int
    nbytes: int
    waited_s: float
    """For the save before."""
    blocking_s: float
    """That training stood still, the wait included."""
    local_s: float | None
    """Until it was whole in the local folder, since `save` was called."""
    total_s: float | None
    """Until this rank's share was in the target."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was loaded."""

    tree: Any
    step: int
    folder: str
    """Where it was loaded from: the local folder, or the target."""
    nbytes: int
    seconds: float


class _Place(NamedTuple):
    """A folder of checkpoints, and which rank of how many we are there."""

    folder: str
    rank: int
    world_size: int


class Checkpointer(Closing):
    """The checkpoints of one rank of a training job.

    Args:
        folder: the target, of all ranks.
        rank: of this process.
        world_size: processes that save together.
        local: a folder on this node's disk that is written first; each node has its own.
        run: what tells this start of the job from an earlier one, the same on all ranks. Not given, it is
            taken from torchrun or Slurm.
        options: how to write.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        local: str | os.PathLike[str] | None = None,
        run: str | None = None,
        options: CheckpointOptions | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1}")
        self.folder = os.path.abspath(folder)
        self.local = None if local is None else os.path.abspath(local)
        if self.local == self.folder:
            raise ValueError(f"local is {self.local}, expected another folder than the target")
        self.rank, self.world_size = rank, world_size
        self.options = options or CheckpointOptions()
        self._given = run
        # What is the same on all ranks of a start of the job, and on no other.
        if run is None:
            run = start_of_job() if world_size > 1 else secrets.token_hex(8)
        self._run = run
        self.pid = os.getpid()
        self._target = _Place(self.folder, rank, world_size)
        self._near: _Place | None = None
        if self.local is not None:
            # A node's own, so each rank's share is whole there by itself.
            mine = f"/rank-{rank:05}-of-{world_size:05}" if world_size > 1 else ""
            self._near = _Place(self.local + mine, 0, 1)
        self._snapshot = TreeSnapshot()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._report: SaveReport | None = None
        self._buffers: list[WriteBuffer] = []

    @property
    def report(self) -> SaveReport | None:
        """Of the last save."""
        return self._report

    def same_as(self, other: Checkpointer) -> bool:
        """Whether it was made with the same arguments."""
        names = ("_target", "_near", "options", "_given")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def save(self, tree: Any, step: int) -> None:
        """Saves a tree, and raises what the save before failed of; see `headrace.checkpoint.save`."""
        started = time.monotonic()
        self.wait()
        waited = time.monotonic() - started
        leaves, outline = take_apart(tree)
        check_new(self.folder, step)
        nbytes = sum(leaf.nbytes for leaf in leaves)
        if self.options.asynchronous:
            leaves = self._snapshot.take(leaves)
            blocking = time.monotonic() - started
            self._report = SaveReport(step, nbytes, waited, blocking, None, None)
            self._thread = threading.Thread(
                target=self._write, args=(leaves, outline, step, started), name="checkpoint"
            )
            self._thread.start()
            return
        self._report = SaveReport(step, nbytes, waited, 0.0, None, None)
        self._write(leaves, outline, step, started)
        self._report = replace(self._report, blocking_s=time.monotonic() - started)
        self.wait()

    def wait(self) -> SaveReport | None:
        """Waits until the last save is in the target, and raises its error if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._report

    def close(self) -> None:
        """`wait`."""
        self.wait()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except HeadraceError as e:
            if error is None:
                raise
            error.add_note(f"and the last checkpoint failed: {e}")

    def _write(self, leaves: Sequence[Leaf], outline: Any, step: int, started: float) -> None:
        try:
            for place in (self._near, self._target):
                if place is None:
                    continue
                self._write_to(place, leaves, outline, step)
                assert self._report is not None
                name = "local_s" if place is self._near else "total_s"
                self._report = replace(self._report, **{name: time.monotonic() - started})  # type: ignore[arg-type]
        except OSError as e:
            ours = isinstance(e, HeadraceError)
            self._error = e if ours else write_error(e, e.filename or self.folder)
        except BaseException as e:  # noqa: BLE001 - raised by the next call
            self._error = e

    def _write_to(self, at: _Place, leaves: Sequence[Leaf], outline: Any, step: int) -> None:
        place = step_folder(at.folder, step)
        os.makedirs(at.folder, exist_ok=True)
        make_folder(place, exist_ok=True)
        withdraw(place)
        remove_leftovers(place)
        sync_folder(at.folder)
        groups = _share_out(leaves, self.options.writers)
        while len(self._buffers) < len(groups):
            self._buffers.append(WriteBuffer())

        def write(number: int) -> ShardRecord:
            path = str(place / shard_name(at.rank, at.world_size, number))
            return write_shard(path, groups[number], self.options.durability, self._buffers[number])

        if len(groups) == 1:
            shards = [write(0)]
        else:
            with ThreadPoolExecutor(len(groups), "shard") as pool:
                shards = list(pool.map(write, range(len(groups))))
        sync_folder(place)
        record = RankRecord(at.rank, at.world_size, self._run, outline, tuple(shards))
        if commit(at.folder, step, record) is not None:
            remove_old(at.folder, step, self.options.keep)

    def load(self, step: int | None = None, *, like: Any = None) -> Checkpoint:
        """Loads this rank's tree, as `headrace.checkpoint.load` says."""
        self.wait()
        try:
            return _load(self._target, self._near, step, like)
        except OSError as e:
            if isinstance(e, HeadraceError):
                raise
            path = str(e.filename or self.folder)
            raise VolumeError(
                f"{path}: cannot be read: {e.strerror}.",
                path=path,
                errno=e.errno,
                next_step="Check the folder and its permissions.",
            ) from e


def _share_out(leaves: Sequence[Leaf], writers: int) -> list[list[Leaf]]:
    """Arrays to shards of about one size: the largest first, each to the smallest shard."""
    total = sum(leaf.nbytes for leaf in leaves)
    count = max(1, min(writers, total // _SHARD_BYTES_MIN, len(leaves)))
    groups: list[list[Leaf]] = [[] for _ in range(count)]
    sizes = [0] * count
    for leaf in sorted(leaves, key=lambda leaf: -leaf.nbytes):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(leaf)
        sizes[smallest] += leaf.nbytes
    return groups


def _load(target: _Place, near: _Place | None, step: int | None, like: Any) -> Checkpoint:
    """Loads the newest, or the wanted, step.

    Ranks must agree on the step without asking each other, and the target is what they all see: what is
    newer in a local folder counts only where there is one rank.
    """
    started = time.monotonic()
    wanted = step
    if wanted is None:
        known = steps(target.folder)
        if near is not None and target.world_size == 1:
            known += steps(near.folder)
        wanted = max(known, default=None)
    manifest = None if wanted is None else read_manifest(target.folder, wanted)
    source = None
    if wanted is not None and (manifest is None or manifest.world_size == target.world_size):
        source = _find(target, near, wanted, manifest)
    if wanted is None or (source is None and manifest is None):
        what = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
        raise CheckpointNotFound(
            f"{target.folder}: there is {what}.",
            path=target.folder,
            next_step="Check the folder; what was interrupted while it was saved does not count.",
        )
    own = target.rank if source is not None else None
    like = like if own is None or _has_parts(like) else None
    place = step_folder(source[0].folder if source else target.folder, wanted)

    def read(records: dict[int, RankRecord]) -> Checkpoint:
        parts = Resharding(str(place), records, target.rank, target.world_size, own=own)
        tree, nbytes = parts.tree(like)
        if len(records) == 1 and own is not None and like is None:
            nbytes = records[own].nbytes
        seconds = time.monotonic() - started
        return Checkpoint(tree, wanted, str(place.parent), nbytes, seconds)

    try:
        if source is not None:
            with contextlib.suppress(PartsElsewhereError):
                return read({target.rank: source[1]})
        assert manifest is not None
        place = step_folder(target.folder, wanted)
        saved = manifest.world_size
        return read({r: read_record(target.folder, wanted, r, saved) for r in range(saved)})
    except (ValueError, TypeError, LookupError, AttributeError, StopIteration) as e:
        raise damaged(str(place), "the tree", repr(e), "one that was saved") from e


def _has_parts(like: Any) -> bool:
    if isinstance(like, dict):
        return any(map(_has_parts, like.values()))
    if isinstance(like, (list, tuple)):
        return any(map(_has_parts, like))
    return part_of(like) is not None


def _find(
    target: _Place, near: _Place | None, step: int, manifest: CheckpointManifest | None
) -> tuple[_Place, RankRecord] | None:
    """Where to read a step: near, unless the target's is of another start of the job."""
    far = None
    if manifest is not None:
        far = read_record(target.folder, step, target.rank, target.world_size)
    if near is not None and read_manifest(near.folder, step) is not None:
        record = read_record(near.folder, step, near.rank, near.world_size)
        if far is None or far.run == record.run:
            return near, record
    return None if far is None else (target, far)


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
