"""Finds a data set's files: generated here or by DLIO, or anyone's of the right kind and number.

As DLIO, it goes by the folders and by what names end with: the files in name order are the data set. Unlike
DLIO it refuses a half-generated one, and one that was generated for another workload.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from headrace.bench.manifest import Manifest, differences, read_manifest
from headrace.errors import SourceError

if TYPE_CHECKING:
    from headrace.bench.dataset import DatasetSpec, Split

__all__ = ["AT_REST_S", "find_files", "foreign_files"]

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
        expected = Manifest.of(spec, complete=True).spec
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
                    found = next((e.path for e in entries if e.is_file()), None)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if found is not None:
                return found
    return None


def _listed(spec: DatasetSpec, split: Split) -> list[str]:
    ending = f".{spec.extension}"
    paths = []
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
