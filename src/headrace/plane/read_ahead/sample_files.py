"""Predicted files: which files each sample of a data set opens, as far as that is known.

A guess from the data set's lists serves at once. It is compared with what samples really open; what
differs is learned (`LearnedFiles`) and shared with the processes that serve the same data set (`SharedLog`).
Watching ends when it has nothing more to tell.

What is learned takes few bytes: a million samples of one file each take about 60 MB. Paths are split into
folder and name, folders are kept once, and numbers lie in arrays. It is handed to other processes as deltas,
which are plain bytes. A file that many samples open (a shard, an index, an annotation) is recognised and left
out; so is a sample that opens other files each time.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import threading
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import index as as_index
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.plane.read_ahead.stage import ReadAheadOptions


Paths = Callable[[int], Sequence[str]]
"""The files of a sample, as its data set will name them; empty: not known."""

_LISTS = (
    "samples", "imgs", "files", "paths", "image_paths", "img_paths", "file_paths", "filepaths", "filenames",
    "file_names", "image_files", "img_files", "file_list", "images",
)  # fmt: skip
_ROOTS = ("root", "root_dir", "data_dir", "img_dir", "image_dir", "folder", "directory", "path")
_DEPTH_MAX = 16  # wrappers in wrappers: a cycle ends here


def guess_paths(dataset: Any, depth: int = _DEPTH_MAX) -> Paths | None:
    """Find the paths of a dataset's samples.

    Returns:
        Gives the files of a sample; None where no list looks like paths.
    """
    if depth == 0:
        return None
    inner = _attribute(dataset, "dataset")
    indices = _attribute(dataset, "indices")
    if inner is not None and indices is not None:  # torch's Subset
        source = guess_paths(inner, depth - 1)
        return None if source is None else lambda index: source(as_index(indices[index]))
    parts = _attribute(dataset, "datasets")
    ends = _attribute(dataset, "cumulative_sizes")
    if isinstance(parts, Sequence) and isinstance(ends, Sequence) and len(parts) == len(ends):
        return _concatenated([guess_paths(part, depth - 1) for part in parts], ends)
    listed = _listed_paths(dataset)
    if listed is None and inner is not None and _length(inner) == _length(dataset):
        return guess_paths(inner, depth - 1)
    return listed


def _concatenated(sources: Sequence[Paths | None], ends: Sequence[int]) -> Paths | None:
    """Torch's ConcatDataset: data sets end to end."""

    def paths(index: int) -> Sequence[str]:
        if index < 0:
            index += ends[-1]
        part = bisect_right(ends, index)
        source = sources[part]
        return () if source is None else source(index - (ends[part - 1] if part else 0))

    return paths if any(sources) else None


def _listed_paths(dataset: Any) -> Paths | None:
    """A list of the data set's whose elements are paths, or begin with one."""
    length = _length(dataset)
    if not length:
        return None
    for items in _lists(dataset):
        if isinstance(items, (str, bytes)) or _length(items) != length:
            continue
        try:
            ends = [_path_in(items[0]), _path_in(items[length - 1])]
        except Exception:  # noqa: BLE001, S112  # a user's container may raise anything
            continue
        if None in ends:
            continue
        for root in ("", *_roots(dataset)):
            if all(os.path.isfile(os.path.join(root, path or "")) for path in ends):  # noqa: PTH113, PTH118
                return partial(_path_at, items, root)
    return None


def _lists(dataset: Any) -> Iterator[Any]:
    """What may name the files: attributes of usual names, then all lists that it or its functions hold."""
    for name in _LISTS:
        yield _attribute(dataset, name)
    held = list((_attribute(dataset, "__dict__") or {}).values())
    for value in (*held, _attribute(type(dataset), "__getitem__")):
        if isinstance(value, (FunctionType, MethodType)):
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    held.append(cell.cell_contents)
    yield from (value for value in held if type(value) in {list, tuple})


