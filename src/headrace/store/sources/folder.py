"""A folder of files as a source: one file, one sample, as torchvision's ImageFolder sees it.

If every file lies below a first-level sub-folder, the sorted sub-folders are the classes and label their
files; otherwise there are no labels, and where there are sub-folders, a note names the first file that lies
in none. Names are the paths below the folder, as bytes, in bytewise order. Files and folders whose name
begins with a dot are left out (but for `dot_files`), and so are files that lie beside samples and are none
(`contents`). Symbolic links are followed; a link back to a folder above itself is not entered again, which
loses nothing.
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headrace.store.directory import columns_of
from headrace.store.manifest import VolumeEntry
from headrace.store.sources.contents import labels_of, sort_files
from headrace.store.sources.scan import (
    Problem,
    Scan,
    SourceOptions,
    no_samples,
    raise_problems,
)

_FOLDERS_PER_TASK = 16
"""Folders scanned by one task: enough to make the hand-over cheap beside the system calls."""

_FEW = 64  # so many files of arrays may be a data set's rows; more are samples

Ancestors = tuple[tuple[int, int], ...]


class Shards(NamedTuple):
    """Files with many samples each that a folder holds, by path, and what was left out."""

    kind: str
    paths: list[str]
    notes: list[str]


@dataclass(slots=True)
class _Listing:
    """What some folders contain: (name below the root, size, mtime) of files."""

    files: list[tuple[bytes, int, int]] = field(default_factory=list)
    folders: list[tuple[bytes, Ancestors]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    modes: set[tuple[int, int]] = field(default_factory=set)


def scan_folder(
    path: str | os.PathLike[str], options: SourceOptions | None = None
) -> Scan | Shards:
    """Lists a folder, and decides what its files are.

    Raises SourceError if it has no samples, something in it cannot be one, or what they are is not to be told.
    """
    options = options or SourceOptions()
    root = os.path.abspath(os.fspath(path))
    listing = _list_tree(os.fsencode(root), options)
    if options.on_error == "raise":
        raise_problems(root, listing.problems)
    if not listing.files:
        raise no_samples(root, f" that end in {options.extensions}" if options.extensions else "")
    files = sorted(listing.files)
    verdict, left, notes = sort_files(root, [name for name, _, _ in files], options.format)
    if left:
        files = [file for file in files if file[0] not in left]
    if verdict.kind != "files":
        return Shards(verdict.kind, [os.path.join(root, os.fsdecode(f[0])) for f in files], notes)
    names = [name for name, _, _ in files]
    unsaid = options.format is None and not options.extensions and len(names) <= _FEW
    if unsaid and all(name.lower().endswith(b".npy") and b"/" not in name for name in names):
        from headrace.store.sources.npy import check_not_rows

        check_not_rows(root, names)
    labels, classes = labels_of(names, notes)
    n = len(files)
    zeros = np.zeros(n, np.uint8)
    columns = columns_of(
        names, zeros, zeros, np.fromiter((f[1] for f in files), np.uint64, n),
        mtime=np.fromiter((f[2] for f in files), np.int64, n),
        labels=labels,
        class_names=classes,
    )  # fmt: skip
    source = {"kind": "folder", "path": root, **options.to_json()}
    return Scan(
        columns, (VolumeEntry("tree", root),), source, listing.problems, notes, modes=listing.modes
    )


def _list_tree(root: bytes, options: SourceOptions) -> _Listing:
    """Lists the whole tree with threads: tasks give back sub-folders, which become tasks."""
    total = _Listing()
    pending: list[tuple[bytes, Ancestors]] = [(b"", ())]
    with ThreadPoolExecutor(options.workers, "headrace-scan") as pool:
        running: set[Future[_Listing]] = set()
        while pending or running:
            while pending:
                batch, pending = pending[:_FOLDERS_PER_TASK], pending[_FOLDERS_PER_TASK:]
                running.add(pool.submit(_list_folders, root, batch, options))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                listing = future.result()
                total.files += listing.files
                total.problems += listing.problems
                total.modes |= listing.modes
                pending += listing.folders
    total.problems.sort(key=lambda p: p.path)
    return total


def _list_folders(
    root: bytes, folders: list[tuple[bytes, Ancestors]], options: SourceOptions
) -> _Listing:
    listing = _Listing()
    endings = tuple(os.fsencode(e.lower()) for e in options.extensions or ())
    for folder, ancestors in folders:
        path = os.path.join(root, folder) if folder else root
        try:
            status = os.stat(path)
            below = (*ancestors, (status.st_dev, status.st_ino))
            if below[-1] in ancestors:
                continue
            listing.modes.add((status.st_mode, status.st_gid))
            with os.scandir(path) as entries:
                for entry in entries:
                    if options.dot_files or not entry.name.startswith(b"."):
                        _list_entry(entry, (folder, below), endings, listing)
        except OSError as e:
            listing.problems.append(Problem(os.fsdecode(path), e.strerror or str(e)))
    return listing


def _list_entry(
    entry: os.DirEntry[bytes],
    place: tuple[bytes, Ancestors],
    endings: tuple[bytes, ...],
    listing: _Listing,
) -> None:
    folder, below = place
    name = folder + b"/" + entry.name if folder else entry.name
    try:
        if entry.is_dir():
            listing.folders.append((name, below))
            return
        if endings and not entry.name.lower().endswith(endings):
            return
        status = entry.stat()
        reason = _obstacle(entry, status)
    except OSError as e:
        reason = f"{e.strerror}{' (a dangling link)' if entry.is_symlink() else ''}"
    if reason:
        listing.problems.append(Problem(os.fsdecode(entry.path), reason))
    else:
        listing.files.append((name, status.st_size, status.st_mtime_ns))
        listing.modes.add((status.st_mode, status.st_gid))


def _obstacle(entry: os.DirEntry[bytes], status: os.stat_result) -> str:
    """Why a file is no sample, or empty."""
    if not stat.S_ISREG(status.st_mode):
        kind = stat.filemode(status.st_mode)[0]
        what = {"p": "a FIFO", "s": "a socket", "c": "a device", "b": "a device"}.get(kind, kind)
        return f"{what}, not a regular file"
    return "" if os.access(entry.path, os.R_OK) else "not readable for this user"
