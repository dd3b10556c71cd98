"""Survey: what the data set is, and samples of it at random, within a few seconds and without opening most.

Whatever headrace can open is told apart as it tells it apart: a store, packed, indexed or at a URL; files;
shards. What it cannot open, or not in the time, is looked at as bytes: files, objects, or blocks of large ones.

A folder's names are listed and nothing is opened; a file is looked at only if it is drawn. What is too much is
estimated: folders are entered in random order, so that those that were not reached are like those that were.
Names that begin with a dot are left out, symbolic links are followed, and a link back to a folder above itself
is not entered again: as `headrace.index` and torchvision's `ImageFolder` see a folder.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.text import printable
from headrace.errors import HeadraceError, SourceError, StoreNotFound
from headrace.insight.doctor.findings import DataSet
from headrace.insight.doctor.samples import (
    POOL_MAX,
    Piece,
    SamplePool,
    ShardFiles,
    quantiles,
    survey_shards,
)
from headrace.io.objects.location import (
    HTTP,
    has_magic,
    is_url,
    literal_folder,
    matches,
    scheme_of,
    shown,
)
from headrace.store.directory import columns_of
from headrace.store.manifest import VolumeEntry
from headrace.store.opening import store_of_scan
from headrace.store.sources.contents import (
    SHARD_KINDS,
    FolderKind,
    LibraryFolder,
    check_splits,
    format_of,
    is_companion,
    judge,
    library_folder,
    no_labels,
)
from headrace.store.sources.detect import LIBRARIES, detect_file, matches_of
from headrace.store.sources.scan import Scan
from headrace.store.summary import token_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.io.objects.engine import ObjectEngine
    from headrace.io.objects.reading import RemoteObject
    from headrace.store import Store

DRAWN_MAX: Final = 4096  # files that stand for the rest

_FOLDERS_MAX: Final = 1_000_000
"""Folders that wait to be entered; the rest are counted, and no more."""

_LOOK_EVERY: Final = 256
_DEPTH_MAX: Final = 64

_UNREADABLE: Final = "folders cannot be listed, the first: {}"
_ODD: Final = "names are no regular files (links to nothing, sockets, ...), the first: {}"
_LOOPS: Final = "links lead back to a folder above; they are not followed"
_HIDDEN: Final = "names begin with a dot and are left out"
_BESIDE: Final = "left out beside the data (READMEs, checksums, ...), the first: {}"

_Folder = tuple[bytes, tuple[tuple[int, int], ...]]
"""A path below the root, and who stands above it."""


@dataclass(slots=True)
class Walk:
    """What was seen."""

    files: int = 0
    folders: int = 0
    entered: int = 0
    drawn: list[bytes] = field(default_factory=list)
    """Paths of files at random, each with the same chance."""
    formats: Counter[str] = field(default_factory=Counter)
    """How many files have each, by the ends of their names."""
    complete: bool = False
    cut: bool = False
    """Whether the walk ended within one folder, of which nobody knows how long it goes on."""
    pending: int = 0
    tops: set[bytes] = field(default_factory=set)  # first-level folders with files in them
    loose: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Files that lie in no folder, by format: how many, and the first name."""
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    """What was passed over, by what is said of it: how many, and the first name."""

    @property
    def files_estimated(self) -> float:
        """Files that there are: those that were counted, and as many in each folder that was not entered."""
        if self.complete or not self.entered:
            return float(self.files)
        return self.files * (1.0 + self.pending / self.entered)

    def leave_out(self, what: str, name: str = "") -> None:
        """Count what is passed over."""
        count, first = self.left_out.get(what, (0, name))
        self.left_out[what] = count + 1, first

    def note_file(self, path: bytes, dice: random.Random) -> None:
        """Count a file; of all, `DRAWN_MAX` are kept, each with the same chance."""
        name = format_of(os.fsdecode(os.path.basename(path)))
        self.formats[name] += 1
        self.files += 1
        if b"/" not in path:
            count, first = self.loose.get(name, (0, path))
            self.loose[name] = count + 1, min(first, path)
        if len(self.drawn) < DRAWN_MAX:
            self.drawn.append(path)
        elif (at := int(dice.random() * self.files)) < DRAWN_MAX:
            self.drawn[at] = path


