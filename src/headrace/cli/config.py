"""`headrace config`: how programs in C and C++ find the header and the library."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.output import Json, Output

__all__ = ["config"]


def config(
    *,
    cflags: Annotated[bool, typer.Option("--cflags", help="Compiler flags.")] = False,
    libs: Annotated[bool, typer.Option("--libs", help="Linker flags.")] = False,
    include_dir: Annotated[
        bool, typer.Option("--include-dir", help="The folder of headrace.h.")
    ] = False,
    library_dir: Annotated[
        bool, typer.Option("--library-dir", help="The folder of libheadrace.so.")
    ] = False,
    pkgconfig_dir: Annotated[
        bool, typer.Option("--pkgconfig-dir", help="For PKG_CONFIG_PATH.")
    ] = False,
    cmake_dir: Annotated[bool, typer.Option("--cmake-dir", help="For -Dheadrace_DIR=.")] = False,
    as_json: Json = False,
) -> None:
    """Flags and folders of the C API, on one line; all of them, named, without options."""
    import shlex

    from headrace import capi

    output = Output(as_json=as_json)
    found = {
        "cflags": capi.compile_flags(),
        "libs": capi.link_flags(),
        "include_dir": [str(capi.include_dir())],
        "library_dir": [str(capi.library_dir())],
        "pkgconfig_dir": [str(capi.pkgconfig_dir())],
        "cmake_dir": [str(capi.cmake_dir())],
    }
    asked = {
        "cflags": cflags, "libs": libs, "include_dir": include_dir, "library_dir": library_dir,
        "pkgconfig_dir": pkgconfig_dir, "cmake_dir": cmake_dir,
    }  # fmt: skip
    if as_json:
        output.document(
            {
                name: shlex.join(words)
                for name, words in found.items()
                if asked[name] or not any(asked.values())
            }
        )
    elif any(asked.values()):
        output.line(" ".join(shlex.join(words) for name, words in found.items() if asked[name]))
    else:
        for name, words in found.items():
            output.line(f"{name.replace('_', '-'):<14}{shlex.join(words)}")
