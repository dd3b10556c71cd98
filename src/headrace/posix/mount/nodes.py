"""Nodes: what the kernel numbers, worked out from the number alone.

    1                       the root
    2                       the door, a folder that no listing shows (`.headrace`)
    16 + sample * p + part  a file; p parts in the store
    bit 62, depth, sample   a folder: the first `depth` components of the name of the first sample in it

Nothing is remembered of what the kernel looked up, and nothing has to be forgotten: a mount of a hundred
million files takes no more memory than one of ten.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from headrace.posix.mount.protocol import ROOT, Attributes

if TYPE_CHECKING:
    from headrace.store import Store
    from headrace.store.folders import Entry, FolderTree

__all__ = ["DOOR", "DOOR_NAME", "File", "Nodes"]

DOOR = 2
DOOR_NAME = b".headrace"
"""Holds every sample by its index; for those whose names cannot be paths."""

_FIRST_FILE = 16
_FOLDER_BIT = 1 << 62
_DEPTH_SHIFT = 44
_SAMPLE_MASK = (1 << _DEPTH_SHIFT) - 1
_FOLDERS_KEPT = 4096

_FOLDER_MODE = stat.S_IFDIR | 0o555
_FILE_MODE = stat.S_IFREG | 0o444


class File(NamedTuple):
    """What a file's number says."""

    sample: int
    part: int


class Nodes:
    """Numbers, paths and attributes.

    Args:
        store: the store.
        tree: its names as folders.
        owner: user and group of all files.
        mtime_ns: time of all files.
    """

    def __init__(
        self, store: Store, tree: FolderTree, owner: tuple[int, int], mtime_ns: int
    ) -> None:
        self._samples = len(store)
        self._width = len(store.parts)
        self._tree = tree
        self._owner = owner
        self._mtime_ns = mtime_ns
        # A few folders at a time: each look-up starts from one.
        self.folder_path = lru_cache(_FOLDERS_KEPT)(self._folder_path)

    def number(self, folder: bytes, entry: Entry) -> int:
        """The number of an entry of a folder."""
        if not entry.is_folder:
            return _FIRST_FILE + entry.sample * self._width + entry.part
        depth = folder.count(b"/") + 2 if folder else 1
        return _FOLDER_BIT | depth << _DEPTH_SHIFT | entry.sample

    def is_folder(self, node: int) -> bool:
        """Whether a number is a folder's."""
        return node < _FIRST_FILE or bool(node & _FOLDER_BIT)

    def file(self, node: int) -> File:
        """The file of a number.

        Raises:
            OSError: it is no file's (EISDIR), or nobody's (ESTALE).
        """
        if self.is_folder(node):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        found = File(*divmod(node - _FIRST_FILE, self._width))
        if found.sample >= self._samples:
            raise _stale()
        return found

    def _folder_path(self, node: int) -> bytes:
        """The path of the folder of a number, b"" for the root.

        Raises:
            OSError: it is no folder's (ENOTDIR), or nobody's (ESTALE).
        """
        if node == ROOT:
            return b""
        if not node & _FOLDER_BIT:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        sample, depth = node & _SAMPLE_MASK, (node ^ _FOLDER_BIT) >> _DEPTH_SHIFT
        if sample >= self._samples:
            raise _stale()
        return b"/".join(self._tree.name_of(sample).split(b"/")[:depth])

    def attributes(self, node: int, size: int) -> bytes:
        """Of a file of `size` bytes, or a folder."""
        mode = _FOLDER_MODE if self.is_folder(node) else _FILE_MODE
        return Attributes(node, size, mode, self._mtime_ns, *self._owner).pack()


def _stale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))
