"""Data sets' files: generated, found, and checked before a run.

Files are written parallel over ranks and threads, at the disk's speed, resumable: rank r of w writes the
files r, r + w, ... once rank 0 has prepared the folder. A file is there whole or not at all, so a run that was
interrupted goes on where it stopped.

The data folder holds the data set and nothing else: what is to be known of a set, its files say. A generator's
name says how many files there are (`img_03_of_10.npz`), its size and its header what the samples are. As DLIO,
a run goes by the folders and by what names end with: the files in name order are the data set. Unlike DLIO it
refuses a half-generated one, and one that was generated for another workload, whoever generated it: the
headers of a few files and the sizes of many are checked, since engines that hand on bytes would read anything.
Files of other names are someone else's: they are read, and never written.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from headrace import _native
from headrace.base.files import remove_leftovers
from headrace.bench.content import Content
from headrace.bench.dataset import Format, Split
from headrace.bench.formats import FileJob, GeneratedFile, bad_file, format_of, layout_of
from headrace.errors import MissingPackage, SourceError, VolumeError
from headrace.store.output_file import OutputFile, WriteBuffer, write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.objects import ObjectFolder

    Progress = Callable[[int, int | None, int, int | None], None]

AT_REST_S: Final = 0.03
"""Files that changed so lately may change again without anybody seeing it: the clock that they have ticks
every 1 to 10 ms. headrace's readers refuse them."""

_SPLITS: Final[tuple[Split, ...]] = get_args(Split)

_NAME: Final = re.compile(
    rf"(.*)_(\d+)_of_(\d+)\.({'|'.join(get_args(Format))})(\.(gz|zip|bz2|xz))?(\.(off|sz)\.idx)?"
)


class _Place(NamedTuple):
    """What the name of a generated file says: that it is file `number` of `total`."""

    number: int
    total: int


def _place(spec: DatasetSpec, path: str) -> _Place | None:
    """None: no generator gives such a name."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    if match is None or match[1] != spec.file_prefix or len(match[2]) != len(match[3]):
        return None
    place = _Place(int(match[2]), int(match[3]))
    return place if place.number < place.total else None


def find_files(
    spec: DatasetSpec, split: Split, listing_interval: int | None = None,
    objects: ObjectFolder | None = None,
) -> list[str]:  # fmt: skip
    """The files of a split, in the order that the samples are counted in.

    Args:
        spec: the data set; a run may use fewer files than there are.
        split: of it.
        listing_interval: names are taken from the numbers of files, as `dataset.skip_listing` asks, and
            only every so many-th file is looked for. Not given, folders are listed.
        objects: the bucket that it lies in, if it does not lie in a folder.

    Raises:
        SourceError: the data set is half-generated, or has too few files.
    """
    wanted = spec.num_files(split)
    if spec.requests is not None:
        return [spec.path(split, index) for index in range(wanted)]
    if listing_interval is not None:
        return _named(spec, split, listing_interval)
    paths, folder = _listed(spec, split, objects), os.path.join(spec.data_folder, split)
    places = [_place(spec, path) for path in paths]
    counts = {place.total for place in places if place is not None}
    if counts and None not in places and counts != {len(paths)}:
        said = " and ".join(f"{count:,}" for count in sorted(counts))
        there = f"by their names its files are {said}, and {len(paths):,} are there"
        raise _unfit(folder, f"is half-generated: {there}")
    if len(paths) < wanted:
        others = [path for path in _there(spec, objects) if path.startswith(f"{folder}/")]
        raise _unfit(
            folder,
            f"has {len(paths):,} files that end with .{spec.extension}"
            f"{f' of {len(others):,}, as {others[0]}' if len(others) > len(paths) else ''}, expected "
            f"num_files_{_LABELS[split]} = {wanted:,}",
        )
    return paths[:wanted]


_LABELS: Final[dict[str, str]] = {"train": "train", "valid": "eval"}
"""What DLIO calls the splits in its keys."""


def _there(spec: DatasetSpec, objects: ObjectFolder | None) -> dict[str, int | None]:
    """All files where those of the data set go, whoever made them; with the sizes of objects."""
    if objects is not None:
        places = tuple(f"{spec.data_folder}/{split}/" for split in _SPLITS)
        sizes = objects.sizes(spec.data_folder)
        return {url: size for url, size in sizes.items() if url.startswith(places)}
    paths, folders = dict[str, int | None](), set[str](_SPLITS)
    if recorded := spec.requests is not None:
        folders = {name for split in _SPLITS for name in spec.subfolders(split)}
    for folder in sorted(folders):
        for below, inside, names in os.walk(os.path.join(spec.data_folder, folder)):
            shown = sorted(name for name in names if not name.startswith("."))
            paths |= dict.fromkeys(os.path.join(below, name) for name in shown)
            if recorded:  # its folders are named one by one: what lies below may be others'
                inside.clear()
    return paths


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
_BEGIN_BYTES: Final = 64 << 10


def _spread(count: int, most: int) -> list[int]:
    """At most so many numbers below `count`, with both ends."""
    most = min(most, count)
    return [i * (count - 1) // max(1, most - 1) for i in range(most)]


def check_files(
    spec: DatasetSpec, files: Mapping[str, Sequence[str]], objects: ObjectFolder | None = None
) -> None:
    """Look at a run's files, by split as `find_files` has them: the headers of a few, the sizes of many.

    Raises:
        SourceError: one is not of the format, is cut short, or is not as the workload or the record says;
            names it.
    """
    made = _generated(spec, files)
    for split in _SPLITS:
        paths = files.get(split, ())
        for at in _spread(len(paths), _HEADERS_MOST) if spec.requests is None else ():
            begin = _beginning(spec, paths[at], objects)
            place = _place(spec, paths[at])
            if made is not None and place is not None and begin is not None:
                number = made.number(split, place.number)
                if wrong := _differences(made, number, paths[at], begin):
                    raise _unfit(paths[at], f"was generated with {wrong}")
        if made is not None:
            _check_sizes(made, split, paths, objects)


def _generated(spec: DatasetSpec, files: Mapping[str, Sequence[str]]) -> DatasetSpec | None:
    """The data set that a run's files are of, which may have more of them; None: someone else's."""
    if spec.requests is not None:
        return spec
    counts = dict[str, Any]()
    for split, paths in files.items():
        places = [place for path in paths if (place := _place(spec, path)) is not None]
        if len(places) < len(paths):
            return None
        if places:
            counts[f"num_files_{_LABELS[split]}"] = places[0].total
    return replace(spec, **counts)


def _beginning(spec: DatasetSpec, path: str, objects: ObjectFolder | None) -> bytes | None:
    """A file's first bytes, if it is what its format asks for; None where only a missing package can tell."""
    if objects is not None:
        return objects.check_begin(path, spec.format, _BEGIN_BYTES)
    try:
        if not os.path.getsize(path):
            raise bad_file(path, "the file's size", 0, "a sample")
        format_of(spec).sample_extents(path, spec)
        with open(path, "rb") as file:
            return file.read(_BEGIN_BYTES)
    except MissingPackage:
        return None  # an engine that does not decode needs no library for it
    except OSError as e:  # it was listed a moment ago, or is a link to nothing
        raise SourceError(
            f"{path} cannot be read: {e.strerror}.", path=path,
            next_step="Generate the data set again (headrace bench generate).",
        ) from e  # fmt: skip