def walk(
    root: str | os.PathLike[str], seconds: float, *, stop: _Stop = lambda: False, seed: int = 0,
    extensions: Sequence[str] = (),
) -> Walk:  # fmt: skip
    """Look around in a folder for so many seconds, apart from one listing that the system is slow with.

    `stop` ends it earlier. Only files with one of the `extensions` count, where any are given, in any case
    of letters.

    Raises OSError if the folder itself cannot be listed.
    """
    walk = Walk()
    until = time.monotonic() + seconds
    dice = random.Random(seed)  # noqa: S311 - a draw, no secret
    pending: list[_Folder] = [(b"", ())]
    endings = tuple(os.fsencode(each.lower()) for each in extensions)
    while pending and not walk.cut and time.monotonic() < until and not stop():
        at = dice.randrange(len(pending))
        pending[at], pending[-1] = pending[-1], pending[at]
        folder, ancestors = pending.pop()
        path = os.path.join(os.fsencode(root), folder)
        try:
            status = os.stat(path)
            below = (*ancestors, (status.st_dev, status.st_ino))
            if below[-1] in ancestors or len(ancestors) >= _DEPTH_MAX:
                walk.leave_out(_LOOPS)
                continue
            with os.scandir(path) as entries:
                walk.entered += 1
                _list(walk, entries, (folder, below), pending, endings, dice=dice, until=until)
        except OSError as e:
            if not folder:
                raise
            walk.leave_out(_UNREADABLE, f"{os.fsdecode(folder)}: {e.strerror}")
    walk.pending += len(pending)
    walk.complete = not walk.pending and not walk.cut
    return walk


def _list(
    walk: Walk, entries: Iterator[os.DirEntry[bytes]], place: _Folder, pending: list[_Folder],
    endings: tuple[bytes, ...], *, dice: random.Random, until: float,
) -> None:  # fmt: skip
    folder, below = place
    before = walk.files
    for seen, entry in enumerate(entries, 1):
        if seen % _LOOK_EVERY == 0 and time.monotonic() > until:
            walk.cut = True
            break
        path = os.path.join(folder, entry.name)
        is_folder = is_file = False
        with suppress(OSError):  # a link that nobody may follow
            is_folder = entry.is_dir()
            is_file = not is_folder and entry.is_file()
        if entry.name.startswith(b"."):
            walk.leave_out(_HIDDEN)
        elif is_folder:
            walk.folders += 1
            if len(pending) < _FOLDERS_MAX:
                pending.append((path, below))
            else:
                walk.pending += 1
        elif is_file:
            name = entry.name
            if name.lower().endswith(endings) if endings else not is_companion(name):
                walk.note_file(path, dice)
            elif not endings:
                walk.leave_out(_BESIDE, os.fsdecode(path))
        else:
            walk.leave_out(_ODD, os.fsdecode(path))
    if folder and walk.files > before:
        walk.tops.add(folder.split(b"/", 1)[0])


_STORE_SAMPLES: Final = 2000
_NAMES: Final = 16
_OBJECTS_MAX: Final = 1000
_MAJORITY: Final = 0.5
_NO_OBJECTS: Final = frozenset({*HTTP, "nvme+tcp", "headrace"})  # where nothing can be listed
_Stop = Callable[[], bool]  # asked now and then; True ends the survey


def survey(
    target: str | os.PathLike[str], seconds: float, *, stop: _Stop = lambda: False,
    storage_options: Mapping[str, Any] | None = None, extensions: Sequence[str] = (),
) -> tuple[DataSet, SamplePool]:  # fmt: skip
    """Find out what is at a path, a pattern or a URL, in about so many seconds.

    Of a folder, only files with one of the `extensions` count, where any are given. The pool holds an open
    store where its samples are no files.

    Raises StoreNotFound if there is nothing, CorruptStore if it is a damaged store, SourceError if it cannot
    be read, or there are no samples, VolumeError if an object cannot be read, and ValueError if there are
    extensions, and it is no folder.
    """
    text = os.fsdecode(target)
    if is_url(text):
        if extensions:
            raise ValueError(f"{shown(text)} is a URL: --ext chooses among the files of a folder")
        return _at_url(text, seconds, stop, storage_options)
    path = os.path.abspath(text.removeprefix("file://"))
    is_store = os.path.isfile(os.path.join(path, "store.json"))
    try:
        if os.path.isdir(path) and not is_store:
            return _folder(path, seconds, stop, extensions)
        if extensions:
            raise ValueError(f"{printable(path)} is no folder of files: --ext chooses among those")
        if is_store:
            return _store(path, storage_options)
        if os.path.isfile(path):
            return _files([path], path, seconds, stop)
    except OSError as e:
        if isinstance(e, HeadraceError):
            raise
        step = "Check its permissions, and those of the folders above it."
        raise _refused(path, f" cannot be looked at: {e.strerror or e}", step) from e
    if named := matches_of(path):
        return _files([m for m in named if os.path.isfile(m)] or named[:1], path, seconds, stop)
    raise _nothing_at(path)


