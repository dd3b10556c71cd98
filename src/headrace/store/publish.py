"""Publishing: how new files and folders appear whole or not at all, and who may write.

Everything that must survive a kill or a power cut goes through here: write, sync, rename, sync the
folder. Locks are `flock`s on descriptors, so they die with their process and leave nothing stale.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from headrace.errors import StoreError, StoreExists, VolumeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def sync_folder(path: str | Path) -> None:
    """Makes the folder's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        # Some network file systems sync names by themselves and refuse this.
        if e.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, *, writer: str = "") -> None:
    """Replaces a file by new content: a reader sees the old or the new, nothing between.

    Processes that may replace the same file at the same time give a `writer` of their own.
    """
    temporary = path.with_name(f"{path.name}{writer}.new")
    try:
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """Renames with flags; False where the kernel or the file system has none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    status = call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags)
    if status == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(old), None, str(new))


def publish_folder(built: Path, target: Path) -> None:
    """Renames the folder `built` to `target`, which must not exist.

    Raises:
        StoreExists: something stands at `target`.
    """
    try:
        if not _renameat2(built, target, _RENAME_NOREPLACE):
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "exists", str(target))
            built.rename(target)
    except OSError as e:
        if e.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise store_exists(target) from e
        raise
    sync_folder(target.parent)


def exchange_folder(built: Path, target: Path) -> None:
    """Puts `built` in the place of the store `target`, and removes the old one."""
    if not _renameat2(built, target, _RENAME_EXCHANGE):
        # Without an atomic exchange there is a moment with no store; the old one is beside it.
        aside = target.with_name(target.name + ".old")
        target.rename(aside)
        built.rename(target)
        aside.rename(built)
    sync_folder(target.parent)
    shutil.rmtree(built)


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
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise busy(path, what) from e
        if not _same_file(fd, path):
            raise busy(path, what)
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


def _same_file(fd: int, path: Path) -> bool:
    """Whether `path` still names what was locked: its holder may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


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
