"""Checkpoints on disk: shards of arrays, one folder for each step, and when that counts.

    folder/step-000000000042/rank-00000-of-00002-000.safetensors   a rank's arrays, in a few shards
    folder/step-000000000042/rank-00000-of-00002.json              the rank has written all of its shards
    folder/step-000000000042/manifest.json                         all ranks have: the checkpoint is whole

Each is written, synced and renamed to its name before the next. So a step without a manifest is what a
kill or a power cut left; it is never loaded, and removed once a later step is whole.

Shards are in safetensors' layout, which others read, too: a length, a JSON header (names, types, shapes,
places), then the arrays end to end. The header is padded so that the arrays begin at a whole disk block. Each
array has its crc32c in the rank's record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from headrace import _native
from headrace.base.documents import DocumentKind, Fields
from headrace.base.files import open_stream, read_file, read_fully, replace_file, sync_folder
from headrace.checkpoint.tree import DTYPES, leaf_bytes
from headrace.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint
from headrace.store.output_file import OutputFile, WriteBuffer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.checkpoint.tree import Leaf

    ShardArray = tuple[NDArray[np.uint8], str, tuple[int, ...]]
    """Bytes, element type and shape."""

Durability = Literal["none", "fsync", "direct"]
"""How bytes reach the disk: `none` leaves them to the page cache, `fsync` waits until the disk has them,
`direct` writes past the page cache and then waits for what the file system has to say about them."""

OLDER = "Load an older checkpoint: headrace.checkpoint.steps(folder) lists them."

_HEADER_BYTES_MAX = 100 << 20
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard, as the manifest has it."""

    file: str
    nbytes: int
    header_crc32c: int
    crc32c: dict[str, int]  # of each array


def write_shard(
    path: str, leaves: Sequence[Leaf], durability: Durability, buffer: WriteBuffer
) -> ShardRecord:
    """Writes arrays into a file that appears when it is whole.

    Raises VolumeError if the disk is full, or the operating system refuses.
    """
    header = _header(leaves)
    crcs = {}
    with OutputFile(path, buffer, direct=durability == "direct", sync=durability != "none") as out:
        out.write(header)
        for leaf in leaves:
            data = leaf_bytes(leaf)
            crcs[leaf.name] = _native.crc32c(data)
            out.write(data)
    crc = _native.crc32c(np.frombuffer(header, np.uint8))
    return ShardRecord(os.path.basename(path), out.written, crc, crcs)


def _header(leaves: Sequence[Leaf]) -> bytes:
    described: dict[str, Any] = {}
    at = 0
    for leaf in leaves:
        end = at + leaf.nbytes
        place = {"dtype": leaf.dtype, "shape": list(leaf.shape), "data_offsets": [at, end]}
        described[leaf.name] = place
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // _BLOCK) * _BLOCK - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def read_headers(folder: str, record: ShardRecord) -> list[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Name, element type and shape of the arrays of a shard, without their bytes.

    Raises CorruptCheckpoint if the header is not what was saved.
    """
    path = os.path.join(folder, record.file)
    with _open(path) as f:
        return [(name, (dtype, shape)) for name, dtype, shape, _ in _arrays(f, path, record)]


def read_shard(
    folder: str, record: ShardRecord, names: Collection[str] | None = None
) -> dict[str, ShardArray]:
    """The arrays of a shard, all or those of some names, each checked.

    Raises CorruptCheckpoint if they are not what was saved.
    """
    path = os.path.join(folder, record.file)
    arrays = {}
    with _open(path) as f:
        for name, dtype, shape, (at, nbytes) in _arrays(f, path, record):
            if names is not None and name not in names:
                continue
            data = _read_fully(f.fileno(), np.empty(nbytes, np.uint8), at, path)
            crc = _native.crc32c(data)
            if crc != record.crc32c.get(name):
                expected = f"{record.crc32c.get(name, 0):08x}"
                raise damaged(path, f"the checksum of {name}", f"{crc:08x}", expected, at)
            arrays[name] = (data, dtype, shape)
    return arrays


def _arrays(
    f: BinaryIO, path: str, record: ShardRecord
) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, int]]]:
    """The arrays of an open shard: name, element type, shape, and where its bytes are and how many."""
    size = os.fstat(f.fileno()).st_size
    if size != record.nbytes:
        raise damaged(path, "the size", size, record.nbytes)
    length = _read_fully(f.fileno(), np.empty(8, np.uint8), 0, path)
    start = int.from_bytes(length.tobytes(), "little")
    if start > min(_HEADER_BYTES_MAX, size - 8):
        raise damaged(path, "the header's length", start, f"at most {size - 8:,}")
    head = _read_fully(f.fileno(), np.empty(8 + start, np.uint8), 0, path)
    crc = _native.crc32c(head)
    if crc != record.header_crc32c:
        raise damaged(path, "the header's checksum", f"{crc:08x}", f"{record.header_crc32c:08x}")
    for name, dtype, shape, first, last in _described(head[8:].tobytes(), path):
        at = 8 + start + first
        itemsize = (
            2 if dtype == "BF16" else 1 if dtype[:2] == "F8" else np.dtype(DTYPES[dtype]).itemsize
        )
        if math.prod(shape) * itemsize != last - first or at + last - first > size:
            raise damaged(path, f"the place of {name}", [first, last], "its size", at)
        yield name, dtype, shape, (at, last - first)


def _open(path: str) -> BinaryIO:
    folder, name = os.path.split(path)
    try:
        return open_stream(name, within=folder, buffering=0)
    except FileNotFoundError:
        raise damaged(path, "the shard", "missing", "a file") from None


def _described(text: bytes, path: str) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """The arrays of a shard's header: name, element type, shape, first byte and the one behind the last."""
    try:
        for name, leaf in json.loads(text).items():
            dtype, shape, (first, last) = leaf["dtype"], leaf["shape"], leaf["data_offsets"]
            numbers = (*shape, first, last)
            if dtype not in DTYPES or not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers):
                raise damaged(path, f"the header of {name}", leaf, "an array's place")
            yield name, dtype, tuple(shape), first, last
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise damaged(path, "the header", f"none ({e!r:.200})", "the arrays' places") from None