def _nothing_at(path: str) -> SourceError | StoreNotFound:
    if os.path.lexists(path):
        what = "a link to nothing" if os.path.islink(path) else "neither a file nor a folder"
        return _refused(path, f" is {what}", "Give a folder, a file or a store.")
    above = os.path.dirname(path)
    while above != "/" and not os.path.isdir(above):
        above = os.path.dirname(above)
    nearest = f"the nearest folder that exists is {printable(above)}"
    what = f"{printable(path)}: there is no such file, folder or store ({nearest})."
    return StoreNotFound(what, path=path, next_step="Check the path.")


def _refused(path: str, problem: str, next_step: str) -> SourceError:
    return SourceError(f"{printable(path)}{problem}.", path=path, next_step=next_step)


# -- stores ------------------------------------------------------------------------------------------


def _store(where: str, storage_options: Mapping[str, Any] | None) -> tuple[DataSet, SamplePool]:
    from headrace import api

    with ExitStack() as closing:
        store = closing.enter_context(api.open(where, storage_options=storage_options))
        data, pool = _draw_samples(store)
        if pool.store is not None:
            closing.pop_all()
    return data, pool


def _draw_samples(store: Store) -> tuple[DataSet, SamplePool]:
    count = len(store)
    if not count:
        raise _refused(shown(store.path), ": no samples", "Append some.")
    drawn = np.unique(np.random.default_rng(5).integers(0, count, _STORE_SAMPLES))
    pieces: list[Piece] = []
    sizes: Counter[int] = Counter()
    for segment in store.segments:
        local = drawn[(drawn >= segment.base) & (drawn < segment.base + segment.directory.samples)]
        local -= segment.base
        if not len(local):
            continue
        extents = segment.directory.extents_of(local)
        names = dict(zip(local.tolist(), segment.directory.names(local), strict=True))
        columns = (extents[key].tolist() for key in ("sample", "volume", "offset", "length"))
        for sample, volume, offset, length in zip(*columns, strict=True):
            sizes[segment.base + sample] += length
            path = segment.volumes.paths[volume]
            if segment.entry.volumes[volume].kind == "tree":
                path = os.path.join(path, os.fsdecode(names[sample]))
            if length:
                pieces.append(Piece(path, offset, length))
    lengths = np.array(list(sizes.values()), np.int64)
    entries = [volume for segment in store.segments for volume in segment.entry.volumes]
    remote = is_url(store.path) or any(v.kind not in ("packed", "file", "tree") for v in entries)
    first = store.segments[0].directory
    some = first.names(np.arange(min(first.samples, _NAMES), dtype=np.int64))
    formats = {format_of(os.fsdecode(name)) for name in some}
    format_ = formats.pop() if len(formats) == 1 else "mixed"
    data = DataSet(
        path=shown(store.path), kind="object" if remote else "store",
        format="tokens" if token_count(store, 0) else format_, samples=count, exact=True,
        files=len(entries), nbytes=float(lengths.mean()) * count, **quantiles(lengths),
        classes=len(store.classes or ()),
    )  # fmt: skip
    random.Random(1).shuffle(pieces)  # noqa: S311 - a draw, no secret
    whole = all(v.kind == "tree" for v in entries)
    return data, SamplePool(pieces=pieces, whole_files=whole, store=store if remote else None)


def _at_url(
    url: str, seconds: float, stop: _Stop, storage_options: Mapping[str, Any] | None
) -> tuple[DataSet, SamplePool]:
    """A store, or what else headrace opens there; or plain objects."""
    from headrace.io.objects.engine import ObjectEngine

    try:
        return _store(url, storage_options)
    except (StoreNotFound, SourceError) as e:
        if scheme_of(url) in _NO_OBJECTS:
            raise
        engine = ObjectEngine(storage_options)
        try:
            return _objects(url, engine, time.monotonic() + 0.6 * seconds, stop)
        except BaseException as other:
            engine.close()
            if isinstance(other, HeadraceError):
                raise e from None
            raise


