"""Data sets' files: generated, found, and checked before a run.

Files are written parallel over ranks and threads, at the disk's speed, resumable: rank r of w writes the
files r, r + w, ... Rank 0 prepares the folder, the others wait for its manifest; nobody waits at the end: the
rank that finishes last marks the data set as complete. A file is there whole or not at all, so a run that was
interrupted goes on where it stopped.

`headrace-dataset.json` in the data folder is written before the first file and again behind the last one. A
folder without it was made by someone else: it is read, and never written. As DLIO, a run goes by the folders
and by what names end with: the files in name order are the data set. Unlike DLIO it refuses a half-generated
one, and one that was generated for another workload; the headers of a few files and the sizes of many are
checked, since engines that hand on bytes would read anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace import _native
from headrace.base.documents import DocumentKind
from headrace.base.files import remove_leftovers, replace_file
from headrace.bench.content import Content
from headrace.bench.dataset import DatasetSpec, fingerprint
from headrace.bench.formats import FileJob, bad_file, format_of, layout_of
from headrace.errors import MissingPackage, SourceError, VolumeError
from headrace.store.output_file import OutputFile, WriteBuffer, write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.bench.dataset import Split
    from headrace.bench.objects import ObjectFolder

    Progress = Callable[[int, int | None, int, int | None], None]

FILE_NAME = "headrace-dataset.json"
_MANIFEST = DocumentKind(
    name="a data set's manifest",
    version=2,
    unchecked=1,
    error=SourceError,
    next_step="Generate the data set into another folder.",
    marks={"kind": "headrace data set"},
    bytes_max=1 << 20,
)
_POLL_S = 0.05

_NOT_DATA = ("data_folder", "keep_files", "generation_buffer_size", "record_length_bytes_resize")
"""Fields that the files do not depend on."""


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """A data folder's manifest."""

    spec: dict[str, Any]
    """The fields that the files depend on, as JSON has them."""
    complete: bool
    files: int

    @classmethod
    def of(cls, spec: DatasetSpec, *, complete: bool) -> DatasetManifest:
        """What `spec` asks for."""
        fields = {k: v for k, v in dataclasses.asdict(spec).items() if k not in _NOT_DATA}
        if spec.requests is None:
            del fields["requests"]
        else:
            fields = {"requests": fingerprint(spec.requests), "seed": spec.seed}
        return cls(json.loads(json.dumps(fields)), complete, spec.total_files)

    def write(self, folder: str, objects: ObjectFolder | None = None) -> None:
        """Puts it in its place, durably. Several ranks may write the same at the same time."""
        text = _MANIFEST.encode(dataclasses.asdict(self), indent=1)
        if objects is not None:
            objects.send(f"{folder}/{FILE_NAME}", [text], len(text))
        else:
            replace_file(Path(folder, FILE_NAME), text)


