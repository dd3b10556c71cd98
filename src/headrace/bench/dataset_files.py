"""A data set's files: its manifest, finding them, and checking them before a run.

`headrace-dataset.json` in the data folder is written before the first file and again behind the last one. A
folder without it was made by someone else: it is read, and never written. As DLIO, a run goes by the folders
and by what names end with: the files in name order are the data set. Unlike DLIO it refuses a half-generated
one, and one that was generated for another workload; the headers of a few files and the sizes of many are
checked, since engines that hand on bytes would read anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.documents import DocumentKind
from headrace.base.files import replace_file
from headrace.bench.dataset import DatasetSpec
from headrace.bench.formats import bad_file, format_of
from headrace.bench.plan import fingerprint
from headrace.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.dataset import Split


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

    def write(self, folder: str) -> None:
        """Puts it in its place, durably. Several ranks may write the same at the same time."""
        text = _MANIFEST.encode(dataclasses.asdict(self), indent=1)
        replace_file(Path(folder, FILE_NAME), text)


def read_manifest(folder: str) -> DatasetManifest | None:
    """The manifest of a data folder; None where there is none. Raises SourceError if it is damaged."""
    path = os.path.join(folder, FILE_NAME)
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


def wait_for(folder: str, expected: DatasetManifest, deadline_s: float) -> None:
    """Waits until rank 0 has prepared the folder. Raises SourceError if it has not, in time."""
    end = time.monotonic() + deadline_s
    while True:
        manifest = read_manifest(folder)
        if manifest is not None and manifest.spec == expected.spec:
            return
        if time.monotonic() > end:
            raise SourceError(
                f"{folder}: rank 0 has not begun this data set within {deadline_s:g} s.",
                path=folder,
                next_step="Look at rank 0's error; all ranks need the same workload and folder.",
            )
        time.sleep(_POLL_S)


AT_REST_S: Final = 0.03
"""Files that changed so lately may change again without anybody seeing it: the clock that they have ticks
every 1 to 10 ms. headrace's readers refuse them."""

_MAY_DIFFER = ("num_files_train", "num_files_eval", "seed")
"""A run may use fewer files than there are."""


def find_files(spec: DatasetSpec, split: Split, listing_interval: int | None = None) -> list[str]:
    """The files of a split, in the order that the samples are counted in.

    Args:
        spec: the data set.
        split: of it.
        listing_interval: names are taken from the numbers of files, as `dataset.skip_listing` asks, and
            only every so many-th file is looked for. Not given, folders are listed.

    Raises:
        SourceError: the data set is half-generated, another one, or has too few files.
    """
    folder = spec.data_folder
    manifest = read_manifest(folder)
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
    paths = _listed(spec, split)
    if len(paths) < wanted:
        raise _unfit(
            os.path.join(folder, split),
            f"has {len(paths):,} files that end with .{spec.extension}, "
            f"expected num_files_{'train' if split == 'train' else 'eval'} = {wanted:,}",
        )
    return paths[:wanted]


def foreign_files(spec: DatasetSpec) -> str | None:
    """A file of the data folder, if there is any."""
    splits: tuple[Split, ...] = ("train", "valid")
    for split in splits:
        for name in (split, *spec.subfolders(split)):
            try:
                with os.scandir(os.path.join(spec.data_folder, name)) as entries:
                    path = next((e.path for e in entries if e.is_file()), None)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if path is not None:
                return path
    return None


def _listed(spec: DatasetSpec, split: Split) -> list[str]:
    ending, paths = f".{spec.extension}", list[str]()
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
            raise SourceError(
                f"{folder}: cannot be listed: {e.strerror}.",
                path=folder,
                next_step="Generate the data set (headrace bench generate), or correct data_folder.",
            ) from e
    return sorted(paths)


def _named(spec: DatasetSpec, split: Split, interval: int) -> list[str]:
    """Paths by number; the first, the last and every `interval`-th are looked for."""
    paths = [spec.path(split, index) for index in range(spec.num_files(split))]
    for number in {*range(0, len(paths), interval), *([len(paths) - 1] if paths else [])}:
        if not os.path.exists(paths[number]):
            raise _unfit(paths[number], "has no such file (dataset.skip_listing is true)")
    return sorted(paths)


def _unfit(path: str, what: str) -> SourceError:
    return SourceError(
        f"{path}: the data set {what}.",
        path=path,
        next_step="Generate it (headrace bench generate; a half-generated one is finished by the "
        "same command), or correct the workload's dataset section.",
    )


_HEADERS_MOST: Final = 3
_SIZES_MOST: Final = 2000


def check_files(spec: DatasetSpec, split: Split, paths: Sequence[str]) -> None:
    """Look at a split's files: the sizes of many, and the headers of a few unless they are a recorded job's.

    Raises:
        SourceError: one is not of the format, is cut short, or not as long as recorded; names it.
    """
    if spec.requests is not None:
        _check_sizes(spec, split)
        return
    manifest = read_manifest(spec.data_folder)
    if manifest is not None:
        generated = {**manifest.spec, "data_folder": spec.data_folder}
        _check_sizes(DatasetSpec.from_mapping(generated), split)
    last, most = len(paths) - 1, min(len(paths), _HEADERS_MOST)
    for path in [paths[i * last // max(1, most - 1)] for i in range(most)]:  # with both ends
        try:
            if not os.path.getsize(path):
                raise bad_file(path, "the file's size", 0, "a sample")
            format_of(spec).sample_extents(path, spec)
        except SourceError as e:
            # An engine that does not decode needs no library for it.
            if not isinstance(e.__cause__, ImportError):
                raise
        except OSError as e:  # it was listed a moment ago, or is a link to nothing
            raise SourceError(
                f"{path} cannot be read: {e.strerror}.",
                path=path,
                next_step="Generate the data set again (headrace bench generate).",
            ) from e


def _check_sizes(spec: DatasetSpec, split: Split) -> None:
    count, shapes = spec.num_files(split), spec.sample_shapes()
    for index in {*range(0, count, max(1, count // _SIZES_MOST)), *([count - 1] if count else [])}:
        path = spec.path(split, index)
        expected = format_of(spec).file_bytes(
            spec, tuple(shapes[spec.number(split, index)].tolist())
        )
        try:
            size = os.path.getsize(path)
        except OSError as e:
            if spec.requests is not None:
                raise _not_as_recorded(path, f"cannot be looked at ({e.strerror})") from e
            continue  # a run may use fewer files than were made; those it needs were counted
        if size == expected or (expected is None and size):
            continue
        if spec.requests is not None:
            raise _not_as_recorded(path, f"has {size:,} bytes, the record says {expected:,}")
        expected_text = "a sample" if expected is None else f"{expected:,}"
        raise bad_file(path, "the file's size", f"{size:,}", expected_text)


def _not_as_recorded(path: str, what: str) -> SourceError:
    return SourceError(
        f"{path}: {what}.",
        path=path,
        next_step="Generate the recorded files there (headrace bench run --generate), or give the "
        "recorded folder itself (--data-folder).",
    )
