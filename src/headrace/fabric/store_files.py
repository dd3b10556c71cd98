"""The files of a packed store's folder, as what exports or images it needs them: names, paths, bytes.

Of `store.json` only the names are read here; whoever opens the store checks the rest.
"""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import CorruptStore, SourceError, StoreNotFound, VolumeError

if TYPE_CHECKING:
    import os

__all__ = ["MANIFEST", "StoreFiles", "files_of"]

MANIFEST = "store.json"
_MANIFEST_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """What a store's folder holds.

    Attributes:
        folder: where.
        manifest: the bytes of `store.json`.
        sizes: bytes of every other file by name: directories before volumes.
    """

    folder: Path
    manifest: bytes
    sizes: dict[str, int]

    def path(self, name: str) -> Path:
        """Where a file lies."""
        return self.folder / name


def files_of(folder: str | os.PathLike[str]) -> StoreFiles:
    """The files of a packed store.

    Raises:
        StoreNotFound: there is no store.
        CorruptStore: its manifest cannot be read, or a file is missing.
        SourceError: samples lie outside of the folder.
        VolumeError: the system refuses to read it.
    """
    place = Path(folder)
    manifest = _read(place / MANIFEST)
    directories: list[str] = []
    volumes: list[str] = []
    try:
        for segment in json.loads(manifest)["segments"]:
            directories.append(_plain(segment["directory"]))
            for volume in segment["volumes"]:
                if volume["kind"] != "packed":
                    raise SourceError(
                        f"{place}: its samples lie in {volume['path']}, expected a packed store.",
                        path=str(place),
                        next_step="Pack it: headrace pack SOURCE STORE.",
                    )
                volumes.append(_plain(volume["path"]))
    except (ValueError, TypeError, LookupError, RecursionError) as e:
        raise CorruptStore(
            f"{place / MANIFEST}: the manifest cannot be read: {e!r}.",
            path=str(place / MANIFEST),
            next_step="Look at it with headrace verify.",
        ) from e
    return StoreFiles(place, manifest, {n: _size(place / n) for n in directories + volumes})


def _plain(name: object) -> str:
    """A name that cannot lead out of the folder."""
    if not isinstance(name, str) or "/" in name or name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"{name!r} is no file name")
    return name


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MANIFEST_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFound(
            f"{path}: there is no store here.",
            path=str(path),
            next_step="Make one with headrace pack.",
        ) from None
    except OSError as e:
        raise VolumeError(
            f"{path}: cannot be read: {e.strerror}.", path=str(path), errno=e.errno
        ) from e
    if len(data) > _MANIFEST_BYTES_MAX:
        raise CorruptStore(
            f"{path}: manifest size in bytes is more than {_MANIFEST_BYTES_MAX:,}.", path=str(path)
        )
    return data


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as e:
        if e.errno == errno.ENOENT:
            raise CorruptStore(
                f"{path}: the file is missing.", path=str(path),
                next_step="Put it back, or pack the source again.",
            ) from None  # fmt: skip
        raise VolumeError(f"{path}: {e.strerror}.", path=str(path), errno=e.errno) from e
