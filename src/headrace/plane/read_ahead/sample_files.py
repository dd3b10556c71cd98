"""SampleFiles: which files each sample of a data set opens, as far as that is known.

A guess from the data set's attributes serves at once. It is compared with what samples really open; what
differs is learned (`learned`) and shared with the processes that serve the same data set. Watching ends
when it has nothing more to tell.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Protocol

from headrace.plane.read_ahead.learned import LearnedFiles

if TYPE_CHECKING:
    from headrace.plane.read_ahead.learned import SharedLog
    from headrace.plane.read_ahead.stage import ReadAheadOptions


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


GUESS_WATCHED = 64
"""Samples after which a guess that was right is not watched any more."""

GUESS_TRIED = 16
"""Samples after which a guess that was mostly wrong is given up."""

IDLE_AFTER = 256
"""Samples that opened nothing, after which nothing is learned any more."""

SYNC_EVERY = 64
"""Samples that are learned before the others are told."""


class SampleFiles:
    """The files of samples 0..n-1.

    Args:
        samples: how many there are.
        source: the guess, if there is one.
        options: whether to learn, and in how much memory.
        log: shared with the other processes that serve the same dataset.
    """

    def __init__(
        self,
        samples: int,
        source: PathSource | None,
        options: ReadAheadOptions,
        log: SharedLog | None,
    ) -> None:
        self.watching = options.learn
        """Whether samples' opens are to be watched."""
        self.unplanned = 0
        """Files that samples opened and the guess did not name."""
        self._may_learn = options.learn
        self._source = source
        self._knowledge = LearnedFiles(samples, options.knowledge_bytes)
        self._log = log
        self._log_mark = 0
        self._sent_mark = 0
        self._unsent = 0
        self._watched = 0
        self._opened_any = False
        self._guess_wrong = 0
        self._guess_incomplete = False

    def of(self, key: int | str) -> Sequence[str]:
        """The files of a sample, or the path itself; empty: none, or not known."""
        if isinstance(key, str):
            return (key,)
        if self._knowledge.knows(key):
            return self._knowledge.paths(key)
        if self._source is None:
            return ()
        try:
            return tuple(dict.fromkeys(self._source.paths(key)))
        except Exception:  # noqa: BLE001  # a user's container; the dataset will say it better
            return ()

    def note(self, index: int, paths: list[str]) -> None:
        """A sample that was watched opened these files."""
        self._watched += 1
        self._opened_any = self._opened_any or bool(paths)
        if self._source is not None and self._confirms(index, paths):
            if self._watched >= GUESS_WATCHED and not self._guess_incomplete:
                self.watching = False
            return
        if self._knowledge.learn(index, paths):
            self._unsent += 1
            if self._unsent >= SYNC_EVERY:
                self.sync()
        if self._watched >= IDLE_AFTER and not self._opened_any:
            self.watching = False

    def _confirms(self, index: int, paths: list[str]) -> bool:
        """Whether the guess named exactly what was opened; one that is mostly wrong is given up."""
        guess = () if self._knowledge.knows(index) else self.of(index)
        if list(guess) == paths:
            return True
        self.unplanned += len(set(paths) - set(guess))
        self._guess_incomplete = True
        self._guess_wrong += not set(guess) <= set(paths)
        if 2 * self._guess_wrong > self._watched >= GUESS_TRIED:
            self._source = None
        return False

    def sync(self) -> None:
        """Exchange what was learned with the processes that share the log. Cheap without news."""
        if self._log is None:
            return
        self._unsent = 0
        delta, _ = self._knowledge.learned_since(self._sent_mark)
        if delta:
            self._log.append(delta)
        deltas, self._log_mark = self._log.read_since(self._log_mark)
        for other in deltas:
            self._knowledge.teach(other)
        self._sent_mark = self._knowledge.known

    @property
    def why_none(self) -> str | None:
        """Why no sample's files are known, nor will be; None: they are, or may be."""
        if self._source is not None or self.watching or self._opened_any:
            return None
        if not self._may_learn:
            return "off: no attribute of the dataset names its files, and `learn` is off"
        return f"off: the first {self._watched} samples opened no files"

    def explain(self) -> str:
        """Where paths come from, in a few words."""
        where = "attributes of the dataset" if self._source is not None else "what was learned"
        return f"paths from {where}, {self._knowledge.known} samples learned"

    def forget_parent(self) -> None:
        """In a forked child: the lock is the parent's, what was learned before the fork is ours."""
        self._knowledge.forget_lock()
