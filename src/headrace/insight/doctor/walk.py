"""Walk: what lies in a folder, within a time: counted where it can be, estimated where it is too much.

Names are listed and nothing is opened; a file is looked at only if it is drawn. Folders are entered in
random order, so that those that were not reached are like those that were. Names that begin with a dot
are left out, symbolic links are followed, and a link back to a folder above itself is not entered
again: as `headrace.index` and torchvision's `ImageFolder` see a folder.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.store.sources.contents import format_of, is_companion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAWN_MAX: Final = 4096
"""Files that stand for the rest."""

_FOLDERS_MAX: Final = 1_000_000
"""Folders that wait to be entered; the rest are counted, and no more."""

_LOOK_EVERY: Final = 256
_DEPTH_MAX: Final = 64

_Folder = tuple[bytes, tuple[tuple[int, int], ...]]
"""A path below the root, and who stands above it."""


@dataclass(slots=True)
class Walk:
    """What was seen.

    Attributes:
        drawn: paths of files at random, each with the same chance.
        cut: whether the walk ended within one folder, of which nobody knows how long it goes on.
        tops: first-level folders with files in them.
        loose: files that lie in no folder.
        formats: how many files have each, by the ends of their names.
        companions: READMEs, checksums and the like, which are no samples; not among `files`.
        loops: links back to a folder above.
        unreadable: folders that could not be listed, and why the first one.
        odd: what is no regular file: sockets, devices, links to nothing; and the first one.
    """

    files: int = 0
    folders: int = 0
    entered: int = 0
    drawn: list[bytes] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    complete: bool = False
    cut: bool = False
    pending: int = 0
    tops: set[bytes] = field(default_factory=set)
    loose: int = 0
    hidden: int = 0
    companions: int = 0
    loops: int = 0
    unreadable: int = 0
    first_unreadable: str = ""
    odd: int = 0
    first_odd: str = ""

    @property
    def files_estimated(self) -> float:
        """Files that there are: those that were counted, and as many in each folder that was not entered."""
        if self.complete or not self.entered:
            return float(self.files)
        return self.files * (1.0 + self.pending / self.entered)

    def note_file(self, path: bytes, dice: random.Random) -> None:
        """Count a file; of all, `DRAWN_MAX` are kept, each with the same chance."""
        self.formats[format_of(os.fsdecode(os.path.basename(path)))] += 1
        self.files += 1
        if len(self.drawn) < DRAWN_MAX:
            self.drawn.append(path)
        elif (at := int(dice.random() * self.files)) < DRAWN_MAX:
            self.drawn[at] = path


def walk(
    root: str | os.PathLike[str],
    seconds: float,
    *,
    stop: Callable[[], bool] = lambda: False,
    seed: int = 0,
) -> Walk:
    """Look around in a folder for so many seconds, apart from one listing that the system is slow with.

    Raises:
        OSError: the folder itself cannot be listed.
    """
    walk = Walk()
    until = time.monotonic() + seconds
    dice = random.Random(seed)  # noqa: S311 - a draw, no secret
    pending: list[_Folder] = [(b"", ())]
    while pending and not walk.cut and time.monotonic() < until and not stop():
        at = dice.randrange(len(pending))
        pending[at], pending[-1] = pending[-1], pending[at]
        folder, ancestors = pending.pop()
        path = os.path.join(os.fsencode(root), folder)
        try:
            status = os.stat(path)
            below = (*ancestors, (status.st_dev, status.st_ino))
            if below[-1] in ancestors or len(ancestors) >= _DEPTH_MAX:
                walk.loops += 1
                continue
            with os.scandir(path) as entries:
                walk.entered += 1
                _list(walk, entries, (folder, below), pending, dice=dice, until=until)
        except OSError as e:
            if not folder:
                raise
            walk.unreadable += 1
            walk.first_unreadable = walk.first_unreadable or f"{os.fsdecode(folder)}: {e.strerror}"
    walk.pending += len(pending)
    walk.complete = not walk.pending and not walk.cut
    return walk


def _list(
    walk: Walk,
    entries: Iterator[os.DirEntry[bytes]],
    place: _Folder,
    pending: list[_Folder],
    *,
    dice: random.Random,
    until: float,
) -> None:
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
            walk.hidden += 1
        elif is_folder:
            walk.folders += 1
            if len(pending) < _FOLDERS_MAX:
                pending.append((path, below))
            else:
                walk.pending += 1
        elif is_file and is_companion(entry.name):
            walk.companions += 1
        elif is_file:
            walk.note_file(path, dice)
        else:
            walk.odd += 1
            walk.first_odd = walk.first_odd or os.fsdecode(path)
    if walk.files > before and folder:
        walk.tops.add(folder.split(b"/", 1)[0])
    elif walk.files > before:
        walk.loose += walk.files - before
