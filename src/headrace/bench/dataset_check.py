"""Looks at a data set before a run: its files are of its format, and as long as they were made.

Engines that hand on bytes would read anything. Looked at are the headers of a few files, and the sizes of
many: what a copy left half, or named wrongly, is found in a moment, and is not a result.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from headrace.bench.dataset import DatasetSpec
from headrace.bench.formats import format_of
from headrace.bench.formats.base import bad_file
from headrace.bench.manifest import read_manifest
from headrace.bench.replay import check_recorded_files
from headrace.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.dataset import Split

__all__ = ["check_files"]

_HEADERS_MOST: Final = 3
_SIZES_MOST: Final = 2000
_IMAGES: Final = {
    "jpeg": (b"\xff\xd8\xff", b"\xff\xd9"),
    "png": (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),
}
"""How they begin and end."""


def check_files(spec: DatasetSpec, split: Split, paths: Sequence[str]) -> None:
    """Look at a split's files.

    Args:
        spec: what the workload says of them.
        split: which files.
        paths: as `find_files` gives them.

    Raises:
        SourceError: one is not of the format, or is cut short; names it.
    """
    if spec.requests is not None:
        check_recorded_files(spec, split, paths)
        return
    manifest = read_manifest(spec.data_folder)
    if manifest is not None:
        made = DatasetSpec.from_mapping({**manifest.spec, "data_folder": spec.data_folder})
        _check_sizes(made, split)
    for path in _spread(paths, _HEADERS_MOST):
        try:
            _check_header(spec, path)
        except OSError as e:  # it was listed a moment ago, or is a link to nothing
            raise SourceError(
                f"{path} cannot be read: {e.strerror}.",
                path=path,
                next_step="Generate the data set again (headrace bench generate).",
            ) from e


def _check_header(spec: DatasetSpec, path: str) -> None:
    if not os.path.getsize(path):
        raise bad_file(path, "the file's size", 0, "a sample")
    try:
        format_of(spec).sample_extents(path, spec)
    except SourceError as e:
        if isinstance(e.__cause__, ImportError):
            return  # an engine that does not decode needs no library for it
        raise
    _check_image(spec, path)


def _spread(found: Sequence[str], most: int) -> list[str]:
    """So many, evenly, with the first and the last."""
    if len(found) <= most:
        return list(found)
    return [found[i * (len(found) - 1) // (most - 1)] for i in range(most)]


def _check_sizes(made: DatasetSpec, split: Split) -> None:
    count = made.num_files(split)
    shapes = made.sample_shapes()
    step = max(1, count // _SIZES_MOST)
    for index in {*range(0, count, step), *([count - 1] if count else [])}:
        path = made.path(split, index)
        shape = tuple(shapes[made.number(split, index)].tolist())
        try:
            found = os.path.getsize(path)
        except OSError:
            continue  # a run may use fewer files than were made; those it needs were counted
        expected = format_of(made).file_bytes(made, shape)
        if found != expected if expected is not None else not found:
            told = "a sample" if expected is None else f"{expected:,}"
            raise bad_file(path, "the file's size", f"{found:,}", told)


def _check_image(spec: DatasetSpec, path: str) -> None:
    if spec.format not in _IMAGES:
        return
    first, last = _IMAGES[spec.format]
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        begin = file.read(len(first))
        file.seek(max(0, size - len(last)))
        end = file.read()
    if begin != first:
        raise bad_file(path, "its beginning", begin, f"{first!r}, a {spec.format}'s")
    if end != last:
        raise bad_file(path, "its end", end, f"{last!r}, a {spec.format}'s", size)
