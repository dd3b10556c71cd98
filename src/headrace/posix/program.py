"""Program: what a command will run, and whether the preload shim can be in it.

The dynamic linker loads the shim, so there has to be one: not in static programs, and it does not do so
for programs that change their user, that are of another architecture, or that bring another C library.
All that is seen in the file before it is started; scripts are followed to their interpreter.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import sys

__all__ = ["find_program", "why_unseen"]

_SCRIPTS_MAX = 5
"""Scripts whose interpreter is a script: the kernel follows no more."""

_HEAD_BYTES = 4096
_ELF = struct.Struct("<4sBBBBB7sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_PT_INTERP = 3
_CLASS_64, _LITTLE = 2, 1


def find_program(name: str) -> str:
    """The file that a command names.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: it cannot be run.
    """
    if os.sep not in name:
        found = shutil.which(name)
        if found is None:
            raise FileNotFoundError(2, "no such command", name)
        return found
    if not os.path.isfile(name):
        raise FileNotFoundError(2, "no such file", name)
    if not os.access(name, os.X_OK):
        raise PermissionError(13, "it is not executable", name)
    return name


def why_unseen(path: str) -> str:
    """Why the shim cannot see what a program opens; '' when it can.

    Args:
        path: the file that is run.
    """
    for _ in range(_SCRIPTS_MAX):
        try:
            if _changes_user(path):
                return f"{path} runs as another user, or with more rights"
            with open(path, "rb") as f:
                head = f.read(_HEAD_BYTES)
                if head[:2] != b"#!":
                    return _of_elf(path, head, f.fileno())
        except OSError as e:
            return f"{path} cannot be looked at: {e.strerror}"
        words = head[2:].split(b"\n", 1)[0].split()
        if not words:
            return ""  # the shell runs it
        path = os.fsdecode(words[0])
        if os.path.basename(path) == "env" and len(words) > 1:
            names = [w for w in words[1:] if not w.startswith(b"-") and b"=" not in w]
            found = shutil.which(os.fsdecode(names[0])) if names else None
            path = found or path
    return ""


def _of_elf(path: str, head: bytes, fd: int) -> str:
    if head[:4] != b"\x7fELF":
        return ""  # the shell runs it
    with open(sys.executable, "rb") as f:
        ours = f.read(_ELF.size)
    if len(head) < _ELF.size or head[4] != _CLASS_64 or head[5] != _LITTLE:
        return f"{path} is not a 64-bit program"
    fields = _ELF.unpack_from(head)
    if fields[8] != _ELF.unpack(ours)[8]:
        return f"{path} is a program of another architecture"
    offset, size, count = fields[11], fields[15], fields[16]
    if size != _SEGMENT.size:
        return f"{path} is no program that the system knows"
    table = os.pread(fd, size * count, offset)
    for segment in _SEGMENT.iter_unpack(table[: len(table) // size * size]):
        if segment[0] == _PT_INTERP:
            return _of_linker(path, os.pread(fd, min(segment[5], 4096), segment[2]))
    return f"{path} is linked statically"


def _of_linker(path: str, name: bytes) -> str:
    linker = os.fsdecode(name.rstrip(b"\0"))
    if not os.path.exists(linker):
        return f"{path} needs {linker}, which is not here"
    if "musl" in os.path.basename(linker):
        return f"{path} brings another C library (musl)"
    return ""


def _changes_user(path: str) -> bool:
    found = os.stat(path)
    if found.st_mode & stat.S_ISUID and found.st_uid != os.geteuid():
        return True
    if found.st_mode & stat.S_ISGID and found.st_gid != os.getegid():
        return True
    try:
        return bool(os.getxattr(path, "security.capability")) and os.geteuid() != 0
    except OSError:
        return False
