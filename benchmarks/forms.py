"""Writes a data set in the form an engine reads: files, packed, LMDB, LitData, HF, headrace.

    python -m benchmarks.forms --dir build/bench --dataset A --form lmdb [--scale 0.02]

A form is written once. `NAME.done` beside it says so; without it the form is begun anew. Free
space and inodes are checked before the first byte. Each peer's own writer is used, with the
settings its documentation recommends; they are imported by their form only.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import datasets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.datasets import DataSet

PAGE_BYTES = 4096
PACKED = "samples.bin"
MANIFEST = "manifest.bin"
LMDB_KEY_BYTES = 4

_RESERVE_BYTES = 2 << 30  # left free for the system, and for ext4's own metadata
_WORKERS = max(2, min(8, os.cpu_count() or 2))


class NoSpaceError(Exception):
    """The disk cannot hold the form that is asked for."""


def form_path(root: Path, data: DataSet, form: str) -> Path:
    """Where `form` of `data` lies below the work folder."""
    return root / data.folder / form


def _stamp_path(root: Path, data: DataSet, form: str) -> Path:
    return root / data.folder / f"{form}.done"


def is_complete(root: Path, data: DataSet, form: str) -> bool:
    """Whether `form` was written to its end."""
    return _stamp_path(root, data, form).exists()


def ensure(root: Path, data: DataSet, form: str) -> Path:
    """Writes `form` of `data` unless it is there; returns its path."""
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, one of {', '.join(FORMS)} is known")
    path = form_path(root, data, form)
    if is_complete(root, data, form):
        return path
    if form == "headrace":
        ensure(root, data, "files")
    check_space(root, data, form)
    _remove(path)
    path.mkdir(parents=True)
    started = time.monotonic()
    say(f"{data.name}/{form}: writing {data.samples:,} samples, {data.total_bytes / 1e9:.2f} GB")
    FORMS[form](data, path)
    os.sync()
    seconds = time.monotonic() - started
    stamp = {"samples": data.samples, "bytes": data.total_bytes, "seconds": round(seconds, 1)}
    _stamp_path(root, data, form).write_text(json.dumps(stamp))
    say(f"{data.name}/{form}: done in {seconds:.1f} s")
    return path


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def bytes_needed(data: DataSet, form: str) -> int:
    """An upper bound of what `form` takes on disk."""
    if form == "files":
        pages = (datasets.sizes(data) + PAGE_BYTES - 1) // PAGE_BYTES
        return int(pages.sum()) * PAGE_BYTES + 512 * data.samples
    if form == "lmdb":  # a value over half a page takes whole pages of its own
        return data.total_bytes + PAGE_BYTES * data.samples
    return data.total_bytes + 256 * data.samples


def check_space(root: Path, data: DataSet, form: str) -> None:
    """Raises `NoSpaceError` when the disk below `root` cannot hold `form`."""
    root.mkdir(parents=True, exist_ok=True)
    disk = os.statvfs(root)
    free, needed = disk.f_bavail * disk.f_frsize, bytes_needed(data, form) + _RESERVE_BYTES
    if free < needed:
        raise NoSpaceError(
            f"{root}: {data.name}/{form} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free."
            " Give another --dir, or a smaller --scale."
        )
    if form == "files" and disk.f_files and disk.f_favail < data.samples:
        raise NoSpaceError(
            f"{root}: {data.name}/files needs {data.samples:,} inodes, {disk.f_favail:,} are free. "
            "Give another --dir, or a smaller --scale."
        )


def say(text: str) -> None:
    """Progress goes to stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


class _Progress:
    """At most one line in five seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._next = time.monotonic() + 5

    def add(self, samples: int) -> None:
        self._done += samples
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 5
            say(f"  {self._what}: {self._done:,} of {self._total:,}")


def _in_processes(data: DataSet, what: str, task: Callable[[range], None], parts: int) -> None:
    """Runs `task` over consecutive ranges of sample indices in a few processes."""
    edges = np.linspace(0, data.samples, min(parts, data.samples) + 1).astype(int).tolist()
    ranges = [range(a, b) for a, b in itertools.pairwise(edges)]
    progress = _Progress(f"{data.name}/{what}", data.samples)
    with ProcessPoolExecutor(_WORKERS) as pool:
        running = {pool.submit(task, part): len(part) for part in ranges}
        for future in as_completed(running):
            future.result()
            progress.add(running[future])


# ---- files: one file a sample, in class folders ----


def _write_class_folders(data: DataSet, path: Path, classes: range) -> None:
    for number in classes:
        members = range(number, data.samples, datasets.CLASSES)
        if members:
            (path / datasets.file_name(number)).parent.mkdir(exist_ok=True)
        for index in members:
            (path / datasets.file_name(index)).write_bytes(datasets.payload(data, index))


def _write_files(data: DataSet, path: Path) -> None:
    classes = min(datasets.CLASSES, data.samples)
    progress = _Progress(f"{data.name}/files", data.samples)
    step = max(1, classes // 100)
    with ProcessPoolExecutor(_WORKERS) as pool:
        parts = [range(at, min(at + step, classes)) for at in range(0, classes, step)]
        running = [pool.submit(_write_class_folders, data, path, part) for part in parts]
        for future in as_completed(running):
            future.result()
            progress.add(data.samples * step // classes)


# ---- packed: one file and a manifest, for the C limits ----


def packed_offsets(data: DataSet) -> np.ndarray:
    """Where each sample begins in the packed file."""
    ends = np.cumsum(datasets.sizes(data))
    return ends - datasets.sizes(data)


def _write_packed_range(data: DataSet, file: Path, part: range) -> None:
    offset = int(packed_offsets(data)[part.start])
    with file.open("r+b", buffering=1 << 20) as out:
        out.seek(offset)
        for index in part:
            out.write(datasets.payload(data, index))


def _write_packed(data: DataSet, path: Path) -> None:
    # Whole pages, so that a direct read of the last sample meets no short tail.
    rounded = -(-data.total_bytes // PAGE_BYTES) * PAGE_BYTES
    with (path / PACKED).open("wb") as out:
        os.posix_fallocate(out.fileno(), 0, rounded)
    rows = np.stack([packed_offsets(data), datasets.sizes(data)], axis=1)
    rows.astype("<u8").tofile(path / MANIFEST)
    task = functools.partial(_write_packed_range, data, path / PACKED)
    _in_processes(data, "packed", task, parts=64)


# ---- LMDB ----


def lmdb_key(index: int) -> bytes:
    """Big-endian, so that LMDB's order of keys is the order of indices."""
    return index.to_bytes(LMDB_KEY_BYTES, "big")


