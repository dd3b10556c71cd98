"""`TARGET.partial/`: the folder in which a store is built before it is published.

It holds the lock (a `flock` on the folder itself), the journal, and `store/`, which becomes the target
by one rename. Whoever finds it after a crash resumes from the journal or starts over.
"""

from __future__ import annotations

import contextlib
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
from headrace.errors import SourceChanged, StoreExists, VolumeError
from headrace.store.journal import Journal
from headrace.store.publish import busy, check_target, not_durable, store_exists

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ATTEMPTS = 10


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

    def resume(self, identity: dict[str, Any]) -> None:
        """Goes on with what is there, or begins where nothing is.

        Raises:
            SourceChanged: an earlier run packed other data or in another way.
        """
        before = self.journal.identity
        # Without its folder, or for another segment, an earlier run had published and then died.
        published = before is not None and before.get("segment") != identity["segment"]
        if before is None or published or not self.store.is_dir() or self.store.is_symlink():
            self.begin(identity)
            return
        different = sorted(k for k in identity if identity[k] != before.get(k))
        if different:
            raise SourceChanged(
                f"{self.path}: an interrupted run packed something else here: "
                + "; ".join(f"{k} was {before.get(k)!r}, is {identity[k]!r}" for k in different)
                + ".",
                path=str(self.path),
                next_step="Restore the source as it was, or pass resume=False to start over.",
            )

    @property
    def _finished(self) -> Path:
        return self.path / "finished"

    def publish(self, target: Path, *, overwrite: bool) -> None:
        """Makes the built folder stand at `target`.

        Raises:
            StoreExists: something stands there, and is no store that may be replaced.
            VolumeError: it stands there, but the system could not make that durable.
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
    """Makes or takes the partial folder and locks it while the block runs.

    Args:
        path: of the folder.
        mode: who may read what is built in it; see `base.files.readers`.

    Raises:
        StoreError: another process is building there.
        StoreExists: something stands there that headrace has not made.
        VolumeError: no folder of this user's stands there, or none can be made.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, _take(path, mode))
        strange = sorted({p.name for p in path.iterdir()} - {"journal", "store", "finished"})
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
    for _ in range(_ATTEMPTS):
        try:
            make_folder(path, mode=mode, exist_ok=True)
            fd = lock_path(path, make=False, owned=True)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            continue  # its owner published it between our two steps
        except VolumeError:
            raise
        except OSError as e:
            raise VolumeError(
                f"{path}: cannot be made: {e.strerror}.",
                path=str(path),
                errno=e.errno,
                next_step="Check the folder above it: its permissions, its space and its disk.",
            ) from e
        if fd is not None:
            return fd
        break
    raise busy(path, "building")