def _differences(spec: DatasetSpec, number: int, path: str, begin: bytes) -> str:
    """What a file's header has otherwise than the workload: "sample_bytes 9025 instead of 65025"."""
    file = GeneratedFile(path, begin, spec, int(spec.sample_bytes()[number]))
    facts = format_of(spec).facts(file)
    each = (f"{key} {own!r} instead of {wanted!r}" for key, own, wanted in facts if own != wanted)
    return "; ".join(each)


def _check_sizes(
    spec: DatasetSpec, split: Split, paths: Sequence[str], objects: ObjectFolder | None = None
) -> None:
    shapes, recorded = spec.sample_shapes(), spec.requests is not None
    listed = None if objects is None else objects.sizes(f"{spec.data_folder}/{split}")
    for at in _spread(len(paths), _SIZES_MOST):
        path, place = paths[at], None if recorded else _place(spec, paths[at])
        number = spec.number(split, at if place is None else place.number)
        expected = format_of(spec).file_bytes(spec, tuple(shapes[number].tolist()))
        try:
            size = os.path.getsize(path) if listed is None else listed.get(path, 0)
        except OSError as e:
            raise _refused(path, f"cannot be looked at ({e.strerror})", _AS_GENERATED) from e
        if size if expected is None else size == expected:
            continue
        if recorded:
            what = f"has {size:,} bytes, the record says {expected:,}"
            raise _refused(path, what, _AS_RECORDED)
        if spec.format == "jpeg" and not at and size:
            return  # another encoder's, whose pictures have any size
        expected_text = "a sample" if expected is None else f"{expected:,}"
        raise bad_file(path, "the file's size", f"{size:,}", expected_text)


_AS_GENERATED: Final = "Generate the data set again (headrace bench generate)."
_AS_RECORDED: Final = (
    "Generate the recorded files there (headrace bench run --generate), or give the recorded folder "
    "itself (--data-folder)."
)


_THREADS_MAX = 16
_AT_ONCE_BYTES, _AT_ONCE_FILES = 8 << 20, 64
"""Small files go to native code so many at a time."""
_LAYOUTS_KEPT = 256
"""Of files of different shapes."""


@dataclass(slots=True)
class GenerateReport:
    """What a rank did."""

    files: int = 0
    """Of the data set, that are this rank's."""
    resumed_files: int = 0
    """How many of them were there already."""
    bytes: int = 0
    """That were written."""


