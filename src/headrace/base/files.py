"""Files that others may have made: opening, creating, replacing, locking and publishing them.

A store, a cache, a checkpoint or a runtime folder may come from somebody else, or lie where others can
write. So nothing in it is opened through a symbolic link, no name is written to that was there before, and
nothing is waited for: a FIFO, a socket or a device in the place of a file is an error at once. What is taken
up again (a journal, a partial store, a cache) belongs to this user or to root.

    open_file, read_file      of what is there, if it is a regular file; read_fully, write_all: by descriptor
    open_folder, make_folder  folders, as descriptors; own_folder, which is this user's alone
    create_file, NewFile      new files: never one that is there; `NewFile` appears when it is whole
    replace_file              old content or new content, nothing between, durably
    lock, lock_path, unlock   `flock`: dies with its process, leaves nothing stale
    publish_folder, exchange_folder, sync_folder
    state_folder              where what a user's runs leave is kept
    explained                 what the system refuses, as an error of ours

A path's last component is never followed; the folders before it are, because the user names them. With
`within`, nothing below that folder is. What is created in a folder is closed to those who cannot enter the
folder, and what replaces a file is not open to more than that file was.

A user's own sources are not opened here: they may be symbolic links.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

from headrace.errors import VolumeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    from headrace.errors import HeadraceError

    AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_STRANGE = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.ENOTDIR, errno.EXDEV)
"""What the kernel says of a name that is no regular file, or leads elsewhere."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.part")
_RACES_MAX = 10_000
"""Others may make and remove a lock file all the time; a loop of ours still ends."""
_POLL_S = 0.02

# -- opening ------------------------------------------------------------------------------------------


def open_file(
    path: AnyPath,
    flags: int = os.O_RDONLY,
    *,
    within: AnyPath | int | None = None,
    owned: bool = False,
) -> int:
    """A descriptor of the regular file that stands at `path`; `flags` are of `os.open`, none that create.

    `within` is a folder, or a descriptor of one, to which the path is relative, and below which no symbolic
    link is followed. With `owned` the file must belong to this user or to root. Raises FileNotFoundError if
    nothing stands there; VolumeError if something else than a regular file does, or somebody else's; OSError
    if the system refuses.
    """
    fd = _open_checked(path, flags | _SAFE, within, stat.S_IFREG, owned=owned)
    # The flag is for the opening alone: some file systems answer reads with EAGAIN under it.
    os.set_blocking(fd, True)
    return fd


def read_file(
    path: AnyPath,
    limit_bytes: int,
    *,
    within: AnyPath | int | None = None,
    owned: bool = False,
) -> bytes:
    """The first `limit_bytes` of a regular file; arguments and errors as for `open_file`."""
    with open_stream(path, within=within, owned=owned) as file:
        return file.read(limit_bytes)


def open_stream(
    path: AnyPath, *, within: AnyPath | int | None = None, owned: bool = False, buffering: int = -1
) -> BinaryIO:
    """A regular file to read from; `buffering` as of `open`, the rest as for `open_file`."""
    fd = open_file(path, within=within, owned=owned)
    try:
        return open(fd, "rb", buffering=buffering)
    except BaseException:
        os.close(fd)
        raise