def _path_at(items: Sequence[Any], root: str, index: int) -> Sequence[str]:
    path = _path_in(items[index])
    return () if path is None else (os.path.join(root, path),)  # noqa: PTH118


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


GUESS_WATCHED = 64  # samples after which a guess that was right is not watched any more
GUESS_TRIED = 16  # samples after which a guess that was mostly wrong is given up
IDLE_AFTER = 256  # samples that opened nothing, after which nothing is learned any more
SYNC_EVERY = 64  # samples that are learned before the others are told
NO_FILES = "samples opened no files"


class PredictedFiles:
    """The files of samples 0..n-1."""

    def __init__(
        self,
        samples: int,
        source: Paths | None,
        options: ReadAheadOptions,
        log: SharedLog | None,
    ) -> None:
        self.watching = options.learn
        """Whether samples' opens are to be watched."""
        self.unplanned = 0
        """Files that samples opened and the guess did not name."""
        self._may_learn = options.learn
        self._source = source
        self.knowledge = LearnedFiles(samples, options.knowledge_bytes)
        self._log = log
        self._log_mark = 0
        self._sent_mark = 0
        self._unsent = 0
        self._watched = 0
        self._noted: list[
            tuple[int, list[str]]
        ] = []  # opened, and not learned yet: together is cheaper
        self._opened_any = False
        self._guess_wrong = 0
        self._guess_incomplete = False

    def of(self, key: int | str) -> Sequence[str]:
        """The files of a sample, or the path itself; empty: none, or not known."""
        if isinstance(key, str):
            return (key,)
        if self._noted:
            self._learn()
        if self.knowledge.knows(key):
            return self.knowledge.paths(key)
        if self._source is None:
            return ()
        try:
            return tuple(dict.fromkeys(self._source(key)))
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
        self._noted.append((index, paths))
        if len(self._noted) >= SYNC_EVERY:
            self._learn()
        if self._watched >= IDLE_AFTER and not self._opened_any:
            self.watching = False

    def _learn(self) -> None:
        """Learn what was noted, and tell the others now and then."""
        noted, self._noted = self._noted, []
        self._unsent += sum(self.knowledge.learn(index, paths) for index, paths in noted)
        if self._unsent >= SYNC_EVERY:
            self.sync()

    def _confirms(self, index: int, paths: list[str]) -> bool:
        """Whether the guess named exactly what was opened; one that is mostly wrong is given up."""
        guess = () if self.knowledge.knows(index) else self.of(index)
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
        if self._noted:
            self._learn()
        self._unsent = 0
        if self._log is None:
            return
        delta, _ = self.knowledge.learned_since(self._sent_mark)
        if delta:
            self._log.append(delta)
        deltas, self._log_mark = self._log.read_since(self._log_mark)
        for other in deltas:
            self.knowledge.teach(other)
        self._sent_mark = self.knowledge.known

    @property
    def why_none(self) -> str | None:
        """Why no sample's files are known, nor will be; None: they are, or may be."""
        if self._source is not None or self.watching or self._opened_any:
            return None
        if not self._may_learn:
            return "off: no list of the data set names its files, and `learn` is off"
        return f"off: the first {self._watched} {NO_FILES}"

    @property
    def none_so_far(self) -> bool:
        """Whether samples were watched, and opened nothing."""
        return self._watched >= GUESS_TRIED and not self._opened_any

    def explain(self) -> str:
        """Where paths come from, in a few words."""
        where = "a list of the data set" if self._source is not None else "what was learned"
        return f"paths from {where}, {self.knowledge.known} samples learned"


SHARED_AFTER = 8  # a file that so many samples open is no sample's own
_SKETCH_BYTES = 1 << 22  # counters of opens by hash of the path: 4M files before they crowd
_UNKNOWN, _VOLATILE = -1, -2
_CHANGES_MAX = 3  # a sample whose files changed so often is not predicted
_NAME_BYTES_MAX = 4096
_FILES_MAX = 64  # of one sample
_EMPTY: tuple[str, ...] = ()