def read_manifest(folder: str, objects: ObjectFolder | None = None) -> DatasetManifest | None:
    """The manifest of a data folder; None where there is none. Raises SourceError if it is damaged."""
    path = os.path.join(folder, FILE_NAME)
    if objects is not None:
        if (text := objects.read(path, _MANIFEST.bytes_max + 1)) is None:
            return None
    else:
        try:
            with open(path, "rb") as f:
                text = f.read(_MANIFEST.bytes_max + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
    fields = _MANIFEST.decode(text, path)
    return DatasetManifest(
        fields.inner("spec").plain(), fields.flag("complete"), fields.integer("files", 0, 1 << 62)
    )


def differences(spec: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What two manifests' specs differ in: "num_files_train 8 instead of 9"."""
    return [
        f"{key} {spec.get(key)!r} instead of {value!r}"
        for key, value in expected.items()
        if spec.get(key) != value
    ]


def wait_for(
    folder: str, expected: DatasetManifest, deadline_s: float, objects: ObjectFolder | None = None
) -> None:
    """Waits until rank 0 has prepared the folder. Raises SourceError if it has not, in time."""
    end = time.monotonic() + deadline_s
    while True:
        manifest = read_manifest(folder, objects)
        if manifest is not None and manifest.spec == expected.spec:
            return
        if time.monotonic() > end:
            raise _refused(
                folder, f"rank 0 has not begun this data set within {deadline_s:g} s",
                "Look at rank 0's error; all ranks need the same workload and folder.",
            )  # fmt: skip
        time.sleep(_POLL_S)


AT_REST_S: Final = 0.03
"""Files that changed so lately may change again without anybody seeing it: the clock that they have ticks
every 1 to 10 ms. headrace's readers refuse them."""

_MAY_DIFFER = ("num_files_train", "num_files_eval", "seed")
"""A run may use fewer files than there are."""


def find_files(
    spec: DatasetSpec, split: Split, listing_interval: int | None = None,
    objects: ObjectFolder | None = None,
) -> list[str]:  # fmt: skip
    """The files of a split, in the order that the samples are counted in.

    Args:
        spec: the data set.
        split: of it.
        listing_interval: names are taken from the numbers of files, as `dataset.skip_listing` asks, and
            only every so many-th file is looked for. Not given, folders are listed.
        objects: the bucket that it lies in, if it does not lie in a folder.

    Raises:
        SourceError: the data set is half-generated, another one, or has too few files.
    """
    folder = spec.data_folder
    manifest = read_manifest(folder, objects)
    if manifest is not None:
        expected = DatasetManifest.of(spec, complete=True).spec
        for key in _MAY_DIFFER:
            expected.pop(key, None)
        wrong = differences(manifest.spec, expected)
        if wrong:
            raise _unfit(folder, f"was generated with {'; '.join(wrong)}")
        if not manifest.complete:
            raise _unfit(folder, "is half-generated")
    wanted = spec.num_files(split)
    if spec.requests is not None:
        return [spec.path(split, index) for index in range(wanted)]
    if listing_interval is not None:
        return _named(spec, split, listing_interval)
    paths = _listed(spec, split, objects)
    if len(paths) < wanted:
        raise _unfit(
            os.path.join(folder, split),
            f"has {len(paths):,} files that end with .{spec.extension}, "
            f"expected num_files_{'train' if split == 'train' else 'eval'} = {wanted:,}",
        )
    return paths[:wanted]


def foreign_files(spec: DatasetSpec, objects: ObjectFolder | None = None) -> str | None:
    """A file of the data folder, if there is any."""
    if objects is not None:
        places = tuple(f"{spec.data_folder}/{split}/" for split in _SPLITS)
        return next((u for u in objects.sizes(spec.data_folder) if u.startswith(places)), None)
    for split in _SPLITS:
        for name in (split, *spec.subfolders(split)):
            try:
                with os.scandir(os.path.join(spec.data_folder, name)) as entries:
                    path = next((e.path for e in entries if e.is_file()), None)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if path is not None:
                return path
    return None


def _listed(spec: DatasetSpec, split: Split, objects: ObjectFolder | None) -> list[str]:
    ending, paths = f".{spec.extension}", list[str]()
    if objects is not None:
        places = {f"{spec.data_folder}/{name}" for name in spec.subfolders(split)}
        every = objects.sizes(f"{spec.data_folder}/{split}")
        return [u for u in every if u.endswith(ending) and u.rpartition("/")[0] in places]
    for name in spec.subfolders(split):
        folder = os.path.join(spec.data_folder, name)
        try:
            with os.scandir(folder) as entries:
                paths += [
                    e.path
                    for e in entries
                    if e.name.endswith(ending) and not e.name.startswith(".")
                ]
        except OSError as e:
            if not spec.num_files(split):
                continue
            raise _refused(
                folder, f"cannot be listed: {e.strerror}",
                "Generate the data set (headrace bench generate), or correct data_folder.",
            ) from e  # fmt: skip
    return sorted(paths)


def _named(spec: DatasetSpec, split: Split, interval: int) -> list[str]:
    """Paths by number; the first, the last and every `interval`-th are looked for."""
    paths = [spec.path(split, index) for index in range(spec.num_files(split))]
    for number in {*range(0, len(paths), interval), *([len(paths) - 1] if paths else [])}:
        if not os.path.exists(paths[number]):
            raise _unfit(paths[number], "has no such file (dataset.skip_listing is true)")
    return sorted(paths)


def _refused(path: str, what: str, next_step: str) -> SourceError:
    return SourceError(f"{path}: {what}.", path=path, next_step=next_step)


def _unfit(path: str, what: str) -> SourceError:
    return _refused(
        path, f"the data set {what}",
        "Generate it (headrace bench generate; a half-generated one is finished by the same command), or "
        "correct the workload's dataset section.",
    )  # fmt: skip


_HEADERS_MOST: Final = 3
_SIZES_MOST: Final = 2000


def check_files(
    spec: DatasetSpec, split: Split, paths: Sequence[str], objects: ObjectFolder | None = None
) -> None:
    """Look at a split's files: the sizes of many, and the headers of a few unless they are a recorded job's.

    Raises:
        SourceError: one is not of the format, is cut short, or not as long as recorded; names it.
    """
    if spec.requests is not None:
        _check_sizes(spec, split)
        return
    manifest = read_manifest(spec.data_folder, objects)
    if manifest is not None:
        generated = {**manifest.spec, "data_folder": spec.data_folder}
        _check_sizes(DatasetSpec.from_mapping(generated), split, objects)
    last, most = len(paths) - 1, min(len(paths), _HEADERS_MOST)
    for path in [paths[i * last // max(1, most - 1)] for i in range(most)]:  # with both ends
        if objects is not None:
            objects.check_begin(path, spec.format)
            continue
        try:
            if not os.path.getsize(path):
                raise bad_file(path, "the file's size", 0, "a sample")
            format_of(spec).sample_extents(path, spec)
        except MissingPackage:
            continue  # an engine that does not decode needs no library for it
        except OSError as e:  # it was listed a moment ago, or is a link to nothing
            raise SourceError(
                f"{path} cannot be read: {e.strerror}.", path=path,
                next_step="Generate the data set again (headrace bench generate).",
            ) from e  # fmt: skip


def _check_sizes(spec: DatasetSpec, split: Split, objects: ObjectFolder | None = None) -> None:
    count, shapes = spec.num_files(split), spec.sample_shapes()
    listed = None if objects is None else objects.sizes(f"{spec.data_folder}/{split}")
    for index in {*range(0, count, max(1, count // _SIZES_MOST)), *([count - 1] if count else [])}:
        path = spec.path(split, index)
        expected = format_of(spec).file_bytes(
            spec, tuple(shapes[spec.number(split, index)].tolist())
        )
        try:
            size = os.path.getsize(path) if listed is None else listed.get(path, expected)
        except OSError as e:
            if spec.requests is not None:
                raise _refused(path, f"cannot be looked at ({e.strerror})", _AS_RECORDED) from e
            continue  # a run may use fewer files than were made; those it needs were counted
        if size == expected or (expected is None and size):
            continue
        if spec.requests is not None:
            what = f"has {size:,} bytes, the record says {expected:,}"
            raise _refused(path, what, _AS_RECORDED)
        expected_text = "a sample" if expected is None else f"{expected:,}"
        raise bad_file(path, "the file's size", f"{size:,}", expected_text)


_AS_RECORDED: Final = (
    "Generate the recorded files there (headrace bench run --generate), or give the recorded folder "
    "itself (--data-folder)."
)


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
    objects: ObjectFolder | None = None,
) -> GenerateReport:
    """Writes a data set, or this rank's share of it, by more threads than there are processors.

    Each thread waits for the disk half of its time. With `direct` large files are written past the page cache;
    with `sync` all is on the disk when this returns, and before the data set counts as complete. `overwrite`
    removes another data set of ours first. `progress` is called with (samples done, samples, bytes done, bytes)
    from any thread. With `objects` the data set lies in a bucket: files are made in the system's folder for
    temporary ones, a few at a time, and removed when they are written.

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
            _prepare(spec, expected, overwrite=overwrite, objects=objects)
        else:
            wait_for(spec.data_folder, expected, _RANK_0_DEADLINE_S, objects)
        share = range(rank, spec.total_files, world_size)
        run = _Run(spec, share, progress, direct=direct, objects=objects)
        with run.working():
            run.write_all(threads or min(2 * len(os.sched_getaffinity(0)) + 2, _THREADS_MAX))
        if sync and objects is None:
            _sync(spec.data_folder)
        run.report.complete = _finish(spec, expected, rank, world_size, objects)
    except OSError as e:
        if isinstance(e, VolumeError):
            raise
        raise write_error(e, e.filename or spec.data_folder) from e
    run.report.seconds = time.monotonic() - started
    return run.report


class _Run:
    """One rank's files, on their way to the disk."""

    def __init__(
        self, spec: DatasetSpec, numbers: range, progress: Progress | None, *, direct: bool,
        objects: ObjectFolder | None = None,
    ) -> None:  # fmt: skip
        self._spec, self._numbers, self._progress, self._direct = spec, numbers, progress, direct
        self._objects, self._folder = objects, spec.data_folder
        self._listed = {} if objects is None else objects.sizes(spec.data_folder)
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

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The folder that files are made in: the data set's own, or for objects a temporary one."""
        if self._objects is None:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="headrace-generate-") as folder:
            self._spec, self._direct = replace(self._spec, data_folder=folder), False
            for split in _SPLITS:
                for name in self._spec.subfolders(split):
                    os.makedirs(os.path.join(folder, name))
            yield

    def write_all(self, threads: int) -> None:
        """Writes what is not there yet; the first error stops all."""
        threads, files = max(1, threads), max(1, len(self._numbers))
        begun = any(self._is_there(self._job(number)) for number in self._numbers[:1])
        if self._numbers.start == 0 and not begun and self._spec.format != "synthetic":
            share = 1.0 if self._objects is None else min(1.0, threads / files)  # at a time
            nbytes = int(self._estimate * self._numbers.step * share)
            check_free_space(Path(self._spec.data_folder), nbytes)
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
                if self._objects is not None:
                    for job in missing:
                        self._objects.move_here(job.path, self._url(job))
                self._count(jobs, len(jobs) - len(missing), written)
        except BaseException:
            self._stop.set()
            raise

    def _job(self, number: int) -> FileJob:
        spec, shape = self._spec, tuple(self._shapes[number].tolist())
        if number < spec.num_files_train:
            return FileJob(spec, "train", number, shape, self._content)
        return FileJob(spec, "valid", number - spec.num_files_train, shape, self._content)

    def _is_there(self, job: FileJob) -> bool:
        """Whether a file is, whole: a power cut may leave a name with nothing behind it."""
        if self._objects is not None:
            size = self._listed.get(self._url(job))
        else:  # most are not there: an exception costs more than the look
            size = os.stat(job.path).st_size if os.access(job.path, os.F_OK) else None
        if size is None:
            return False
        expected = self._file_bytes(job.shape)
        return size > 0 if expected is None else size == expected

    def _url(self, job: FileJob) -> str:
        return f"{self._folder}/{job.spec.file_name(job.split, job.index)}"

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


def _prepare(
    spec: DatasetSpec, expected: DatasetManifest, *, overwrite: bool, objects: ObjectFolder | None
) -> None:
    """Makes the folders and the manifest, unless something else is there."""
    folder = spec.data_folder
    manifest = read_manifest(folder, objects)
    if manifest is None:
        if strange := foreign_files(spec, objects):
            what = f"holds files that headrace has not generated, as {strange}"
            raise _refused(folder, what, "Choose another data_folder, or remove them.")
    elif manifest.spec != expected.spec:
        if not overwrite:
            what = "; ".join(differences(manifest.spec, expected.spec))
            raise _refused(
                folder, f"holds another data set: {what}",
                "Choose another data_folder, or pass --overwrite to replace it.",
            )  # fmt: skip
        _remove(folder, manifest, objects)
        manifest = None
    if objects is None:
        for split in _SPLITS:
            for name in spec.subfolders(split):
                os.makedirs(os.path.join(folder, name), exist_ok=True)
                remove_leftovers(os.path.join(folder, name))
        remove_leftovers(folder)
    if manifest is None:
        expected.write(folder, objects)


def _remove(folder: str, old: DatasetManifest, objects: ObjectFolder | None) -> None:
    """Removes the files that an older manifest names, and no others. Its own goes last."""
    if "requests" in old.spec:
        what = "holds the files of another recorded job"
        raise _refused(folder, what, "Choose another data_folder, or remove that one.")
    spec = DatasetSpec.from_mapping({**old.spec, "data_folder": folder})
    if objects is not None:
        objects.remove([spec.path(split, index) for split, index in spec.files()])
        objects.remove_marks(folder)
        return
    for split, index in spec.files():
        path = Path(spec.path(split, index))
        for name in (path, Path(f"{path}.off.idx"), Path(f"{path}.sz.idx")):
            name.unlink(missing_ok=True)
        Path(folder, "index", split, path.name + ".idx").unlink(missing_ok=True)
    _remove_marks(Path(folder))


def _finish(
    spec: DatasetSpec, expected: DatasetManifest, rank: int, world_size: int,
    objects: ObjectFolder | None,
) -> bool:  # fmt: skip
    """Says that this rank has finished; the one that sees all others marks the data set complete."""
    folder = Path(spec.data_folder)
    if world_size > 1:
        if objects is None:
            markers = [folder / f".generated-{r}-of-{world_size}" for r in range(world_size)]
            markers[rank].touch()
            seen = all(m.exists() for m in markers)
        else:
            seen = objects.all_marked(spec.data_folder, rank, world_size)
        if not seen:
            # The last one may have seen all and removed them already.
            now = read_manifest(spec.data_folder, objects)
            return now is not None and now.complete
    replace(expected, complete=True).write(spec.data_folder, objects)
    if objects is not None:
        objects.remove_marks(spec.data_folder)
    else:
        _remove_marks(folder)
    return True


def _remove_marks(folder: Path) -> None:
    for marker in folder.glob(".generated-*"):
        marker.unlink(missing_ok=True)


def _sync(folder: str) -> None:
    """Waits until the folder's file system has all on the disk: once, not for each small file."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), folder)
    finally:
        os.close(fd)
