"""capi: where the thin C API lies: `headrace.h`, `libheadrace.so`, and what build systems look for.

    cc program.c $(headrace config --cflags --libs)

The library is for programs without Python: docs/howto/c.md.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "cmake_dir",
    "compile_flags",
    "include_dir",
    "library_dir",
    "link_flags",
    "pkgconfig_dir",
]


def _installed() -> Path:
    """The folder of what was compiled: elsewhere than the modules in an editable install."""
    from headrace import _native

    return Path(os.fspath(_native.__file__)).parent


def include_dir() -> Path:
    """The folder of `headrace.h`."""
    return _installed() / "include"


def library_dir() -> Path:
    """The folder of `libheadrace.so`."""
    return _installed() / "lib"


def pkgconfig_dir() -> Path:
    """The folder of `headrace.pc`, for PKG_CONFIG_PATH."""
    return library_dir() / "pkgconfig"


def cmake_dir() -> Path:
    """The folder of `headraceConfig.cmake`, for `-Dheadrace_DIR=`."""
    return library_dir() / "cmake" / "headrace"


def compile_flags() -> list[str]:
    """What a C or C++ compiler needs to find the header."""
    return [f"-I{include_dir()}"]


def link_flags() -> list[str]:
    """What a linker needs; the program finds the library where it is now."""
    return [f"-L{library_dir()}", "-lheadrace", f"-Wl,-rpath,{library_dir()}"]
