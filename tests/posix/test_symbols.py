"""Every name under which the C library opens or looks at a file is replaced, or left alone for a reason."""

from __future__ import annotations

import ctypes.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.posix import launch

LEFT = {
    # Other things than files by their path.
    "fdopen", "fmemopen", "fopencookie", "popen", "pidfd_open", "mq_open", "__mq_open_2", "sem_open",
    "shm_open", "posix_openpt", "openpty", "openlog", "iconv_open", "catopen", "dlopen", "dlmopen",
    "fsopen", "open_tree", "open_memstream", "open_wmemstream", "statfs", "statfs64", "fstatfs",
    "fstatfs64", "__statfs", "statvfs", "statvfs64", "fstatvfs", "fstatvfs64", "ustat",
    "posix_spawn_file_actions_addopen", "_IO_fdopen", "_IO_popen", "_IO_proc_open", "initstate",
    "initstate_r", "setstate", "setstate_r", "malloc_stats", "__res_state",
    # Folders: they are listed by the file system.
    "opendir", "fdopendir", "fts_open", "fts64_open",
    # The streams' own, below fopen; nothing but the library calls them.
    "_IO_file_fopen", "_IO_file_open", "_IO_file_stat", "_IO_str_init_static",
    # By a handle, not a path.
    "open_by_handle_at",
}  # fmt: skip
NAMES = re.compile(
    r"^(_IO_|__)?(f|l|fx|lx|x)?(re|d)?(open|stat|fopen|creat|access)(at|x|64|at64|64_2|at64_2|at_2|_2)?$"
    r"|open|stat(x|at)?(64)?$|^(eu|f)?id?access|access(at)?$"
)


def _exported(path):
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", path], capture_output=True, check=True, text=True
    ).stdout
    names = {}
    for line in listing.splitlines():
        _, kind, name = line.split()
        symbol, _, version = name.partition("@")
        if kind in "TWi":
            names[symbol] = version
    return names


@pytest.fixture(scope="module")
def library():
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    maps = Path("/proc/self/maps").read_text()
    return _exported(re.search(r"\S+/libc\.so\.6", maps).group())


def test_no_variant_of_open_and_stat_is_missed(library):
    ours = _exported(launch.library("preload"))
    theirs = {
        name
        for name, version in library.items()
        if NAMES.search(name) and "GLIBC_PRIVATE" not in version
        and not name.startswith(("xdr_", "argp_", "svc", "pthread_"))
    }  # fmt: skip
    assert {"open", "__open64_2", "statx", "__fxstatat64", "freopen64", "creat"} <= theirs
    assert theirs - LEFT - set(ours) == set()


def test_the_shim_replaces_nothing_that_the_library_does_not_have(library):
    assert set(_exported(launch.library("preload"))) <= set(library)


def test_the_shim_brings_no_library_but_the_c_library():
    listing = subprocess.run(
        ["readelf", "-d", launch.library("preload")], capture_output=True, check=True, text=True
    ).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", listing) == ["libc.so.6"]
    assert ctypes.util.find_library("c") == "libc.so.6"
