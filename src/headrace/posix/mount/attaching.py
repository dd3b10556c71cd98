"""Attaching to a folder and detaching from it, through fusermount3, as any user may.

Reads the kernel's mount table and never touches what is mounted: a mount whose process hangs or is dead
must not make this hang.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

from headrace.errors import MountError
from headrace.machine.mounts import Mount, mounts
from headrace.posix.mount.protocol import READ_BYTES_MAX

DEVICE = "/dev/fuse"
TYPE = "fuse.headrace"

_HELPER = "fusermount3"
_HELPER_S = 30.0
_ALIVE_S = 10.0
_INSTALL = "Install it: `apt install fuse3` (Debian, Ubuntu), `dnf install fuse3` (Fedora, Rocky)."
_USERS_S = 2.0
_USERS_MAX = 10


def attach(folder: str, source: str, *, allow_other: bool = False) -> int:
    """Mounts, and returns the file descriptor of /dev/fuse on which requests come.

    The mount table and `df` show `source`.

    Raises:
        MountError: fusermount3 or /dev/fuse is missing or refuses.
    """
    helper = _helper()
    if not os.path.exists(DEVICE):
        raise MountError(
            f"{DEVICE} is missing: this system has no FUSE.",
            path=DEVICE,
            next_step="Load the module (`modprobe fuse`), or give the container the device "
            "(`--device /dev/fuse --cap-add SYS_ADMIN`).",
        )
    # `default_permissions`: the kernel checks the modes, without asking for each access.
    options = f"ro,nosuid,nodev,default_permissions,max_read={READ_BYTES_MAX},subtype=headrace"
    options += ",allow_other" if allow_other else ""
    # Backslash and comma have a meaning in options.
    options += ",fsname=" + re.sub(r"([\\,])", r"\\\1", source)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, its:
        done = _run([helper, "-o", options, "--", folder], comm=its)
        its.close()
        fds: list[int] = []
        if done.returncode == 0:
            ours.settimeout(_HELPER_S)
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    if not fds:
        raise _refused(folder, done.stderr)
    return fds[0]


def check_folder(folder: str) -> str:
    """The absolute path of a folder to mount on, which has to be empty.

    A mount of ours whose process was killed is taken away first.

    Raises:
        MountError: it is missing, no folder, not empty, or in use as a mount.
    """
    path = resolved(folder)
    mounted = mounted_at(path)
    if mounted is not None and mounted.kind == TYPE and _is_dead(path):
        detach(path, lazy=True)
        mounted = mounted_at(path)
    if mounted is not None:
        raise MountError(
            f"{path}: {mounted.source} ({mounted.kind}) is mounted here already.",
            path=path,
            next_step=f"Unmount it (`headrace unmount {path}`), or name another folder.",
        )
    try:
        with os.scandir(path) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        raise MountError(
            f"{path}: there is no such folder.", path=path, next_step=f"Make it: mkdir -p {path}"
        ) from None
    except NotADirectoryError:
        raise MountError(
            f"{path} is a file, expected an empty folder.",
            path=path,
            next_step="Name an empty folder.",
        ) from None
    if first is not None:
        raise MountError(
            f"{path}: the folder is not empty (it holds {os.fsdecode(first.name)!r}), and what lies "
            "in it would be hidden.",
            path=path,
            next_step="Name an empty folder.",
        )
    return path


def detach(folder: str, *, lazy: bool = False) -> None:
    """Unmounts; with `lazy` at once, though files in it are open: they end with their users.

    Raises:
        MountError: it is in use, or another user's.
    """
    arguments = ["-u", *(["-z"] if lazy else []), "--", folder]
    done = _run([_helper(), *arguments])
    mounted = mounted_at(folder)
    if mounted is None or mounted.kind != TYPE:
        return
    errors = done.stderr.strip()
    if done.returncode and "busy" in errors.lower():
        users = users_of(folder)
        shown = ", ".join(f"{pid} ({name})" for pid, name in users)
        raise MountError(
            f"{folder}: the mount is busy"
            + (f"; files in it are used by process {shown}." if users else "."),
            path=folder,
            next_step="End what uses it, or take it away all the same: "
            f"`headrace unmount --lazy {folder}`.",
            errno=errno.EBUSY,
        )
    raise MountError(f"{folder}: cannot be unmounted: {errors or 'no reason given'}.", path=folder)


def mounted_at(folder: str) -> Mount | None:
    """The topmost mount on a folder (an absolute path without links); None where nothing is."""
    return next((mount for mount in reversed(mounts()) if mount.point == folder), None)


def resolved(folder: str) -> str:
    """The absolute path without links of a folder that may be a dead mount: it is not touched."""
    # Not the last component: looking at a mount whose process hangs would hang.
    head, tail = os.path.split(os.path.abspath(folder))
    path = os.path.join(os.path.realpath(head), tail)
    if mounted_at(path) is None and os.path.islink(path):
        path = os.path.realpath(path)
    return path


def users_of(folder: str) -> list[tuple[int, str]]:
    """Processes that have something open below a folder: number and name; those we may look at."""
    inside, users = folder + "/", []
    deadline = time.monotonic() + _USERS_S
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or time.monotonic() > deadline:
            continue
        uses = False
        try:
            for link in (process / "cwd", process / "root", *(process / "fd").iterdir()):
                with contextlib.suppress(OSError):
                    uses = uses or f"{os.readlink(link)}/".startswith(inside)
            if uses or f" {inside}" in (process / "maps").read_text(errors="replace"):
                users.append((int(process.name), (process / "comm").read_text().strip()))
        except OSError:  # it has ended, or is another user's
            continue
        if len(users) >= _USERS_MAX:
            break
    return users


def _is_dead(path: str) -> bool:
    """Whether nobody serves a mount any more. Asked of the kernel's cache, it would still seem alive.

    By a process of its own, which can be given up where the mount's process hangs.
    """
    try:
        done = _run(["stat", "-f", "--", path], seconds=_ALIVE_S)
    except MountError:
        return False
    return os.strerror(errno.ENOTCONN) in done.stderr or "connection abort" in done.stderr


def _helper() -> str:
    program = shutil.which(_HELPER)
    if program is None:
        raise MountError(
            f"{_HELPER} is missing: it is what lets a user mount.", path=_HELPER, next_step=_INSTALL
        )
    return program


def _run(
    command: list[str], comm: socket.socket | None = None, seconds: float = _HELPER_S
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, LC_ALL="C")
    handed: tuple[int, ...] = ()
    if comm is not None:
        environment["_FUSE_COMMFD"] = str(comm.fileno())
        handed = (comm.fileno(),)
    try:
        return subprocess.run(  # noqa: S603 - found by its name, with our arguments
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=environment, pass_fds=handed, timeout=seconds, check=False, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise MountError(
            f"{' '.join(command)} did not end within {seconds:g} s.", path=command[0]
        ) from e


def _refused(folder: str, errors: str) -> MountError:
    errors = errors.strip().removeprefix(f"{_HELPER}: ").rstrip(".") or "no reason given"
    next_step = None
    if "allow_other" in errors:
        next_step = (
            "Let root put `user_allow_other` into /etc/fuse.conf, or leave --allow-other out."
        )
    elif DEVICE in errors or "permission denied" in errors.lower():
        next_step = (
            f"Users need read and write access to {DEVICE} (mode 0666, as most systems have it), "
            f"and fusermount3 needs its set-user-ID bit."
        )
    elif "write access" in errors:
        next_step = "Name a folder of your own."
    return MountError(f"{folder}: cannot be mounted: {errors}.", path=folder, next_step=next_step)