def generate(
    spec: DatasetSpec,
    *,
    rank: int = 0,
    world_size: int = 1,
    threads: int | None = None,
    direct: bool = True,
    sync: bool = True,
    overwrite: bool = False,
    ready: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
    objects: ObjectFolder | None = None,
) -> GenerateReport:
    """Writes a data set, or this rank's share of it, by more threads than there are processors.

    Each thread waits for the disk half of its time. With `direct` large files are written past the page cache;
    with `sync` all is on the disk when this returns. `overwrite` removes another generated data set first, but
    never files of other names. `ready` is called when rank 0 has prepared the folder: of several ranks the
    others wait in it. `progress` is called with (samples done, samples, bytes done, bytes)
    from any thread. With `objects` the data set lies in a bucket: files are made in the system's folder for
    temporary ones, a few at a time, and removed when they are written.

    Raises:
        SourceError: the folder holds something else.
        VolumeError: the disk is full, or the operating system refuses. What is whole stays.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1}")
    try:
        if rank == 0:
            _prepare(spec, overwrite=overwrite, objects=objects)
        ready()
        share = range(rank, spec.total_files, world_size)
        run = _Run(spec, share, progress, direct=direct, objects=objects)
        with run.working():
            run.write_all(threads or min(2 * len(os.sched_getaffinity(0)) + 2, _THREADS_MAX))
        if sync and objects is None:
            _sync(spec.data_folder)
    except OSError as e:
        if isinstance(e, VolumeError):
            raise
        raise write_error(e, e.filename or spec.data_folder) from e
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
        self.report = GenerateReport()

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


def _prepare(spec: DatasetSpec, *, overwrite: bool, objects: ObjectFolder | None) -> None:
    """Makes the folders, unless something else is there."""
    folder, there = spec.data_folder, _there(spec, objects)
    if why := _why_another(spec, there, objects) if there else "":
        if spec.requests is not None:
            what = f"holds files that headrace has not generated: {why}"
            raise _refused(folder, what, _ELSEWHERE)
        if not overwrite:
            step = (
                "Choose another data_folder (++workload.dataset.data_folder=DIR), or replace it: "
                "headrace bench generate WORDS --overwrite, WORDS being the workload and overrides given."
            )
            raise _refused(folder, f"holds another data set: {why}", step)
        _remove(folder, list(there), objects)
    if objects is None:
        for split in _SPLITS:
            for name in spec.subfolders(split):
                os.makedirs(os.path.join(folder, name), exist_ok=True)
                remove_leftovers(os.path.join(folder, name))


def _why_another(
    spec: DatasetSpec, there: Mapping[str, int | None], objects: ObjectFolder | None
) -> str:
    """Why what is there is not of this data set; "": it is, and is gone on with.

    Raises:
        SourceError: something has a name that no generator gives.
    """
    own = {spec.path(split, index): spec.number(split, index) for split, index in spec.files()}
    others = [path for path in there if path not in own and _COMPANION.sub("", path) not in own]
    for path in others:
        if spec.requests is not None or _place(spec, path) is None:
            what = f"holds files that headrace has not generated, as {path}"
            raise _refused(spec.data_folder, what, _ELSEWHERE)
    if others:
        return f"{others[0]} is none of its files"
    mine = [path for path in there if path in own]
    if spec.requests is not None:  # an empty file shows nothing
        mine = [path for path in mine if os.path.getsize(path)] or mine
    some = [mine[at] for at in _spread(len(mine), _HEADERS_MOST)]
    whys = [_why_other(spec, path, own[path], there[path], objects) for path in some]
    if spec.requests is None and "" in whys:
        return ""  # what a power cut left of another file is written again
    return next(filter(None, whys), "")


_COMPANION: Final = re.compile(r"\.(off|sz)\.idx$")
_ELSEWHERE: Final = "Choose another data_folder, or remove them."


def _why_other(
    spec: DatasetSpec, path: str, number: int, size: int | None, objects: ObjectFolder | None
) -> str:
    """Why a file of the right name is not the one that would be written; "": it is."""
    size = os.path.getsize(path) if size is None else size
    expected = format_of(spec).file_bytes(spec, tuple(spec.sample_shapes()[number].tolist()))
    if expected is not None and size != expected:
        return f"{path} has {size:,} bytes instead of {expected:,}"
    if spec.requests is not None:  # any file may have that size: the recorded ones do
        if not size:
            return f"{path} is empty"
        noise = Content(spec.seed).stream(number).take(min(size, _NOISE_BYTES)).tobytes()
        with open(path, "rb") as file:
            return "" if file.read(_NOISE_BYTES) == noise else f"{path} holds no noise of ours"
    try:
        begin = _beginning(spec, path, objects)
        wrong = "" if begin is None else _differences(spec, number, path, begin)
    except SourceError as e:
        return e.message
    return f"{path} has {wrong}" if wrong else ""


_NOISE_BYTES: Final = 64


def _remove(folder: str, paths: list[str], objects: ObjectFolder | None) -> None:
    """Removes generated files, and what DALI's readers have of them."""
    if objects is not None:
        objects.remove(paths)
        return
    for path in paths:
        split = os.path.relpath(path, folder).partition("/")[0]
        index = Path(folder, "index", split, os.path.basename(path) + ".idx")
        for each in (Path(path), index):
            each.unlink(missing_ok=True)


def _sync(folder: str) -> None:
    """Waits until the folder's file system has all on the disk: once, not for each small file."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), folder)
    finally:
        os.close(fd)