def _write_lmdb(data: DataSet, path: Path) -> None:
    import lmdb

    progress = _Progress(f"{data.name}/lmdb", data.samples)
    map_bytes = 2 * bytes_needed(data, "lmdb") + (64 << 20)
    with lmdb.open(str(path), map_size=map_bytes, sync=False, meminit=False) as env:
        step = 2048
        for at in range(0, data.samples, step):
            part = range(at, min(at + step, data.samples))
            with env.begin(write=True) as txn:
                for index in part:
                    txn.put(lmdb_key(index), datasets.payload(data, index), append=True)
            progress.add(len(part))
        env.sync(force=True)


# ---- LitData ----


def _write_litdata(data: DataSet, path: Path) -> None:
    # Its writers fill a cache folder, by default below /tmp, before they move chunks to the output.
    scratch = path.parent / "litdata-scratch"
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(scratch / "chunks")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(scratch / "data")
    import litdata

    litdata.optimize(
        fn=functools.partial(datasets.payload, data),
        inputs=list(range(data.samples)),
        output_dir=str(path),
        chunk_bytes="64MB",
        num_workers=_WORKERS,
        reorder_files=False,
        verbose=False,
    )
    _remove(scratch)


# ---- HF datasets ----


def _tables(data: DataSet) -> Iterator[object]:
    import pyarrow as pa

    step = 1000  # rows a record batch: what `datasets` itself writes
    for at in range(0, data.samples, step):
        part = range(at, min(at + step, data.samples))
        payloads = [datasets.payload(data, index) for index in part]
        yield pa.table(
            {
                "data": pa.array(payloads, pa.binary()),
                "label": pa.array([datasets.label(index) for index in part], pa.int64()),
            }
        )


def _write_hf(data: DataSet, path: Path) -> None:
    from datasets.arrow_writer import ArrowWriter

    from datasets import Features, Value

    features = Features({"data": Value("binary"), "label": Value("int64")})
    progress = _Progress(f"{data.name}/hf", data.samples)
    with ArrowWriter(path=str(path / "data.arrow"), features=features) as writer:
        for table in _tables(data):
            writer.write_table(table)
            progress.add(table.num_rows)  # type: ignore[attr-defined]
        writer.finalize()


# ---- TFRecord and ArrayRecord, in the frameworks' environment ----

_RECORD_SHARDS = 16


def _shards(data: DataSet, path: Path, suffix: str) -> Iterator[tuple[str, range]]:
    edges = np.linspace(0, data.samples, min(_RECORD_SHARDS, data.samples) + 1).astype(int)
    for number, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        yield str(path / f"data-{number:03d}.{suffix}"), range(start, stop)


def _write_tfrecord(data: DataSet, path: Path) -> None:
    import tensorflow as tf

    for shard, part in _shards(data, path, "tfrecord"):
        with tf.io.TFRecordWriter(shard) as out:
            for index in part:
                out.write(datasets.payload(data, index))


def _write_arrayrecord(data: DataSet, path: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    for shard, part in _shards(data, path, "array_record"):
        # One record a group, as its documentation wants it for random access.
        out = ArrayRecordWriter(shard, "group_size:1,uncompressed")
        for index in part:
            out.write(datasets.payload(data, index))
        out.close()


# ---- headrace ----


def _write_headrace(_data: DataSet, path: Path) -> None:
    import headrace as hr

    path.rmdir()  # a store is published as a whole, never into a folder that exists
    hr.pack(path.parent / "files", path)


FORMS: dict[str, Callable[[DataSet, Path], None]] = {
    "files": _write_files,
    "packed": _write_packed,
    "lmdb": _write_lmdb,
    "litdata": _write_litdata,
    "hf": _write_hf,
    "tfrecord": _write_tfrecord,
    "arrayrecord": _write_arrayrecord,
    "headrace": _write_headrace,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forms", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--dataset", choices=datasets.NAMES, required=True)
    parser.add_argument("--form", choices=list(FORMS), required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    try:
        ensure(options.dir, datasets.data_set(options.dataset, options.scale), options.form)
    except (NoSpaceError, ImportError) as error:
        say(f"{options.dataset}/{options.form}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