class LearnedFiles:
    """Files by sample index. Safe for concurrent users.

    Indices beyond `samples` are not kept, nor is what comes when the knowledge takes `budget_bytes`.
    """

    def __init__(self, samples: int, budget_bytes: int = 256 << 20) -> None:
        self._samples = samples
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._first = array("q", [_UNKNOWN]) * samples  # an index's first entry
        self._count = array("B", [0]) * samples
        self._changes = array("B", [0]) * samples
        self._log = array("q")  # indices in the order in which they were learned
        self._folder_of: dict[bytes, int] = {}
        self._folders: list[bytes] = []
        self._folder_bytes = 0
        self._entry_folder = array("I")
        self._entry_start = array("Q", [0])
        self._names = bytearray()
        self._sketch = bytearray(0)
        self._shared: set[str] = set()

    @property
    def nbytes(self) -> int:
        """About how much memory the knowledge takes."""
        return (
            8 * (len(self._first) + len(self._log) + len(self._entry_start))
            + 4 * len(self._entry_folder)
            + 2 * self._samples
            + len(self._names)
            + self._folder_bytes
            + len(self._sketch)
        )

    @property
    def known(self) -> int:
        """How many samples' files were learned."""
        return len(self._log)

    @property
    def full(self) -> bool:
        """Whether the budget is used up."""
        return self.nbytes >= self._budget_bytes

    def knows(self, index: int) -> bool:
        """Whether the files of sample `index` were learned (there may be none)."""
        return 0 <= index < self._samples and self._first[index] != _UNKNOWN

    def paths(self, index: int) -> tuple[str, ...]:
        """The files of a sample that are worth reading ahead; empty: none, or not known."""
        if not 0 <= index < self._samples:
            return _EMPTY
        with self._lock:
            first = self._first[index]
            if first < 0 or not self._count[index]:
                return _EMPTY
            paths = [os.fsdecode(self._path(first + i)) for i in range(self._count[index])]
            return tuple(path for path in paths if path not in self._shared)

    def learn(self, index: int, paths: Sequence[str]) -> bool:
        """Note what a sample opened.

        Returns:
            Whether that was news.
        """
        if not 0 <= index < self._samples or len(paths) > _FILES_MAX:
            return False
        with self._lock:
            return self._learn([os.fsencode(path) for path in paths], index)

    def _learn(self, raw: list[bytes], index: int) -> bool:
        first = self._first[index]
        if first == _VOLATILE:
            return False
        count = self._count[index]
        if first != _UNKNOWN:
            if len(raw) == count and all(self._path(first + i) == raw[i] for i in range(count)):
                return False
            self._changes[index] += 1
            if self._changes[index] >= _CHANGES_MAX:
                self._first[index] = _VOLATILE
                return True
        if self.full or max(map(len, raw), default=0) > _NAME_BYTES_MAX:
            return False
        for path in raw:
            self._note_open(path)
        self._first[index] = len(self._entry_folder)
        self._count[index] = len(raw)
        for path in raw:
            self._append(path)
        self._log.append(index)
        return True

    def _append(self, path: bytes) -> None:
        folder, slash, name = path.rpartition(b"/")
        folder += slash
        number = self._folder_of.get(folder)
        if number is None:
            number = self._folder_of[folder] = len(self._folders)
            self._folders.append(folder)
            self._folder_bytes += len(folder) + 150  # the objects around it
        self._entry_folder.append(number)
        self._names += name
        self._entry_start.append(len(self._names))

    def _path(self, entry: int) -> bytes:
        name = self._names[self._entry_start[entry] : self._entry_start[entry + 1]]
        return self._folders[self._entry_folder[entry]] + name

    def _note_open(self, path: bytes) -> None:
        """Count the samples that open a file, in a count-min sketch."""
        if not self._sketch:
            self._sketch = bytearray(_SKETCH_BYTES)
        value, sketch = hash(path), self._sketch
        one, other = value % _SKETCH_BYTES, (value >> 24) % _SKETCH_BYTES
        count = 1 + min(sketch[one], sketch[other])
        if count >= SHARED_AFTER and len(self._shared) < _SKETCH_BYTES >> 4:
            self._shared.add(os.fsdecode(path))
        for slot in (one, other):
            if sketch[slot] < 255:
                sketch[slot] += 1

    def learned_since(self, mark: int) -> tuple[bytes, int]:
        """What was learned after `mark`, for `teach` in another process.

        Returns:
            The delta, empty if there is no news, and the next mark.
        """
        with self._lock:
            news = [
                (index, [self._path(self._first[index] + i).decode("latin-1")
                         for i in range(self._count[index])])
                for index in dict.fromkeys(self._log[mark:])
                if self._first[index] >= 0
            ]  # fmt: skip
            mark = len(self._log)
        return (zlib.compress(json.dumps(news).encode(), 1) if news else b""), mark

    def teach(self, delta: bytes) -> int:
        """Take over what another process learned.

        Returns:
            How many samples were news.

        Raises:
            ValueError: the delta is damaged.
        """
        try:
            learned = json.loads(zlib.decompress(delta)) if delta else []
            samples = [(as_index(i), [p.encode("latin-1") for p in paths]) for i, paths in learned]
        except (zlib.error, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"a delta of learned paths is damaged: {error}") from error
        news = 0
        for index, raw in samples:
            if 0 <= index < self._samples and len(raw) <= _FILES_MAX:
                with self._lock:
                    news += self._learn(raw, index)
        return news

    def forget_lock(self) -> None:
        """After a fork: a thread that does not exist here may have held the lock."""
        self._lock = threading.Lock()