def _objects(
    url: str, engine: ObjectEngine, until: float, stop: Callable[[], bool]
) -> tuple[DataSet, SamplePool]:
    """List what lies below a URL, or fits a pattern, and draw some of it."""
    from headrace.io.objects.listing import list_objects

    dice = random.Random(6)  # noqa: S311 - a draw, no secret
    drawn: list[RemoteObject] = []
    count = nbytes = largest = 0
    complete = True
    formats: Counter[str] = Counter()
    accept = matches(url) if has_magic(url) else None
    for each in list_objects(url if accept is None else literal_folder(url), engine.client_options):
        if accept is not None and not accept.match(each.url):
            continue
        count += 1
        nbytes += each.size
        largest = max(largest, each.size)
        formats[format_of(each.url)] += 1
        if len(drawn) < _OBJECTS_MAX:
            drawn.append(each)
        elif (at := dice.randrange(count)) < _OBJECTS_MAX:
            drawn[at] = each
        if time.monotonic() > until or stop():
            complete = False
            break
    full = [each for each in drawn if each.size]
    if not full:
        raise _refused(
            shown(url), ": there is no store and no object with anything in it",
            "Check the URL, and the credentials: --storage-option, or the environment.",
        )  # fmt: skip
    name, most = formats.most_common(1)[0]
    data = DataSet(
        path=shown(url), kind="object", format=name if most > _MAJORITY * count else "mixed",
        samples=count, exact=complete, at_least=not complete, files=count, nbytes=float(nbytes),
        **{**quantiles(np.array([each.size for each in drawn], np.int64)), "size_max": float(largest)},
    )  # fmt: skip
    engine.register(full)
    engine.looked_at.update(each.url for each in full)
    sizes = np.array([each.size for each in full], np.uint64)
    numbers = np.arange(len(full), dtype=np.uint32)
    columns = columns_of([b"%06d" % i for i in range(len(full))], numbers, 0 * sizes, sizes)
    volumes = tuple(VolumeEntry("object", o.url, o.size, o.modified_ns, etag=o.etag) for o in full)
    scan = Scan(columns, volumes, {"kind": "objects", "url": shown(url)}, objects=engine)
    pieces = [Piece(each.url, 0, each.size) for each in full]
    return data, SamplePool(pieces=pieces, store=store_of_scan(url, scan))


# -- folders -----------------------------------------------------------------------------------------


def _folder(
    path: str, seconds: float, stop: _Stop, extensions: Sequence[str] = ()
) -> tuple[DataSet, SamplePool]:
    if not extensions and (library := library_folder(path)) is not None:
        return _library(library, path, seconds, stop)
    seen = walk(path, 0.6 * seconds, stop=stop, extensions=extensions)
    if not seen.files:
        raise _no_files(path, seen, extensions)
    notes = _notes(seen)
    verdict = _judged(path, seen, notes)
    drawn = [name for each in seen.drawn if verdict.takes(format_of(name := os.fsdecode(each)))]
    if not extensions:
        _check_one_split(path, verdict, drawn)
    # Of what there is, those that are samples or shards.
    counted = sum(count for name, count in seen.formats.items() if verdict.takes(name))
    files = seen.files_estimated * counted / seen.files
    if verdict.kind in SHARD_KINDS:
        names = [os.path.join(path, name) for name in drawn]
        return _shards(
            names, seconds, stop, path=path, kind=verdict.kind, files=round(files), notes=tuple(notes),
            files_estimated=not seen.complete, exact=seen.complete and round(files) == len(names),
        )  # fmt: skip
    if counted < seen.files:
        others = (os.fsdecode(name) for name in seen.drawn)
        first = next((name for name in others if not verdict.takes(format_of(name))), "")
        many = f"{seen.files - counted:,} of {seen.files:,} files are no {verdict.family}s"
        notes.append(f"{many} and are left out" + (f", as {printable(first)}" if first else ""))
    kind, most = seen.formats.most_common(1)[0]
    kinds = [(name, n / counted) for name, n in seen.formats.most_common() if verdict.takes(name)]
    random.Random(1).shuffle(drawn)  # noqa: S311 - a draw, no secret
    names = [os.path.join(path, name) for name in drawn]
    sized, sizes = _sizes(names[:POOL_MAX], 0.25 * seconds, stop)
    if not sized:
        what = f": none of {len(names):,} files that were tried can be looked at"
        raise _refused(path, what, "Check their permissions.")
    if empty := int((sizes == 0).sum()):
        first = os.path.relpath(sized[int((sizes == 0).argmax())], path)
        looked = f"empty files: {empty} of {len(sizes)} that were looked at"
        notes.append(f"{looked}, the first: {printable(first)}")
    if empty == len(sizes):
        what = f": all of {len(sizes):,} files that were looked at are empty"
        raise _refused(path, what, "Check that the data were copied.")
    loose = [each for name, each in seen.loose.items() if verdict.takes(name)]
    if loose and seen.tops:
        notes += no_labels(sum(count for count, _ in loose), min(first for _, first in loose))
    data = DataSet(
        path=path, kind="folder", format=kind if most > _MAJORITY * seen.files else "mixed",
        samples=round(files), exact=seen.complete, at_least=seen.cut,
        files=round(seen.files_estimated), files_estimated=not seen.complete, folders=seen.folders,
        nbytes=_total(sizes, files), **quantiles(sizes),
        classes=len(seen.tops) if not loose else 0, notes=tuple(notes),
        formats=tuple(kinds) if len(kinds) > 1 else (),
    )  # fmt: skip
    unopened = names[POOL_MAX:]
    return data, SamplePool(pieces=_full(sized, sizes), whole_files=True, unopened=unopened)


