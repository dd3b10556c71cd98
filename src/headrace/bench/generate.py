"""Generates a data set: parallel over ranks and threads, at the disk's speed, resumable.

Rank r of w writes the files r, r + w, ... Rank 0 prepares the folder, the others wait for its manifest;
nobody waits at the end: the rank that finishes last marks the data set as complete. A file is there
whole or not at all, so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import _native
from headrace.base.files import remove_leftovers
from headrace.bench.content import Content
from headrace.bench.dataset import DatasetSpec
from headrace.bench.dataset_files import (
    DatasetManifest,
    differences,
    foreign_files,
    read_manifest,
    wait_for,
)
from headrace.bench.formats import FileJob, format_of, layout_of
from headrace.errors import SourceError, VolumeError
from headrace.store.output_file import OutputFile, WriteBuffer, write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.bench.dataset import Split

    Progress = Callable[[int, int | None, int, int | None], None]

_THREADS_MAX = 16
_AT_ONCE_BYTES, _AT_ONCE_FILES = 8 << 20, 64
"""Small files go to native code so many at a time."""
_LAYOUTS_KEPT = 256
"""Of files of different shapes."""
_RANK_0_DEADLINE_S = 120.0
_SPLITS: tuple[Split, ...] = ("train", "valid")


@dataclass(slots=True)
class GenerateReport:
    """What a rank did."""

    path: str
    files: int = 0
    """Files of the data set that are this rank's."""
    resumed_files: int = 0
    """How many of them were there already."""
    bytes: int = 0
    """That were written."""
    seconds: float = 0.0
    complete: bool = False
    """Whether the data set is: the last of several ranks says so."""