_MAGIC = b"hrLEARN1"
_HEADER = struct.Struct("<8sIIQ")  # magic, bytes, crc32, pid


class SharedLog:
    """Deltas by all processes that hold it. Safe for concurrent writers."""

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._fd = os.memfd_create("headrace-learned", os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)

    def append(self, delta: bytes) -> bool:
        """Hand a delta to the others; False: the log is full, or closed."""
        if self._fd < 0 or os.fstat(self._fd).st_size + len(delta) > self._limit_bytes:
            return False
        record = _HEADER.pack(_MAGIC, len(delta), zlib.crc32(delta), os.getpid()) + delta
        # One write with O_APPEND: the kernel puts concurrent records one after the other.
        return os.write(self._fd, record) == len(record)

    def read_since(self, mark: int) -> tuple[list[bytes], int]:
        """What other processes appended after `mark` (0: the beginning), and the next mark."""
        if self._fd < 0:
            return [], mark
        size = os.fstat(self._fd).st_size
        if size <= mark:
            return [], mark
        data = os.pread(self._fd, size - mark, mark)
        deltas: list[bytes] = []
        at = 0
        while (begin := data.find(_MAGIC, at)) >= 0 and begin + _HEADER.size <= len(data):
            _, length, crc, pid = _HEADER.unpack_from(data, begin)
            start = begin + _HEADER.size
            delta = data[start : start + length]
            if len(delta) == length and zlib.crc32(delta) == crc:
                at = start + length
                if pid != os.getpid():
                    deltas.append(delta)
            else:
                at = begin + 1  # cut short, or the magic by chance: look for the next
        # A record that is still being written is read next time; one that never will be, too.
        return deltas, mark + at if at or not data else mark

    def close(self) -> None:
        """Let go of the file; the others keep it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        from multiprocessing.reduction import DupFd

        return {"limit_bytes": self._limit_bytes, "fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._limit_bytes = state["limit_bytes"]
        self._fd = state["fd"].detach()