def _read_fully(fd: int, into: NDArray[np.uint8], at: int, path: str) -> NDArray[np.uint8]:
    if (done := read_fully(fd, memoryview(into.data), at)) < into.size:
        raise damaged(path, "the end of the file", at + done, at + into.size, at)
    return into


def damaged(
    path: str, what: str, actual: object, expected: object, offset: int = 0
) -> CorruptCheckpoint:
    """The error for a file of a checkpoint that is not as it was written."""
    text = f"{path}: {what} is {actual}, expected {expected} (offset {offset:,})."
    return CorruptCheckpoint(text, path=path, offset_bytes=offset, next_step=OLDER)


_STEP = re.compile(r"step-(\d{12,})")
_RANKS_MAX = 1 << 24
_BYTES_MAX = 1 << 60
STEP_MAX = 10**18

_MANIFEST = DocumentKind(
    name="the manifest of a checkpoint",
    version=2,
    unchecked=1,
    error=CorruptCheckpoint,
    next_step=OLDER,
    marks={"kind": "headrace checkpoint"},
    bytes_max=1 << 30,
)
_RECORD = DocumentKind(
    name="a rank's record",
    version=2,
    unchecked=0,
    error=CorruptCheckpoint,
    next_step=OLDER,
    bytes_max=1 << 30,
    containers_max=100_000_000,  # of a tree: three for each dict, list and leaf
    depth_max=512,
)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What a rank has written."""

    rank: int
    world_size: int
    run: str  # which start of the job wrote it: the records of one checkpoint are all of one
    outline: Any  # of the rank's tree
    shards: tuple[ShardRecord, ...]

    @property
    def nbytes(self) -> int:
        """Of its shards."""
        return sum(s.nbytes for s in self.shards)

    @property
    def file(self) -> str:
        """The record's name."""
        return _record_name(self.rank, self.world_size)


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """A whole checkpoint."""

    step: int
    world_size: int
    files: dict[str, int]  # name and size of all that belongs to it


def step_folder(folder: str, step: int) -> Path:
    """Where a step's files are."""
    return Path(folder, f"step-{step:012}")


def shard_name(rank: int, world_size: int, number: int) -> str:
    """Of a rank's shard."""
    return f"rank-{rank:05}-of-{world_size:05}-{number:03}.safetensors"