def _check_one_split(path: str, verdict: FolderKind, names: Sequence[str]) -> None:
    """What a loader refuses is no data set to advise on."""
    try:
        check_splits(path, verdict, map(os.fsencode, names))
    except SourceError as e:
        ending = names[0].rpartition(".")[2]
        one = (e.next_step or "").partition("; or take all")[0]
        raise SourceError(e.message, next_step=f"{one}; or look at all: --ext {ending}.") from None


def _judged(path: str, seen: Walk, notes: list[str]) -> FolderKind:
    try:
        return judge(path, seen.formats)
    except SourceError as e:
        notes.append(f"{e.message.removeprefix(path).lstrip(': ')} Each file is taken for one here")
        return FolderKind("files")


def _no_files(path: str, seen: Walk, extensions: Sequence[str]) -> SourceError:
    ends = f" that end in {' or '.join(extensions)}" if extensions else ""
    what = "; ".join([f"no files{ends}", *_notes(seen, hidden=True)])
    return _refused(path, f": {what}", "Give the folder with the samples: headrace doctor FOLDER.")


def _library(
    library: LibraryFolder, path: str, seconds: float, stop: _Stop
) -> tuple[DataSet, SamplePool]:
    if library.kind == "folder":
        return _folder(library.paths[0], seconds, stop)
    paths, kind = library.paths, library.kind
    if kind not in LIBRARIES:
        return _shards(paths, seconds, stop, path=path, kind=kind, files=len(paths), exact=True)
    seen = walk(path, 0.2 * seconds, stop=stop)
    names = [os.path.join(path, os.fsdecode(name)) for name in seen.drawn]
    return _shards(
        names, seconds, stop, path=path, kind=kind, files=round(seen.files_estimated),
        files_estimated=not seen.complete, exact=seen.complete and seen.files == len(names),
    )  # fmt: skip


def _notes(seen: Walk, *, hidden: bool = False) -> list[str]:
    return [
        f"{count} {what.format(printable(first))}"
        for what, (count, first) in seen.left_out.items()
        if hidden or what != _HIDDEN
    ]


# -- files -------------------------------------------------------------------------------------------


def _files(paths: list[str], path: str, seconds: float, stop: _Stop) -> tuple[DataSet, SamplePool]:
    try:
        kind = detect_file(paths[0])
    except SourceError:
        kind = format_of(paths[0])
        if len(paths) > 1 or kind != "bytes":
            sized, sizes = _sizes(paths, seconds, stop)
            if sizes.any():
                data = DataSet(
                    path=path, kind="folder", format=kind, samples=len(paths), exact=True,
                    files=len(paths), nbytes=_total(sizes, len(paths)), **quantiles(sizes),
                )  # fmt: skip
                return data, SamplePool(pieces=_full(sized, sizes), whole_files=True)
    return _shards(paths, seconds, stop, path=path, kind=kind, files=len(paths), exact=True)


def _shards(
    names: list[str], seconds: float, stop: _Stop, **more: Any
) -> tuple[DataSet, SamplePool]:
    sized, sizes = _sizes(names, 0.2 * seconds, stop)
    more["exact"] &= len(sized) == len(names)
    return survey_shards(ShardFiles(names=sized, sizes=sizes, **more), 0.5 * seconds, stop)


def _sizes(
    names: Sequence[str], seconds: float, stop: _Stop
) -> tuple[list[str], NDArray[np.int64]]:
    until = time.monotonic() + seconds
    kept: list[str] = []
    sizes: list[int] = []
    for name in names:
        if kept and (time.monotonic() > until or stop()):
            break
        try:
            sizes.append(os.stat(name).st_size)
        except OSError:
            continue
        kept.append(name)
    return kept, np.array(sizes, np.int64)


def _full(names: list[str], sizes: NDArray[np.int64]) -> list[Piece]:
    """Files with something in them, each as one piece."""
    return [Piece(n, 0, size) for n, size in zip(names, sizes.tolist(), strict=True) if size]


def _total(sizes: NDArray[np.int64], samples: float) -> float:
    return float(sizes.mean()) * samples if len(sizes) < samples else float(sizes.sum())