def write_all(fd: int, data: NDArray[np.uint8] | bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`, however often the kernel writes short."""
    # Any: numpy's arrays are buffers, which their stubs say from Python 3.12 on only.
    view = memoryview(cast("Any", data)).cast("B")
    while view:
        written = os.pwrite(fd, view[: 1 << 30], offset)
        view = view[written:]
        offset += written


def read_fully(fd: int, view: memoryview, offset: int) -> int:
    """Fills `view` from `offset`; returns fewer bytes than asked for only at the file's end."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + (1 << 30)]], offset + done)
        if count == 0:
            break
        done += count
    return done


def open_folder(path: AnyPath, *, owned: bool = False) -> int:
    """A descriptor of the folder that stands at `path`, which is no symbolic link.

    Raises FileNotFoundError if nothing stands there; VolumeError if no folder does, or (with `owned`)
    somebody else's; OSError if the system refuses.
    """
    return _open_checked(path, _FOLDER, None, stat.S_IFDIR, owned=owned)


def _open_checked(
    path: AnyPath, flags: int, within: AnyPath | int | None, kind: int, *, owned: bool
) -> int:
    try:
        fd = os.open(path, flags) if within is None else _open_within(within, path, flags)
    except OSError as e:
        where = path if within is None else _below(within, path)
        strange = _strange_kind(where, e, kind)
        if strange:
            raise _refused(where, strange, _KINDS[kind]) from e
        e.filename = os.fsdecode(where)
        raise
    status = os.fstat(fd)
    if stat.S_IFMT(status.st_mode) != kind:
        os.close(fd)
        raise _refused(path, _KINDS[stat.S_IFMT(status.st_mode)], _KINDS[kind])
    if owned and status.st_uid not in (os.geteuid(), 0):
        os.close(fd)
        raise _refused(path, f"of user {status.st_uid}", f"{_KINDS[kind]} of user {os.geteuid()}")
    return fd


def _open_within(within: AnyPath | int, path: AnyPath, flags: int) -> int:
    name = os.fsencode(path)
    if not name or name.startswith(b"/") or b".." in name.split(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), os.fsdecode(name))
    if isinstance(within, int):
        return _walk(within, name, flags)
    folder = os.open(within, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _walk(folder, name, flags)
    finally:
        os.close(folder)


def _walk(folder: int, name: bytes, flags: int) -> int:
    """Opens `name` below a folder; a symbolic link at any place is ELOOP.

    As openat2 with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS, which kernels before 5.6 and some containers lack.
    """
    *above, last = [c for c in name.split(b"/") if c not in (b"", b".")] or [b"."]
    if name.endswith((b"/", b"/.")):
        flags |= os.O_DIRECTORY
    at = folder
    try:
        for component in above:
            inner = os.open(component, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            if at != folder:
                os.close(at)
            at = inner
            mode_there = os.fstat(at).st_mode
            if not stat.S_ISDIR(mode_there):
                code = errno.ELOOP if stat.S_ISLNK(mode_there) else errno.ENOTDIR
                raise OSError(code, os.strerror(code), os.fsdecode(name))
        try:
            return os.open(last, flags | os.O_NOFOLLOW, dir_fd=at)
        except NotADirectoryError as e:  # O_DIRECTORY finds the link before O_NOFOLLOW does
            if stat.S_ISLNK(os.stat(last, dir_fd=at, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(name)) from e
            raise
    finally:
        if at != folder:
            os.close(at)


# -- what may stand there -----------------------------------------------------------------------------


_KINDS = {
    stat.S_IFREG: "a regular file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def _strange_kind(where: AnyPath, e: OSError, kind: int) -> str:
    """What stands at a name that the kernel did not open, if that is the reason; else ''."""
    if e.errno not in _STRANGE:
        return ""
    try:
        there = stat.S_IFMT(os.lstat(where).st_mode)
    except OSError:
        return ""  # a folder above it is no folder
    if e.errno in (errno.ELOOP, errno.EXDEV) and there != stat.S_IFLNK:
        return "behind a symbolic link"
    return "" if there == kind else _KINDS[there]


def _below(within: AnyPath | int, path: AnyPath) -> str:
    folder = f"/proc/self/fd/{within}" if isinstance(within, int) else os.fsdecode(within)
    return os.path.join(folder, os.fsdecode(path))


def _refused(path: AnyPath, actual: str, expected: str) -> VolumeError:
    shown = os.fsdecode(path)
    reason = f"is {actual}, expected {expected}"
    return VolumeError(
        f"{shown} {reason}.",
        path=shown,
        errno=errno.ELOOP,
        strerror=reason,
        next_step="Nothing was read or written through it: find out who made it, and remove it.",
    )


def readers(stats: Iterable[tuple[int, int]]) -> int:
    """Who may read all files and folders of these st_mode and st_gid, as the mode of a folder with their copy.

    The group counts only where it is the one that this process's new files get.
    """
    result = 0o777
    for mode, group in stats:
        bit = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        if not mode & bit:
            result &= ~0o007
        if not mode & (bit << 3 if group == os.getegid() else bit):
            result &= ~0o070
    return result


def _narrowed(mode: int, path: AnyPath) -> int:
    """A mode for `path` without those who cannot enter its folder."""
    folder = os.stat(os.path.dirname(os.fsdecode(path)) or ".").st_mode
    for everybody in (0o070, 0o007):
        if not folder & everybody & 0o111:
            mode &= ~everybody
    return mode


# -- creating -----------------------------------------------------------------------------------------


def create_file(path: AnyPath, flags: int = os.O_RDWR, *, mode: int = 0o666) -> int:
    """A descriptor of a new, empty file; its mode is `mode` without the umask and the folder's strangers.

    Raises FileExistsError if something stands there, whatever it is.
    """
    flags |= os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, _narrowed(mode, path))


def open_or_create(path: AnyPath, *, mode: int = 0o666, owned: bool = False) -> int:
    """A descriptor of the regular file at `path`, which is made if nothing stands there.

    Raises VolumeError if something else than a regular file stands there, or (with `owned`) somebody else's.
    """
    for _ in range(_RACES_MAX):
        with contextlib.suppress(FileNotFoundError):
            return open_file(path, os.O_RDWR, owned=owned)
        with contextlib.suppress(FileExistsError):
            return create_file(path, os.O_RDWR, mode=mode)
    raise _refused(path, "made and removed again and again", "a file that stays")


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where a user's runs keep what outlasts them: `headrace` in the user's XDG state folder."""
    state = environment.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # a relative one is to be ignored, says the specification
        state = os.path.expanduser("~/.local/state")
    return Path(state, "headrace")


def make_folder(path: AnyPath, *, mode: int | None = None, exist_ok: bool = False) -> None:
    """Makes a folder in one that exists; without a `mode`, those who may enter that one may enter it.

    With `exist_ok` a folder of this user or of root may stand there; its mode is left alone. Raises
    FileExistsError if something stands there, and VolumeError if, with `exist_ok`, that is no folder, or
    somebody else's.
    """
    if mode is None:
        mode = _narrowed(0o777, path)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not exist_ok:
            raise
        os.close(open_folder(path, owned=True))


@contextlib.contextmanager
def explained(
    error: type[HeadraceError], path: AnyPath, what: str = "", next_step: str | None = None
) -> Iterator[None]:
    """What the system refuses inside becomes this error: "PATH: WHAT: No space left on device."."""
    try:
        yield
    except OSError as e:
        text = ": ".join(filter(None, (os.fsdecode(path), what, e.strerror or str(e))))
        raise error(f"{text}.", path=os.fsdecode(path), next_step=next_step) from e


def closing(folder: Path, status: os.stat_result) -> str | None:
    """The command that closes a folder of this user's to others; None: they could write into it."""
    open_to_writers = stat.S_IMODE(status.st_mode) & 0o022
    return None if open_to_writers else f"chmod 0700 {shlex.quote(str(folder))}"


def own_folder(path: Path, error: type[HeadraceError], next_step: str) -> Path:
    """The folder, made if need be, or OSError; and seen to be this user's, closed to others and no link."""
    path.mkdir(mode=0o700, exist_ok=True)
    status, why = path.lstat(), ""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        why = f"is not this user's ({os.geteuid()})"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        why = f"has mode {stat.S_IMODE(status.st_mode):04o}, expected 0700"
        next_step = closing(path, status) or next_step
    if why:
        raise error(f"{path}: the folder {why}.", path=str(path), next_step=next_step)
    return path


class NewFile:
    """A file that appears under its name when it is whole.

    It is written under a random name beside it, `temporary`, which nothing stood at before, through `fd`,
    which `publish` and `discard` close. `mode` is without the umask, the folder's strangers, and whom the file
    that it replaces was closed to.
    """

    def __init__(self, path: AnyPath, flags: int = os.O_RDWR, *, mode: int = 0o666) -> None:
        self.path = os.fsdecode(path)
        with contextlib.suppress(FileNotFoundError):
            replaced = os.lstat(self.path)
            if stat.S_ISREG(replaced.st_mode):
                mode &= replaced.st_mode
        self.fd = -1
        while self.fd < 0:
            self.temporary = temporary_name(self.path)
            self.fd = create_file(self.temporary, flags, mode=mode)
            with contextlib.suppress(OSError):  # a file system without locks keeps leftovers
                fcntl.flock(self.fd, fcntl.LOCK_EX)  # says that somebody writes it
            if not os.path.lexists(self.temporary):
                os.close(self.fd)  # `remove_leftovers` came before the lock
                self.fd = -1

    def publish(self, *, sync: bool = True, replace: bool = True) -> None:
        """Gives the file its name, in the place of whatever stands there.

        With `sync` the disk has the content before, and the name when this returns. Without `replace` it is
        FileExistsError if something stands there.
        """
        if sync:
            os.fsync(self.fd)
        if replace:
            os.rename(self.temporary, self.path)
        else:
            os.link(self.temporary, self.path)
            os.unlink(self.temporary)
        fd, self.fd = self.fd, -1
        os.close(fd)
        if sync:
            sync_folder(os.path.dirname(self.path) or ".")

    def discard(self) -> None:
        """Removes it, unless it was published."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def temporary_name(path: AnyPath) -> str:
    """A name beside `path` that nobody can guess, and that no reader takes for data."""
    folder, name = os.path.split(os.fsdecode(path))
    return os.path.join(folder, f".{name}.{os.urandom(8).hex()}.part")


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` makes such names: of a file that is being written, or was not finished."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(folder: AnyPath) -> None:
    """Removes what killed writers left in a folder under the names of `NewFile`."""
    with os.scandir(os.fsdecode(folder)) as entries:
        left = [entry.path for entry in entries if is_temporary(entry.name)]
    for path in left:
        with contextlib.suppress(OSError):  # it was published meanwhile, or nobody may look
            fd = open_file(path, os.O_RDWR, owned=True)
            try:
                if lock(fd):  # else somebody writes it
                    os.unlink(path)
            finally:
                os.close(fd)


def replace_file(path: AnyPath, data: bytes, *, mode: int = 0o666, sync: bool = True) -> None:
    """Replaces a file by new content: a reader sees the old or the new, nothing between."""
    with NewFile(path, os.O_WRONLY, mode=mode) as new:
        view = memoryview(data)
        while view:
            view = view[os.write(new.fd, view) :]
        new.publish(sync=sync)


# -- locks --------------------------------------------------------------------------------------------


def lock(fd: int, *, shared: bool = False, wait_s: float | None = 0.0) -> bool:
    """Takes the lock of an open file or folder, which is held until the descriptor is closed.

    With `shared` others may hold it so, too. Waits so long for others, or, with None, for ever. Returns
    whether it is held now.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if wait_s is None:
        fcntl.flock(fd, kind)
        return True
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def unlock(fd: int) -> None:
    """Gives back a lock that is held for moments, and closes its descriptor.

    Closing alone does not: a process that was forked meanwhile has the descriptor too, and would hold the lock.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def lock_path(
    path: AnyPath,
    *,
    make: bool = True,
    mode: int = 0o600,
    shared: bool = False,
    wait_s: float | None = 0.0,
    owned: bool = False,
    sign: bool = False,
) -> int | None:
    """A descriptor that holds the lock of a file or folder until it is closed; None: another process does.

    Whoever holds a lock may remove what it lies on: the lock that this returns is that of what stands at
    `path` now. A file is made if nothing stands there, with `mode`; without `make` that is FileNotFoundError.
    `shared` and `wait_s` are as for `lock`. With `owned` it must belong to this user or to root. With `sign`
    this process's id is written into the file, for `locked_by`.

    Raises VolumeError if what stands there is neither a file nor a folder, or (with `owned`) somebody else's,
    and OSError if the system refuses.
    """
    for _ in range(_RACES_MAX):
        fd = _open_lock(path, make=make, mode=mode, owned=owned)
        held = False
        try:
            if not lock(fd, shared=shared, wait_s=wait_s):
                return None
            with contextlib.suppress(FileNotFoundError):
                held = os.path.samestat(os.fstat(fd), os.lstat(path))
            if held and sign:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            held = False
            raise
        finally:
            if not held:
                os.close(fd)
        if held:
            return fd
    raise _refused(path, "made and removed again and again", "a lock that stays")


def _open_lock(path: AnyPath, *, make: bool, mode: int, owned: bool) -> int:
    with contextlib.suppress(NotADirectoryError, FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return open_folder(path, owned=owned)
    if make:
        return open_or_create(path, mode=mode, owned=owned)
    return open_file(path, os.O_RDWR, owned=owned)


def locked_by(path: AnyPath) -> str:
    """The id of the process that signed a lock file, or "unknown"."""
    try:
        return read_file(path, 32).decode(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


# -- publishing folders -------------------------------------------------------------------------------


def sync_folder(path: AnyPath) -> None:
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


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """Renames with flags; False where the kernel or the file system has none."""
    import ctypes  # slow to import, and most processes need none of it

    try:
        call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here = -100  # AT_FDCWD
    if call(here, os.fsencode(old), here, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(old), None, str(new))


def publish_folder(built: Path, target: Path) -> None:
    """Renames the folder `built` to `target`, durably.

    Raises FileExistsError if something stands at `target`.
    """
    try:
        if not _renameat2(built, target, 1):  # RENAME_NOREPLACE
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "exists", str(target))
            built.rename(target)
    except OSError as e:
        if e.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from e
        raise
    sync_folder(target.parent)


def exchange_folder(built: Path, target: Path) -> None:
    """Puts the folder `built` in the place of the folder `target`, and removes the old one."""
    if not _renameat2(built, target, 2):  # RENAME_EXCHANGE
        # Without an atomic exchange there is a moment with no folder; the old one is beside it.
        aside = Path(temporary_name(target))
        target.rename(aside)
        built.rename(target)
        aside.rename(built)
    sync_folder(target.parent)
    shutil.rmtree(built)
