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
from typing import Final, NamedTuple


class Architecture(NamedTuple):
    """How an architecture is told from others."""

    audit: int  # AUDIT_ARCH_* of its calls
    column: int  # of `CALLS`
    seccomp: int  # the number of seccomp(2)


ARCHITECTURES: Final = {
    "x86_64": Architecture(0xC000003E, 0, 317),
    "aarch64": Architecture(0xC00000B7, 1, 277),
}

CALLS: Final[dict[str, tuple[int | None, int | None]]] = {
    # Bytes of open files and of connections.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "preadv": (295, 69), "preadv2": (327, 286), "sendfile": (40, 71), "splice": (275, 76),
    "tee": (276, 77), "vmsplice": (278, 75), "sendto": (44, 206), "sendmsg": (46, 211),
    "sendmmsg": (307, 269), "recvfrom": (45, 207), "recvmsg": (47, 212), "recvmmsg": (299, 243),
    "lseek": (8, 62), "fadvise64": (221, 223), "readahead": (187, 213), "cachestat": (451, 451),
    "fstat": (5, 80), "newfstatat": (262, 79), "fcntl": (72, 25), "ioctl": (16, 29),
    "close": (3, 57), "dup": (32, 23), "dup3": (292, 24), "io_uring_enter": (426, 426),
    # Connections: taken from the socket that listens; never made.
    "accept": (43, 202), "accept4": (288, 242), "getsockname": (51, 204), "getpeername": (52, 205),
    "getsockopt": (55, 209), "setsockopt": (54, 208), "shutdown": (48, 210),
    # Waiting.
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "eventfd2": (290, 19), "pipe2": (293, 59),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    "restart_syscall": (219, 128),
    # Memory.
    "brk": (12, 214), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "mremap": (25, 216), "madvise": (28, 233), "mincore": (27, 232), "mlock": (149, 228),
    "munlock": (150, 229), "membarrier": (324, 283),
    # Threads, and the end.
    "clone": (56, 220), "clone3": (435, 435), "futex": (202, 98), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "rseq": (334, 293), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_setaffinity": (203, 122), "getcpu": (309, 168),
    "exit": (60, 93), "exit_group": (231, 94), "prctl": (157, 167),
    # Signals.
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigtimedwait": (128, 137), "rt_sigpending": (127, 136), "sigaltstack": (131, 132),
    "signalfd4": (289, 74), "tgkill": (234, 131),
    # What harms nobody.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getrandom": (318, 278),
    "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160), "times": (100, 153),
}  # fmt: skip
"""x86-64, aarch64; None where there is no such call. Some under conditions: see confinement.py."""


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
    """Lets all threads of the process, and those to come, make only the calls that serving takes."""
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