def _record_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05}-of-{world_size:05}.json"


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of which a whole checkpoint is in the folder, oldest first."""
    text = os.fspath(folder)
    return sorted(step for step in _all_steps(text) if read_manifest(text, step))


def _all_steps(folder: str) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except NotADirectoryError as e:
        raise CheckpointError(
            f"{folder} is no folder, expected one of checkpoints.",
            path=folder,
            next_step="Name another folder, or move away what stands there.",
        ) from e
    return [int(m[1]) for name in names if (m := _STEP.fullmatch(name))]


def read_manifest(folder: str, step: int) -> CheckpointManifest | None:
    """The manifest of a step; None if the checkpoint is not whole."""
    path = step_folder(folder, step) / "manifest.json"
    fields = _read(path, _MANIFEST)
    if fields is None:
        return None
    manifest = CheckpointManifest(
        fields.integer("step", step, step),
        fields.integer("world_size", 1, _RANKS_MAX),
        fields.integers("files", 0, _BYTES_MAX),
    )
    if any(os.path.basename(name) != name for name in manifest.files):
        fields.refuse("files", "names without a folder")
    for name, size in manifest.files.items():
        try:
            size_now = os.stat(path.with_name(name)).st_size
        except FileNotFoundError:
            return None  # being removed
        if size_now != size:
            raise damaged(str(path.with_name(name)), "the size", size_now, size)
    return manifest


def read_record(folder: str, step: int, rank: int, world_size: int) -> RankRecord:
    """A rank's record of a whole checkpoint.

    Raises CheckpointNotFound if the checkpoint is of another number of ranks, and CorruptCheckpoint if the
    record is damaged.
    """
    path = step_folder(folder, step) / _record_name(rank, world_size)
    fields = _read(path, _RECORD)
    if fields is None:
        raise CheckpointNotFound(
            f"{path.parent}: has nothing of rank {rank} of {world_size}.",
            path=str(path.parent),
            next_step="Load it with the rank and world size that saved it.",
        )
    return _record(fields, rank, world_size)


def _record(fields: Fields, rank: int, world_size: int) -> RankRecord:
    shards = []
    for shard in fields.each("shards"):
        name = shard.text("file", characters_max=255)
        if os.path.basename(name) != name:
            shard.refuse("file", "a name without a folder")
        nbytes = shard.integer("nbytes", 0, _BYTES_MAX)
        crc = shard.integer("header_crc32c", 0, 0xFFFFFFFF)
        shards.append(ShardRecord(name, nbytes, crc, shard.integers("crc32c", 0, 0xFFFFFFFF)))
    return RankRecord(
        fields.integer("rank", rank, rank),
        fields.integer("world_size", world_size, world_size),
        fields.text("run"),
        fields.value("outline"),
        tuple(shards),
    )


def _read(path: Path, kind: DocumentKind) -> Fields | None:
    try:
        name = os.path.join(path.parent.name, path.name)
        data = read_file(name, kind.bytes_max + 1, within=path.parent.parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return kind.decode(data, str(path))


def commit(folder: str, step: int, record: RankRecord) -> CheckpointManifest | None:
    """Says that a rank has finished; the last one makes the checkpoint whole.

    The shards must be durable. Returns the manifest once the checkpoint is whole, else None.
    """
    place = step_folder(folder, step)
    replace_file(place / record.file, _RECORD.encode(dataclasses.asdict(record)))
    files: dict[str, int] = {}
    for rank in range(record.world_size):
        name = _record_name(rank, record.world_size)
        fields = _read(place / name, _RECORD)
        if fields is None:
            return None
        other = _record(fields, rank, record.world_size)
        if other.run != record.run:
            return None  # left by an earlier start of the job; the rank has not written yet
        files |= {s.file: s.nbytes for s in other.shards}
        files[name] = (place / name).stat().st_size
    manifest = CheckpointManifest(step, record.world_size, files)
    text = _MANIFEST.encode(dataclasses.asdict(manifest))
    # Ranks that finish at the same time write the same.
    replace_file(place / "manifest.json", text)
    return manifest


def check_new(folder: str, step: int) -> None:
    """Refuses a step of which there is a whole checkpoint."""
    if not 0 <= step < STEP_MAX:
        raise ValueError(f"step is {step}, expected 0 to 10^18")
    if step in _all_steps(folder) and read_manifest(folder, step) is not None:
        raise CheckpointError(
            f"{step_folder(folder, step)}: there is a checkpoint of step {step} already.",
            path=str(step_folder(folder, step)),
            next_step="Go on from it: headrace.checkpoint.load(folder) loads the newest.",
        )


def withdraw(place: Path) -> None:
    """Takes back that the step was whole, before its files are written again."""
    try:
        (place / "manifest.json").unlink()
    except FileNotFoundError:
        return
    sync_folder(place)


def remove_old(folder: str, step: int, keep: int | None) -> None:
    """Removes what is older than the `keep` newest whole checkpoints, and what was never finished.

    `step` is whole. Its manifest goes first, so that a checkpoint that is half removed does not count.
    """
    whole = 1
    for each in sorted((s for s in _all_steps(folder) if s < step), reverse=True):
        place = step_folder(folder, each)
        is_whole = (place / "manifest.json").exists()
        if is_whole and (keep is None or whole < keep):
            whole += 1
            continue
        with contextlib.suppress(FileNotFoundError):
            (place / "manifest.json").unlink()
        shutil.rmtree(place, ignore_errors=True)
