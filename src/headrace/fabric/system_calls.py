"""The system calls that serving takes, by their numbers on each architecture."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["ARCHITECTURES", "CALLS", "Architecture"]


class Architecture(NamedTuple):
    """How an architecture is told from others.

    Attributes:
        audit: AUDIT_ARCH_* of its calls.
        column: of `CALLS`.
        seccomp: the number of seccomp(2).
    """

    audit: int
    column: int
    seccomp: int


ARCHITECTURES: Final = {
    "x86_64": Architecture(0xC000003E, 0, 317),
    "aarch64": Architecture(0xC00000B7, 1, 277),
}

CALLS: Final[dict[str, tuple[int | None, int | None]]] = {
    # Bytes of open files and of connections.
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "preadv2": (327, 286),
    "sendfile": (40, 71),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "recvmmsg": (299, 243),
    "lseek": (8, 62),
    "fadvise64": (221, 223),
    "readahead": (187, 213),
    "cachestat": (451, 451),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "close": (3, 57),
    "dup": (32, 23),
    "dup3": (292, 24),
    "io_uring_enter": (426, 426),
    # Connections: taken from the socket that listens; never made.
    "accept": (43, 202),
    "accept4": (288, 242),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    "setsockopt": (54, 208),
    "shutdown": (48, 210),
    # Waiting.
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "eventfd2": (290, 19),
    "pipe2": (293, 59),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "restart_syscall": (219, 128),
    # Memory.
    "brk": (12, 214),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "mincore": (27, 232),
    "mlock": (149, 228),
    "munlock": (150, 229),
    "membarrier": (324, 283),
    # Threads, and the end.
    "clone": (56, 220),
    "clone3": (435, 435),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "getcpu": (309, 168),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "prctl": (157, 167),
    # Signals.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigtimedwait": (128, 137),
    "rt_sigpending": (127, 136),
    "sigaltstack": (131, 132),
    "signalfd4": (289, 74),
    "tgkill": (234, 131),
    # What harms nobody.
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "times": (100, 153),
}
"""x86-64, aarch64; None where there is no such call. Some under conditions: see confinement.py."""
