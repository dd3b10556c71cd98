"""Confinement: after a target has opened what it exports, the kernel holds it to serving that.

Three walls, each where the kernel has it: no new privileges; Landlock, which lets it reach no file, no
other TCP port and no other process; a seccomp filter, which lets it make the calls that serving takes,
on x86-64 and aarch64. What is already open stays usable, and nothing else: a host that took the
process over could read what was exported anyway, and go nowhere from there.

A call that is not let through fails with EPERM, it does not kill. Neither wall can be taken down again.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import hmac
import os
import platform
import struct
import time
import traceback
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.fabric.system_calls import ARCHITECTURES, CALLS, Architecture

__all__ = ["Confinement", "confine_calls", "confine_files"]

_PR_SET_NO_NEW_PRIVS = 38


@dataclass(frozen=True, slots=True)
class Confinement:
    """Which walls stand."""

    no_new_privileges: bool = False
    landlock: int = 0
    """The kernel's Landlock ABI; 0: there is none."""
    seccomp: bool = False

    def __str__(self) -> str:
        walls = (
            "no new privileges" if self.no_new_privileges else "",
            f"Landlock {self.landlock}" if self.landlock else "",
            "seccomp" if self.seccomp else "",
        )
        return ", ".join(wall for wall in walls if wall) or "none: this kernel has nothing for it"


def confine_files() -> Confinement:
    """Gives up privileges and the file system, for this thread and those that it will start.

    Descriptors that are open keep working. To be called before there are threads.
    """
    _load_what_comes_late()
    libc = _libc()
    allowed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    return Confinement(no_new_privileges=allowed, landlock=_restrict_files(libc) if allowed else 0)


def confine_calls(so_far: Confinement) -> Confinement:
    """Lets all threads of the process, and those to come, make only the calls that serving takes.

    Args:
        so_far: what `confine_files` returned.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None or not so_far.no_new_privileges:
        return so_far
    return replace(so_far, seccomp=_filter_calls(_libc(), architecture))


def _load_what_comes_late() -> None:
    """Python and libc open some files only when they are first needed; then is too late."""
    time.localtime()
    "".encode("idna")
    traceback.format_exc()
    for name in ("sha256", "sha384", "sha512"):
        hashlib.new(name)
        hmac.digest(b"key", b"", name)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


# -- Landlock -------------------------------------------------------------------------------------

_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_CREATE_RULESET_VERSION = 1
_RULESET = struct.Struct("=QQQ")  # handled_access_fs, handled_access_net, scoped
_CONNECT_TCP = 2
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def _restrict_files(libc: ctypes.CDLL) -> int:
    """The ABI, or 0. A ruleset with no rule: what it handles is forbidden."""
    abi = int(
        libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    )
    if abi < 1:
        return 0
    # Rights of files by ABI: 13 at first, then refer (2), truncate (3) and ioctl of devices (5).
    rights = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)
    # Listening is left alone: the target's socket is bound later.
    net = _CONNECT_TCP if abi >= 4 else 0
    scoped = _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0
    attributes = _RULESET.pack((1 << rights) - 1, net, scoped)
    # A kernel that does not know a field takes it if it is 0.
    fd = int(
        libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    )
    if fd < 0:
        return 0
    try:
        return abi if libc.syscall(_LANDLOCK_RESTRICT_SELF, fd, 0) == 0 else 0
    finally:
        os.close(fd)


# -- seccomp --------------------------------------------------------------------------------------

_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_RET_ALLOW, _RET_ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_NR_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # of struct seccomp_data
_X32_BIT = 0x40000000

_CLONE_THREAD = 0x00010000
_PROT_EXEC = 4
_AT_EMPTY_PATH = 0x1000
_IOCTLS = (0x5401, 0x5411, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCOUTQ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_PRCTLS = (15, 16, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME, PR_SET_VMA: names of threads and of memory."""


class _Bpf(NamedTuple):
    """One instruction."""

    code: int
    then: int
    otherwise: int
    k: int


_ALLOW = _Bpf(_RETURN, 0, 0, _RET_ALLOW)
_REFUSE = _Bpf(_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)
_NO_SUCH_CALL = _Bpf(_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS)


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter_calls(libc: ctypes.CDLL, architecture: Architecture) -> bool:
    program = _program(architecture)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    fprog = _SockFprog(len(program), code)
    # 0 is success; the number of a thread is that one's refusal to take the filter on.
    number = architecture.seccomp
    return int(libc.syscall(number, _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(fprog))) == 0


def _program(architecture: Architecture) -> list[_Bpf]:
    """The filter: each call of `CALLS`, some with conditions; everything else is refused."""
    program = [
        _Bpf(_LOAD, 0, 0, _ARCH_AT),
        _Bpf(_EQUAL, 1, 0, architecture.audit),
        _REFUSE,
        _Bpf(_LOAD, 0, 0, _NR_AT),
        _Bpf(_ABOVE, 0, 1, _X32_BIT),
        _REFUSE,
    ]
    conditions = {
        # New threads yes, new processes no. clone3 keeps its flags in memory, out of a filter's sight:
        # libc falls back to clone.
        "clone": _if_bit(0, _CLONE_THREAD, yes=_ALLOW, no=_REFUSE),
        "clone3": [_NO_SUCH_CALL],
        # No new code.
        "mmap": _if_bit(2, _PROT_EXEC, yes=_REFUSE, no=_ALLOW),
        "mprotect": _if_bit(2, _PROT_EXEC, yes=_REFUSE, no=_ALLOW),
        # Of what is open, not of a path.
        "newfstatat": _if_bit(3, _AT_EMPTY_PATH, yes=_ALLOW, no=_REFUSE),
        "ioctl": _if_one_of(1, _IOCTLS),
        "prctl": _if_one_of(0, _PRCTLS),
        # abort() ends us; nobody else is ours to signal.
        "tgkill": _if_one_of(0, (os.getpid(),)),
    }
    for name, numbers in CALLS.items():
        number = numbers[architecture.column]
        if number is not None:
            rest = conditions.get(name, [_ALLOW])
            program += [_Bpf(_EQUAL, 0, len(rest), number), *rest]
    return [*program, _REFUSE]


def _if_bit(argument: int, mask: int, *, yes: _Bpf, no: _Bpf) -> list[_Bpf]:
    return [_Bpf(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), _Bpf(_ANY_BIT, 0, 1, mask), yes, no]


def _if_one_of(argument: int, values: tuple[int, ...]) -> list[_Bpf]:
    tests = [_Bpf(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_Bpf(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *tests, _REFUSE, _ALLOW]