def generate(
    spec: DatasetSpec,
    *,
    rank: int = 0,
    world_size: int = 1,
    threads: int | None = None,
    direct: bool = True,
    sync: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> GenerateReport:
    """Writes a data set, or this rank's share of it, by more threads than there are processors.

    Each thread waits for the disk half of its time. With `direct` large files are written past the page cache;
    with `sync` all is on the disk when this returns, and before the data set counts as complete. `overwrite`
    removes another data set of ours first. `progress` is called with (samples done, samples, bytes done, bytes)
    from any thread.

    Raises:
        SourceError: the folder holds something else, or rank 0 does not begin.
        VolumeError: the disk is full, or the operating system refuses. What is whole stays.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1}")
    started = time.monotonic()
    expected = DatasetManifest.of(spec, complete=False)
    try:
        if rank == 0:
            _prepare(spec, expected, overwrite=overwrite)
        else:
            wait_for(spec.data_folder, expected, _RANK_0_DEADLINE_S)
        run = _Run(spec, range(rank, spec.total_files, world_size), progress, direct=direct)
        if threads is None:
            threads = min(2 * len(os.sched_getaffinity(0)) + 2, _THREADS_MAX)
        run.write_all(threads)
        if sync:
            _sync(spec.data_folder)
        run.report.complete = _finish(spec, expected, rank, world_size)
    except OSError as e:
        if isinstance(e, VolumeError):
            raise
        raise write_error(e, e.filename or spec.data_folder) from e
    run.report.seconds = time.monotonic() - started
    return run.report


class _Run:
    """One rank's files, on their way to the disk."""

    def __init__(
        self, spec: DatasetSpec, numbers: range, progress: Progress | None, *, direct: bool
    ) -> None:
        self._spec, self._numbers, self._progress, self._direct = spec, numbers, progress, direct
        self._format = format_of(spec)
        self._layout = lru_cache(_LAYOUTS_KEPT)(lambda shape: layout_of(spec, shape))
        self._file_bytes = lru_cache(_LAYOUTS_KEPT)(lambda s: self._format.file_bytes(spec, s))
        self._shapes = spec.sample_shapes()
        self._content = Content(spec.seed)
        self._estimate = int(spec.sample_bytes()[numbers.start :: numbers.step].sum())
        self._estimate *= spec.num_samples_per_file
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._todo, self._at_once, self._sample_bytes = iter(numbers), 1, 0
        self.report = GenerateReport(spec.data_folder)

    def write_all(self, threads: int) -> None:
        """Writes what is not there yet; the first error stops all."""
        begun = any(self._is_there(self._job(number)) for number in self._numbers[:1])
        if self._numbers.start == 0 and not begun and self._spec.format != "synthetic":
            check_free_space(Path(self._spec.data_folder), self._estimate * self._numbers.step)
        threads, files = max(1, threads), max(1, len(self._numbers))
        fitting = _AT_ONCE_BYTES * files // max(1, self._estimate)
        self._at_once = max(1, min(_AT_ONCE_FILES, fitting, files // (4 * threads)))
        with ThreadPoolExecutor(threads, "generate") as pool:
            futures = [pool.submit(self._write_some) for _ in range(threads)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stop.set()
                raise

    def _write_some(self) -> None:
        buffer: WriteBuffer | None = None
        native = _native.FileWriter(self._content.native, self._direct)
        try:
            while not self._stop.is_set():
                with self._lock:
                    numbers = list(islice(self._todo, self._at_once))
                if not numbers:
                    break
                jobs = [self._job(number) for number in numbers]
                missing = [job for job in jobs if not self._is_there(job)]
                layouts = [self._layout(job.shape) for job in missing]
                if None not in layouts:
                    written = self._write_native(missing, layouts, native)
                else:
                    buffer, written = buffer or WriteBuffer(), 0
                    for job in missing:
                        with OutputFile(job.path, buffer, direct=self._direct) as out:
                            self._format.write(out, job)
                        written += out.written
                self._count(jobs, len(jobs) - len(missing), written)
        except BaseException:
            self._stop.set()
            raise

    def _job(self, number: int) -> FileJob:
        spec, train = self._spec, number < self._spec.num_files_train
        return FileJob(
            spec,
            "train" if train else "valid",
            number if train else number - spec.num_files_train,
            tuple(self._shapes[number].tolist()),
            self._content,
        )

    def _is_there(self, job: FileJob) -> bool:
        """Whether a file is, whole: a power cut may leave a name with nothing behind it."""
        if not os.access(job.path, os.F_OK):  # most are not: an exception costs more than the look
            return False
        size = os.stat(job.path).st_size
        expected = self._file_bytes(job.shape)
        return size > 0 if expected is None else size == expected

    def _write_native(
        self, jobs: list[FileJob], layouts: list[Any], writer: _native.FileWriter
    ) -> int:
        for job in jobs:
            self._format.write_indices(job)
        paths = [os.fsencode(job.path) for job in jobs]
        keys = [self._content.key(job.number) for job in jobs]
        count, code = writer.write(layouts, keys, paths)
        if code:
            raise write_error(OSError(code, os.strerror(code)), jobs[count].path)
        return sum(layout.nbytes for layout in layouts)

    def _count(self, jobs: list[FileJob], there: int, written: int) -> None:
        report, samples = self.report, self._spec.num_samples_per_file
        with self._lock:
            report.files += len(jobs)
            report.resumed_files += there
            report.bytes += written
            self._sample_bytes += sum(job.sample_bytes * job.samples for job in jobs)
            done, nbytes = report.files, self._sample_bytes
        if self._progress is not None:
            total = len(self._numbers) * samples
            self._progress(done * samples, total, nbytes, max(self._estimate, nbytes))


def _prepare(spec: DatasetSpec, expected: DatasetManifest, *, overwrite: bool) -> None:
    """Makes the folders and the manifest, unless something else is there."""
    folder = spec.data_folder
    manifest = read_manifest(folder)
    if manifest is None:
        if strange := foreign_files(spec):
            raise SourceError(
                f"{folder}: holds files that headrace has not generated, as {strange}.",
                path=folder,
                next_step="Choose another data_folder, or remove them.",
            )
    elif manifest.spec != expected.spec:
        if not overwrite:
            raise SourceError(
                f"{folder}: holds another data set: {'; '.join(differences(manifest.spec, expected.spec))}.",
                path=folder,
                next_step="Choose another data_folder, or pass --overwrite to replace it.",
            )
        _remove(folder, manifest)
        manifest = None
    for split in _SPLITS:
        for name in spec.subfolders(split):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
            remove_leftovers(os.path.join(folder, name))
    remove_leftovers(folder)
    if manifest is None:
        expected.write(folder)


def _remove(folder: str, old: DatasetManifest) -> None:
    """Removes the files that an older manifest names, and no others. Its own goes last."""
    if "requests" in old.spec:
        raise SourceError(
            f"{folder}: holds the files of another recorded job.",
            path=folder,
            next_step="Choose another data_folder, or remove that one.",
        )
    spec = DatasetSpec.from_mapping({**old.spec, "data_folder": folder})
    for split, index in spec.files():
        path = Path(spec.path(split, index))
        for name in (path, Path(f"{path}.off.idx"), Path(f"{path}.sz.idx")):
            name.unlink(missing_ok=True)
        Path(folder, "index", split, path.name + ".idx").unlink(missing_ok=True)
    for marker in Path(folder).glob(".generated-*"):
        marker.unlink(missing_ok=True)


def _finish(spec: DatasetSpec, expected: DatasetManifest, rank: int, world_size: int) -> bool:
    """Says that this rank has finished; the one that sees all others marks the data set complete."""
    folder = Path(spec.data_folder)
    markers = [folder / f".generated-{r}-of-{world_size}" for r in range(world_size)]
    if world_size > 1:
        markers[rank].touch()
        if not all(m.exists() for m in markers):
            # The last one may have seen all and removed them already.
            now = read_manifest(spec.data_folder)
            return now is not None and now.complete
    DatasetManifest(expected.spec, complete=True, files=expected.files).write(spec.data_folder)
    for marker in folder.glob(".generated-*"):
        marker.unlink(missing_ok=True)
    return True


def _sync(folder: str) -> None:
    """Waits until the folder's file system has all on the disk: once, not for each small file."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), folder)
    finally:
        os.close(fd)
