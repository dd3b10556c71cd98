"""Publishing a store: the folder in which it is built, where it may appear, and what refusals mean.

`TARGET.partial/` holds the lock (a `flock` on the folder itself), the journal, and `store/`, which becomes
the target by one rename. Whoever finds it after a crash resumes from the journal or starts over. How files
and folders appear whole or not at all is told in `base.files`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.base.files import (
    exchange_folder,
    lock_path,
    make_folder,
    publish_folder,
    sync_folder,
)
from headrace.errors import SourceChanged, StoreError, StoreExists, VolumeError
from headrace.store.segment_writer import Journal

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

    Raises StoreExists if it exists and `overwrite` is false, or it is no store of ours.
    """
    if not os.path.lexists(target):
        if not target.parent.is_dir():
            what = f"there is no such folder to write {target.name} to"
            raise _refused(target.parent, errno.ENOENT, what, "Create the folder first.")
    elif not overwrite:
        raise store_exists(target)
    elif target.is_symlink() or not (target / "store.json").is_file():
        raise StoreExists(
            f"{target} exists and is no headrace store (it has no store.json).",
            path=str(target),
            next_step="overwrite=True replaces stores only. Choose another target.",
        )


def _refused(path: Path, code: int | None, what: str, next_step: str) -> VolumeError:
    return VolumeError(f"{path}: {what}.", path=str(path), errno=code, next_step=next_step)


@contextlib.contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Holds an exclusive lock on a folder or file while the block runs.

    Raises StoreError if another process holds it.
    """
    fd = lock_path(path, make=False)
    if fd is None:
        raise _busy(path, what)
    try:
        yield
    finally:
        os.close(fd)


def _busy(path: Path, what: str) -> StoreError:
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

    Raises VolumeError with errno ENOSPC.
    """
    free = free_bytes(path)
    if free < needed_bytes:
        what = f"{free:,} bytes are free, {needed_bytes:,} are needed"
        next_step = "Free some space or choose a target on another file system."
        raise _refused(path, errno.ENOSPC, what, next_step)


def not_durable(target: Path, e: OSError) -> VolumeError:
    """The error for a store that is published, and that the system then could not make durable."""
    return _refused(
        target, e.errno, "the store is written, but that it stands there could not be made durable, or "
        f"what it replaced not be removed: {e.strerror}",
        "The store can be used as it is. Check the disk: a power cut now may undo it.",
    )  # fmt: skip


_RESUME = "What is packed is kept: run the same command again to resume."


@contextlib.contextmanager
def disk_errors(path: Path, next_step: str = _RESUME) -> Iterator[None]:
    """Turns the system's refusals while a store is written and published into `VolumeError`."""
    try:
        yield
    except (StoreError, VolumeError):
        raise
    except OSError as e:
        raise _refused(path, e.errno, f"cannot be written: {e.strerror}", next_step) from e


_ATTEMPTS = 10

SPOOL = "spool"
"""In a partial folder: another one, in which a source is copied before it is shuffled (`packing`)."""


@dataclass(slots=True)
class Partial:
    """An open, locked partial folder."""

    path: Path
    journal: Journal

    @property
    def store(self) -> Path:
        """The folder that will be published."""
        return self.path / "store"

    def begin(self, identity: dict[str, Any]) -> None:
        """Starts over with an empty folder."""
        for left in (self.store, self._finished):
            if left.is_symlink() or not left.is_dir():
                left.unlink(missing_ok=True)  # rmtree would wait for a FIFO
            shutil.rmtree(left, ignore_errors=True)
        make_folder(self.store)
        sync_folder(self.path)
        self.journal.begin(identity)

    def interrupted(self, segment: int) -> dict[str, Any] | None:
        """What an interrupted run packed of this segment, or None where there is nothing to go on with."""
        before = self.journal.identity
        # Without its folder, or for another segment, an earlier run had published and then died.
        if before is None or before.get("segment") != segment:
            return None
        return before if self.store.is_dir() and not self.store.is_symlink() else None

    def resume(self, identity: dict[str, Any]) -> None:
        """Goes on with what is there, or begins where nothing is.

        Raises SourceChanged if an earlier run packed other data or in another way.
        """
        before = self.interrupted(identity["segment"])
        if before is None:
            self.begin(identity)
            return
        different = sorted(k for k in identity if identity[k] != before.get(k))
        if different:
            raise SourceChanged(
                f"{self.path}: an interrupted run packed something else here: "
                + "; ".join(f"{k} was {before.get(k)!r}, is {identity[k]!r}" for k in different)
                + ".",
                path=str(self.path),
                next_step="Restore the source as it was, or start over: --restart (in Python resume=False).",
            )

    @property
    def _finished(self) -> Path:
        return self.path / "finished"

    def publish(self, target: Path, *, overwrite: bool) -> None:
        """Makes the built folder stand at `target`.

        Raises StoreExists if something stands there, and is no store that may be replaced, and VolumeError if
        it stands there, but the system could not make that durable.
        """
        built = self.store.stat()
        try:
            self._publish(target, overwrite=overwrite)
        except OSError as e:
            if not (target.exists() and os.path.samestat(built, target.stat())):
                raise
            # To resume would be wrong advice: the store stands there, whole and synced.
            self.remove()
            raise not_durable(target, e) from e

    def _publish(self, target: Path, *, overwrite: bool) -> None:
        if not os.path.lexists(target):
            try:
                publish_folder(self.store, target)
            except FileExistsError as e:
                raise store_exists(target) from e
            return
        check_target(target, overwrite=overwrite)
        # After the exchange the old store lies here. It must not stand at `store`, where a run after
        # a kill would take it for what the journal vouches for.
        self.store.rename(self._finished)
        exchange_folder(self._finished, target)

    def remove(self) -> None:
        """Removes the folder, when its content is published or worthless."""
        shutil.rmtree(self.path, ignore_errors=True)


def partial_path(target: Path) -> Path:
    """Where `target` is built."""
    return target.with_name(target.name + ".partial")


@contextlib.contextmanager
def open_partial(path: Path, mode: int = 0o777) -> Iterator[Partial]:
    """Makes or takes the partial folder and locks it while the block runs; `mode` as of `base.files.readers`.

    Raises StoreError if another process is building there; StoreExists if something stands there that
    headrace has not made; VolumeError if no folder of this user's stands there, or none can be made.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, _take(path, mode))
        strange = sorted({p.name for p in path.iterdir()} - {"journal", "store", "finished", SPOOL})
        if strange:
            raise StoreExists(
                f"{path} holds {strange[0]!r}, expected a folder that headrace made.",
                path=str(path),
                next_step="Move it away or choose another target.",
            )
        journal = Journal(path / "journal")
        stack.callback(journal.close)
        yield Partial(path, journal)


def _take(path: Path, mode: int) -> int:
    """A descriptor of the folder, made if need be, that holds its lock."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            make_folder(path, mode=mode, exist_ok=True)
            fd = lock_path(path, make=False, owned=True)
        except FileNotFoundError as e:
            if not path.parent.is_dir():
                raise
            if attempt < _ATTEMPTS:
                continue  # its owner published it between our two steps
            next_step = "Choose a target on a disk: no folder can be made there."
            raise _refused(path, e.errno, f"cannot be made: {e.strerror}", next_step) from e
        except VolumeError:
            raise
        except OSError as e:
            next_step = "Check the folder above it: its permissions, its space and its disk."
            raise _refused(path, e.errno, f"cannot be made: {e.strerror}", next_step) from e
        if fd is not None:
            return fd
        break
    raise _busy(path, "building")
