"""Which files a known kind of dataset opens for a sample, without asking torch.

Datasets of files mostly keep a list of paths: torchvision's `samples` and `imgs` hold (path, class)
pairs, home-made ones a list called `files`, `paths` or the like, sometimes relative to `root`.
Subsets, concatenations and wrappers are looked through by the attributes they are known by. Nothing
is imported and nothing of the dataset is called but `len`.

What is found is a guess. `ReadAhead` compares it with what is really opened, and learns if it is
wrong (learner.py).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from operator import index as as_index
from typing import Any, Protocol

__all__ = ["PathSource", "guess_paths"]

_LISTS = (
    "samples",
    "imgs",
    "files",
    "paths",
    "image_paths",
    "img_paths",
    "file_paths",
    "filepaths",
    "filenames",
    "file_names",
    "image_files",
    "img_files",
    "file_list",
    "images",
)
_ROOTS = ("root", "root_dir", "data_dir", "img_dir", "image_dir", "folder", "directory", "path")
_DEPTH_MAX = 16  # wrappers in wrappers: a cycle ends here


class PathSource(Protocol):
    """Says which files a sample is made of."""

    def paths(self, index: int) -> Sequence[str]:
        """The files of sample `index`, as its dataset will name them; empty: not known."""
        ...


class _List:
    """A list whose elements are paths, or begin with one."""

    def __init__(self, items: Sequence[Any], root: str | None) -> None:
        self._items = items
        self._root = root

    def paths(self, index: int) -> Sequence[str]:
        path = _path_in(self._items[index])
        if path is None:
            return ()
        return (os.path.join(self._root, path),) if self._root is not None else (path,)  # noqa: PTH118


class _Subset:
    """Torch's Subset: sample i is sample `indices[i]` of another dataset."""

    def __init__(self, inner: PathSource, indices: Sequence[Any]) -> None:
        self._inner = inner
        self._indices = indices

    def paths(self, index: int) -> Sequence[str]:
        return self._inner.paths(as_index(self._indices[index]))


class _Concatenation:
    """Torch's ConcatDataset: datasets end to end."""

    def __init__(self, inner: Sequence[PathSource | None], ends: Sequence[int]) -> None:
        self._inner = inner
        self._ends = ends

    def paths(self, index: int) -> Sequence[str]:
        if index < 0:
            index += self._ends[-1]
        part = bisect_right(self._ends, index)
        source = self._inner[part]
        start = self._ends[part - 1] if part else 0
        return source.paths(index - start) if source is not None else ()


def guess_paths(dataset: Any) -> PathSource | None:
    """Find the paths of a dataset's samples.

    Args:
        dataset: anything with `__getitem__` and `__len__`.

    Returns:
        Their source, or None where no attribute looks like one.
    """
    return _guess(dataset, _DEPTH_MAX)


def _guess(dataset: Any, depth: int) -> PathSource | None:
    if depth == 0:
        return None
    inner = _attribute(dataset, "dataset")
    indices = _attribute(dataset, "indices")
    if inner is not None and indices is not None:
        source = _guess(inner, depth - 1)
        return _Subset(source, indices) if source is not None else None
    parts = _attribute(dataset, "datasets")
    ends = _attribute(dataset, "cumulative_sizes")
    if isinstance(parts, Sequence) and isinstance(ends, Sequence) and len(parts) == len(ends):
        sources = [_guess(part, depth - 1) for part in parts]
        return _Concatenation(sources, ends) if any(sources) else None
    found = _list_of(dataset)
    if found is not None:
        return found
    if inner is not None and _length(inner) == _length(dataset):
        return _guess(inner, depth - 1)
    return None


def _list_of(dataset: Any) -> _List | None:
    length = _length(dataset)
    if not length:
        return None
    for name in _LISTS:
        items = _attribute(dataset, name)
        if isinstance(items, (str, bytes)) or _length(items) != length:
            continue
        try:
            ends = [_path_in(items[0]), _path_in(items[length - 1])]
        except Exception:  # noqa: BLE001, S112  # a user's container may raise anything
            continue
        if None in ends:
            continue
        for root in (None, *_roots(dataset)):
            full = [os.path.join(root or "", path) for path in ends if path is not None]  # noqa: PTH118
            if all(os.path.isfile(path) for path in full):  # noqa: PTH113
                return _List(items, root)
    return None


def _roots(dataset: Any) -> list[str]:
    roots = [_attribute(dataset, name) for name in _ROOTS]
    return [os.fsdecode(root) for root in roots if isinstance(root, (str, bytes, os.PathLike))]


def _path_in(item: Any) -> str | None:
    if isinstance(item, (tuple, list)) and item:
        item = item[0]
    if isinstance(item, str):  # also numpy's str_
        return str(item)
    if isinstance(item, (bytes, os.PathLike)):
        return os.fsdecode(item)
    return None


def _attribute(thing: Any, name: str) -> Any:
    # Wrappers forward attributes and properties compute: whatever they raise means "not there".
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001
        return None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # noqa: BLE001
        return None
