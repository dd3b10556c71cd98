"""Publishing a store: where it may be written, whether it fits, and what the system's refusals mean.

How files and folders appear whole or not at all is told in `base.files`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from headrace.base.files import lock_path
from headrace.errors import StoreError, StoreExists, VolumeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def store_exists(target: Path) -> StoreExists:
    """The error for a target that is taken."""
    return StoreExists(
        f"{target} exists already.",
        path=str(target),
        next_step="Choose another target, or pass overwrite=True to replace the store there.",
    )


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuses a target that is taken, or that `overwrite` must not touch.

    Raises:
        StoreExists: it exists and `overwrite` is false, or it is no store of ours.
    """
    if not os.path.lexists(target):
        if not target.parent.is_dir():
            raise VolumeError(
                f"{target.parent}: there is no such folder to write {target.name} to.",
                path=str(target.parent),
                errno=errno.ENOENT,
                next_step="Create the folder first.",
            )
        return
    if not overwrite:
        raise store_exists(target)
    manifest = target / "store.json"
    if target.is_symlink() or not manifest.is_file():
        raise StoreExists(
            f"{target} exists and is no headrace store (it has no store.json).",
            path=str(target),
            next_step="overwrite=True replaces stores only. Choose another target.",
        )


@contextlib.contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Holds an exclusive lock on a folder or file while the block runs.

    Raises:
        StoreError: another process holds it.
    """
    fd = lock_path(path, make=False)
    if fd is None:
        raise busy(path, what)
    try:
        yield
    finally:
        os.close(fd)


def busy(path: Path, what: str) -> StoreError:
    """The error for a folder that another process is writing."""
    return StoreError(
        f"{path}: another process is {what} it.",
        path=str(path),
        next_step="Wait until it has ended, then try again.",
    )


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of `path`."""
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def check_free_space(path: Path, needed_bytes: int) -> None:
    """Refuses to begin what cannot fit.

    Raises:
        VolumeError: with errno ENOSPC.
    """
    free = free_bytes(path)
    if free < needed_bytes:
        raise VolumeError(
            f"{path}: {free:,} bytes are free, {needed_bytes:,} are needed.",
            path=str(path),
            errno=errno.ENOSPC,
            next_step="Free some space or choose a target on another file system.",
        )


def not_durable(target: Path, e: OSError) -> VolumeError:
    """The error for a store that is published, and that the system then could not make durable."""
    return VolumeError(
        f"{target}: the store is written, but that it stands there could not be made durable, or what "
        f"it replaced not be removed: {e.strerror}.",
        path=str(target),
        errno=e.errno,
        next_step="The store can be used as it is. Check the disk: a power cut now may undo it.",
    )


RESUME = "What is packed is kept: run the same command again to resume."


class disk_errors:  # noqa: N801 - used like a function
    """Turns the system's refusals while a store is written and published into `VolumeError`."""

    def __init__(self, path: Path, next_step: str = RESUME) -> None:
        self._path = path
        self._next_step = next_step

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreError | VolumeError):
            raise VolumeError(
                f"{self._path}: cannot be written: {error.strerror}.",
                path=str(self._path),
                errno=error.errno,
                next_step=self._next_step,
            ) from error
